"""initialize() and deparallelize(): config -> mesh -> policy -> plan -> the model, in place."""

from __future__ import annotations

import hashlib
import inspect
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar import checkpoint
from autopar.config import ParallelConfig
from autopar.errors import AutoparError, ConfigError, ConsistencyError
from autopar.mesh import MPU
from autopar.policy.match import find_policy
from autopar.policy.plan import Plan
from autopar.policy.resolve import hugging_face_model, make_plan
from autopar.policy.schema import Policy
from autopar.tensor_parallel import parallelize
from autopar.tensor_parallel.consistency import check_inputs, share_random_state
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.rehearsal import rehearse

__all__ = ["deparallelize", "initialize"]

Model = TypeVar("Model", bound=nn.Module)


def initialize(
    model: Model,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
) -> Model:
    """Turn a Hugging Face model that sits in memory into this rank's share of a parallel one, in place.

    Every process calls it with the same model and config. Parameter objects keep their identity, so an optimizer made
    before goes on working. Under nccl the share moves to this rank's GPU.

    Args:
        model: a ``PreTrainedModel``, or a module with one inside. Ranks may hold different random weights: all get
            those of the first rank of their tensor-parallel group.
        config: dict, path of a JSON or YAML file, or :class:`~autopar.config.ParallelConfig`. The data-parallel size
            is what remains of the world. Without torchrun the world is this one process.
        policy: path, dict or YAML text of a policy of your own; None finds the one that lists the model type.

    Returns:
        ``model`` itself, with ``model.mpu`` (:class:`~autopar.mesh.MPU`), ``model.save_parallelized`` and
        ``model.from_parallelized``.

    Raises:
        ConfigError, UnsupportedModelError, PolicyError, ConsistencyError: before anything is changed, on every rank.
    """
    parsed = ParallelConfig.parse(config)
    _refuse_second(model)
    prefix, inner = hugging_face_model(model)
    _check_available(parsed, inner)
    mpu = MPU(parsed.tensor_parallel_size, parsed.pipeline_parallel_size)
    try:
        plan = _agree_on_plan(model, prefix, inner, policy, mpu)  # every check is here; the model is untouched so far
    except AutoparError:
        mpu.destroy()
        raise
    parallelize.make_equal(model, mpu)
    share_random_state(mpu)
    region = Region(mpu.tp)
    parallelize.apply(model, plan, mpu.tp, region)
    if mpu.device.type == "cuda" and not next(model.parameters()).is_meta:
        model.to(mpu.device)
    if parsed.activation_checkpointing:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _attach(model, inner, plan, mpu, region, parsed)
    checkpoint.attach(model, plan, mpu, inner, prefix)
    return model


def deparallelize(model: Model) -> Model:
    """Give back the plain model with full weights on every rank; every rank calls it.

    Parameter objects keep their identity, gradients are made whole too. The state of an optimizer is not: make a new
    one, or step before.

    Raises:
        ConfigError: the model is not parallelized.
    """
    state: _State | None = vars(model).get("_autopar")
    if state is None:
        raise ConfigError(f"{type(model).__name__} is not parallelized; autopar.initialize does that")
    _, inner = hugging_face_model(model)
    parallelize.undo(model, state.plan, state.mpu.tp)
    for module in (inner, inner.base_model):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, (_BeforeForward, _AfterForward))]:
                hooks.pop(key)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
    for name in _INNER_METHODS:
        vars(inner).pop(name, None)
    if state.config.activation_checkpointing:
        inner.gradient_checkpointing_disable()
    checkpoint.detach(model)
    del model._autopar, model.mpu
    return model


class _State:
    """What initialize leaves on the model for deparallelize and for the second call to find."""

    def __init__(self, plan: Plan, mpu: MPU, config: ParallelConfig) -> None:
        self.plan, self.mpu, self.config = plan, mpu, config


def _refuse_second(model: nn.Module) -> None:
    for path, module in model.named_modules():
        state: _State | None = vars(module).get("_autopar")
        if state is not None:
            tp, pp, dp = state.mpu.sizes
            raise ConfigError(
                f"{type(module).__name__}{f' at {path}' if path else ''} is parallelized already: "
                f"tensor_parallel_size={tp}, pipeline_parallel_size={pp}, data-parallel size {dp}.\n"
                "  autopar.deparallelize(model) gives back the plain model, which can be initialized again."
            )


def _check_available(config: ParallelConfig, inner: PreTrainedModel) -> None:
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: this version has tensor and data parallelism "
            "only; set pipeline_parallel_size to 1."
        )
    if config.activation_checkpointing and not inner.supports_gradient_checkpointing:
        raise ConfigError(
            f"activation_checkpointing: {type(inner).__name__} does not support it; leave the section out."
        )


def _agree_on_plan(
    model: nn.Module,
    prefix: str,
    inner: PreTrainedModel,
    policy: str | Path | Mapping[str, Any] | Policy | None,
    mpu: MPU,
) -> Plan:
    """Make the plan; if it fails on one rank, or ranks hold different models, every rank raises."""
    plan: Plan | None = None
    error: AutoparError | None = None
    try:
        plan = make_plan(model, find_policy(inner, policy), mpu.tp.size)
        rehearse(inner, prefix, plan)
        verdict = ("plan", _digest(plan))
    except AutoparError as caught:
        error, verdict = caught, ("error", str(caught))
    verdicts: list[tuple[str, str]] = [verdict] * mpu.world_size
    if mpu.world_size > 1:
        dist.all_gather_object(verdicts, verdict, group=mpu.control)
    if error is not None:
        raise error
    for rank, (kind, text) in enumerate(verdicts):
        if kind == "error":
            raise ConsistencyError(f"rank {rank} cannot initialize its model, so no rank does:\n{text}")
    if len(set(verdicts)) > 1:
        different = [rank for rank, other in enumerate(verdicts) if other != verdicts[0]]
        raise ConsistencyError(
            f"ranks {different} hold another model than rank 0 (names or shapes of tensors, or the policy, differ): "
            "every rank must initialize the same model"
        )
    assert plan is not None
    return plan


def _digest(plan: Plan) -> str:
    content = [plan.model_type, [[t.name, t.shape, t.dtype, t.aliases] for t in plan.tensors.values()]]
    content += [[[m.path, m.rule] for m in plan.modules.values()]]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


# -- what is attached to the model --------------------------------------------------------------------------------


class _BeforeForward:
    """Forward pre-hook of the Hugging Face model. An object, not a closure, so that ``deepcopy`` carries it over."""

    def __init__(self, mpu: MPU, region: Region, check: bool) -> None:
        self.mpu, self.region = mpu, region
        self.unchecked = {True, False} if check else set[bool]()  # training mode, evaluation mode

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.region.start(model.training)
        if model.training in self.unchecked:
            self.unchecked.discard(model.training)
            names = list(inspect.signature(model.forward).parameters)
            positional = dict(zip(names, args, strict=False))
            check_inputs({**positional, **kwargs}, self.mpu, random_state=self.region.draws)


class _AfterForward:
    """Forward hook, called after an error too."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def __call__(self, *_: Any) -> None:
        self.region.leave()
        self.region.forget()


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` that samples alike on all tensor-parallel ranks: they share the first one's random state."""
    share_random_state(self.mpu_of_autopar)
    return type(self).generate(self, *args, **kwargs)


def _refuse_resize(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        f"resize_token_embeddings: the vocabulary of this {type(self).__name__} is shared out already. "
        "Resize before autopar.initialize, or after autopar.deparallelize(model)."
    )


def _refuse_save(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        f"save_pretrained: this rank holds only its share of {type(self).__name__}. "
        "Use model.save_parallelized(dir, merge_checkpoints=True), on every rank, for a folder that from_pretrained "
        "reads."
    )


_INNER_METHODS = ("generate", "resize_token_embeddings", "save_pretrained", "mpu_of_autopar")


def _attach(
    model: nn.Module, inner: PreTrainedModel, plan: Plan, mpu: MPU, region: Region, config: ParallelConfig
) -> None:
    region.watch(model)
    check = config.consistency_check
    for module in {id(m): m for m in (inner, inner.base_model)}.values():  # users call the base model by itself too
        module.register_forward_pre_hook(_BeforeForward(mpu, region, check and module is inner), with_kwargs=True)
        module.register_forward_hook(_AfterForward(region), always_call=True)
    methods: dict[str, Any] = {"resize_token_embeddings": _refuse_resize}
    if plan.tp > 1:
        methods["save_pretrained"] = _refuse_save
        if hasattr(inner, "generate"):
            methods["generate"] = _generate
    for name, function in methods.items():
        setattr(inner, name, types.MethodType(function, inner))  # deepcopy rebinds a bound method to the copy
    inner.mpu_of_autopar = mpu  # type: ignore[assignment]
    model.mpu = mpu  # type: ignore[assignment]
    model._autopar = _State(plan, mpu, config)  # type: ignore[assignment]
