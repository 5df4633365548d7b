"""Apply tensor parallelism to one model: shard layers and parameters, attach hooks and methods, and undo it all."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar import registry
from autopar.compat.tensors import forward_hooks
from autopar.config import ParallelConfig
from autopar.distributed.axis import Axis
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.guards.step import StepCheck
from autopar.layout import Block, Layout
from autopar.plan.plan import ModulePlan, Plan
from autopar.swap import bind, unbind
from autopar.tensor_parallel import hooks
from autopar.tensor_parallel.regions import Region

_OWNER = "tensor parallelism"
_MODELS = itertools.count(1)  # identical on all ranks, which create models in the same order


def apply(model: nn.Module, inner: nn.Module, plan: Plan, mpu: MPU, config: ParallelConfig) -> Region:
    """Swap the layers of ``model`` and shard its parameters in place; with tp=1 only the head, for ``loss.chunk``."""
    region = Region(mpu.tp)
    region.model = str(next(_MODELS))
    if plan.shards > 1:
        from autopar.tensor_parallel import parallelize

        parallelize.apply(model, plan, mpu.tp, region, mpu.shards)
    if plan.tp == 1 and config.loss_chunk:
        chunk_head(inner, mpu.tp, region)
    region.find_dropout(model)
    return region


def attach(
    inner: nn.Module,
    plan: Plan,
    mpu: MPU,
    config: ParallelConfig,
    region: Region,
    failures: FailureLog,
    steps: StepCheck,
) -> None:
    """Register hooks and methods on the Hugging Face model or plain module. A collective of tp and cp."""
    check = None
    if config.consistency_check and mpu.tp_cp.size > 1:
        make = registry.entry("guards", "forward")
        check = None if make is None else make(inner, mpu, config, failures, region.draws, steps)
    sharded = plan.shards > 1 or mpu.tp_cp.size > 1 or bool(config.loss_chunk)
    hooks.attach(inner, plan, mpu, region, failures, check, sharded=sharded)
    refuse_methods(inner, plan, mpu)
    if mpu.tp_cp.size > 1:
        draw_seeds_alike(inner)
    if (plan.tp > 1 or config.loss_chunk) and config.loss_gather_logits == "on_read":
        kept = keep_logits_sharded(inner, config.loss_chunk)
        if config.loss_chunk and not kept and dist.get_rank() == 0:
            warnings.warn(
                f"loss.chunk={config.loss_chunk} has no effect on {type(inner).__name__}: its output head must be an "
                "nn.Linear layer.\n  Remove loss.chunk from the config.",
                stacklevel=2,
            )


def refuse_methods(model: nn.Module, plan: Plan, mpu: MPU) -> None:
    """Replace methods that a sharded Hugging Face model does not support by functions that raise."""
    generates = registry.installed("generate")
    for module in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        bind(module, _OWNER, resize_token_embeddings=_refuse_resize)
        if not generates:
            names = generating_methods(module, plan, mpu)
            bind(module, _OWNER, **{name: functools.partial(_need_generation, name) for name in names})


def generating_methods(module: nn.Module, plan: Plan, mpu: MPU) -> list[str]:
    """Return the names of the generation methods that all ranks of ``module`` must run together."""
    names = ["generate"] if mpu.model.size > 1 or plan.experts else []
    names += ["init_continuous_batching", "generate_batch"] if mpu.world_size > 1 else []
    return [name for name in names if callable(getattr(module, name, None))]


def _refuse_resize(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        f"resize_token_embeddings is not supported on a parallelized {type(self).__name__}: its vocabulary is "
        "sharded.\n  Resize before autopar.initialize, or after autopar.deparallelize(model)."
    )


def _need_generation(name: str, self: Any, *_: Any, **__: Any) -> None:
    registry.need("generate", f"{type(self).__name__}.{name} on several ranks")


def chunk_head(model: nn.Module, axis: Axis, region: Region) -> None:
    """Make the head of a language model a column-parallel layer with a single shard; for ``loss.chunk`` with tp=1."""
    head = _head_of(model)
    if type(head) is nn.Linear:
        from autopar.tensor_parallel import parallelize

        layout = Layout.of(0, [Block("feature", head.out_features, 1, ((0, head.out_features),))])
        layouts = dict.fromkeys(("weight",) if head.bias is None else ("weight", "bias"), layout)
        parallelize.swap(
            head, ModulePlan("", "column", "loss.chunk", layout, layouts, gather_output=True), axis, region
        )


def _head_of(model: nn.Module) -> nn.Module | None:
    return model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None


def keep_logits_sharded(model: nn.Module, chunk: int) -> bool:
    """Let the head of a language model gather its logits lazily; return whether it can."""
    from autopar.tensor_parallel.layers import ParallelLayer

    head = _head_of(model)
    if not isinstance(head, ParallelLayer) or not isinstance(head, nn.Linear) or not head.autopar.gather_output:
        return False
    layout = head.autopar_layouts["weight"]
    ranges = [list(layout.ranges(rank)) for rank in range(head.tp.size)]
    if layout.replicated or any(len(held) > 1 for held in ranges) or sorted(ranges) != ranges:
        return False
    head.chunk = chunk
    return True


def mark_parameters(model: nn.Module, inner: nn.Module, plan: Plan, mpu: MPU) -> None:
    """Mark experts that are distributed over replicas. The last step, because FSDP replaces parameters."""
    for module in hooks.callable_alone(inner):  # read the new parameters; holding the old ones wastes memory
        for _, _, hook in forward_hooks(module):
            if isinstance(hook, hooks.BeforeForward) and hook.tree is not None:
                hook.tree.check(module)
    for name, parameter in model.named_parameters():
        if name in plan.experts:
            parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron-LM's mark: differs over replicas


def undo(model: nn.Module, inner: nn.Module, plan: Plan, mpu: MPU) -> None:
    """Restore plain layers with full weights and gradients, and remove hooks and methods. A collective of tp."""
    from autopar.tensor_parallel import parallelize
    from autopar.tensor_parallel.layers import ParallelLayer

    if plan.shards > 1:
        parallelize.undo(model, plan)
    head = _head_of(inner)
    if isinstance(head, ParallelLayer):  # of chunk_head
        parallelize.swap_back(head)
    hooks.detach(inner)
    unbind(inner, _OWNER)
    for parameter in model.parameters():
        vars(parameter).pop("allreduce", None)


_SEED = re.compile(r"_init_(\w*seed)")


def draw_seeds_alike(model: nn.Module) -> None:
    """Let reversible layers draw the seed of each forward from torch's CPU generator; :func:`undo` undoes it.

    These layers seed the generators before they recompute activations. With a different seed on each rank, ranks would
    drop different elements of one activation and hash it into different buckets.
    """
    for module in model.modules():
        kind: Any = type(module)
        for name, attribute in _renewals(kind):
            if attribute in vars(module):
                bind(module, _OWNER, **{name: functools.partial(_renew, attribute)})


@functools.cache
def _renewals(kind: Any) -> tuple[tuple[str, str], ...]:
    """Return the methods ``_init_..._seed``, each with the attribute ``..._seed`` that it renews."""
    found = [(name, match) for name in dir(kind) if (match := _SEED.fullmatch(name)) is not None]
    return tuple((name, str(match[1])) for name, match in found if callable(getattr(kind, name)))


def _renew(attribute: str, module: Any) -> None:
    seed = int(torch.randint(2**62, (), device="cpu").item())
    setattr(module, attribute, seed)
    torch.manual_seed(seed)
