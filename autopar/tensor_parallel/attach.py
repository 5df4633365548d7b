"""What ``initialize`` hangs on a Hugging Face model: hooks around its forward, and methods that would be wrong.

Hooks are objects and methods are bound, so that ``copy.deepcopy`` of the model carries over both.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from autopar.errors import ConfigError
from autopar.layout import Layout
from autopar.mesh import MPU
from autopar.policy.plan import Plan
from autopar.roll_call import RollCall
from autopar.tensor_parallel.attentions import head_layouts, whole_attentions
from autopar.tensor_parallel.causal_loss import attach_loss, detach_loss
from autopar.tensor_parallel.consistency import check_inputs, shard_digest, share_random_state
from autopar.tensor_parallel.first_call import FirstCall
from autopar.tensor_parallel.regions import Region

__all__ = ["attach", "detach"]

_NAMES = ("generate", "resize_token_embeddings", "save_pretrained", "_autopar_roll")


def attach(model: nn.Module, plan: Plan, mpu: MPU, region: Region, roll: RollCall, check: bool) -> None:
    """Hang hooks and methods on ``model`` and its base model (which users call by itself, too).

    A plain module gets the hooks: what its outputs are is its own affair.

    Args:
        roll: who says what went wrong in ``generate``.
        check: compare the inputs of the first forward over tp.
    """
    layouts = head_layouts(plan) if plan.tp > 1 and isinstance(model, PreTrainedModel) else []
    known = frozenset(name for name, _ in model.named_parameters())
    for module in _callable_alone(model):
        outermost = module is model
        before = BeforeForward(mpu, region, check and outermost, known if outermost and plan.tp > 1 else None)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(AfterForward(mpu, region, layouts), always_call=True)
        methods: dict[str, Any] = {}
        if isinstance(module, PreTrainedModel):
            methods["resize_token_embeddings"] = _refuse_resize
        if plan.tp > 1 and isinstance(module, PreTrainedModel):
            methods["save_pretrained"] = _refuse_save
            if callable(getattr(module, "generate", None)):
                methods["generate"] = _generate
        for name, function in methods.items():
            setattr(module, name, types.MethodType(function, module))
        module._autopar_roll = roll  # type: ignore[assignment]
    if plan.tp > 1 and isinstance(model, PreTrainedModel):
        attach_loss(model, region, mpu.tp)


def detach(model: nn.Module) -> None:
    """Inverse of :func:`attach`."""
    detach_loss(model)
    for module in _callable_alone(model):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _HOOKS)]:
                hooks.pop(key)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
        for name in _NAMES:
            module.__dict__.pop(name, None)


def _callable_alone(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and the Hugging Face models inside."""
    yield from (module for module in model.modules() if module is model or isinstance(module, PreTrainedModel))


class BeforeForward:
    """Forward pre-hook: random streams to their start; on the first forward of each mode, compare the inputs."""

    def __init__(self, mpu: MPU, region: Region, check: bool, known: frozenset[str] | None) -> None:
        self.mpu, self.region = mpu, region
        self.unchecked = {True, False} if check else set[bool]()  # training mode, evaluation mode
        self.known = known

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.known is not None:
            _refuse_new_parameters(model, self.known)
            self.known = None
        self.region.start()
        if model.training in self.unchecked:
            self.unchecked.discard(model.training)
            positional = dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
            check_inputs(
                {**positional, **kwargs},
                self.mpu,
                random_state=self.region.draws(model.training),
                shard=shard_digest(model),
            )


def _refuse_new_parameters(model: nn.Module, known: frozenset[str]) -> None:
    """Parameters that came after ``initialize`` (adapters) would compute with a part of what they should see."""
    new = [name for name, _ in model.named_parameters() if name not in known]
    if new:
        more = " ..." if len(new) > 3 else ""
        raise ConfigError(
            f"{len(new)} parameters of {type(model).__name__} came after autopar.initialize, which does not know "
            f"how to share them out: {', '.join(new[:3])}{more}. Add modules (adapters) before."
        )


class AfterForward:
    """Forward hook, called after an error too: random streams back, attention maps whole."""

    def __init__(self, mpu: MPU, region: Region, layouts: list[Layout]) -> None:
        self.mpu, self.region, self.layouts = mpu, region, layouts

    def __call__(self, model: Any, args: Any, output: Any) -> Any:
        self.region.finish()
        if self.region.running or self.mpu.tp.size == 1 or output is None:
            return None  # inside another of the model's forwards, or a forward that failed
        return whole_attentions(output, self.mpu.tp, self.layouts)


_HOOKS = (BeforeForward, AfterForward, FirstCall)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` that samples alike on all tensor-parallel ranks: they share the first one's random state."""
    roll: RollCall = self._autopar_roll
    with roll.patience(), roll.naming("a collective in generate", roll.mpu.tp.ranks):
        share_random_state(roll.mpu)
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
