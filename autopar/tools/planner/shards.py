"""One rank's shard of a model on the meta device, as it runs: in the run's precision, with rows of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.context_parallel import apply as context_parallel
from autopar.context_parallel.state import RowPlan
from autopar.data_parallel.precision import DTYPES, MasterWeights, to_half
from autopar.distributed.axis import Axis
from autopar.dry_run.equal_blocks import EqualBlocks, equal_blocks
from autopar.dry_run.inputs import meta_copy
from autopar.foreign.transformers import ATTENTION, EXPERTS
from autopar.plan.plan import Plan
from autopar.tensor_parallel import sequence_parallel
from autopar.tensor_parallel.apply import keep_logits_sharded
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sequence_parallel import SequencePlan
from autopar.tools.planner.candidate import Rows

__all__ = ["Shard", "make_shard"]

_EAGER = "eager"


@dataclass(frozen=True)
class Shard:
    """A shard that can be counted.

    Attributes:
        inner: the Hugging Face model in it.
        equal: blocks that are, seen from ``inner``.
    """

    inner: Any
    region: Region
    equal: Sequence[EqualBlocks]


def make_shard(
    model: nn.Module,
    prefix: str,
    plan: Plan,
    rows: Rows,
    *,
    precision: str,
    loss_chunk: int,
    method: str = "auto",
    sequence: SequencePlan | None = None,
    context: RowPlan | None = None,
) -> Shard:
    """Make the shard of one rank, in training mode and with the attention of the run.

    Args:
        model: whole, only read.
        method: of context parallelism, as in the configuration.
        sequence: with sequence parallelism; ``context``: with context parallelism.
    """
    equal = equal_blocks(model, plan)
    shard: Any = meta_copy(model, gradients=True)
    for parameter, original in zip(shard.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad and original.is_floating_point())
    for copied, module in zip(shard.modules(), model.modules(), strict=True):
        for name in (ATTENTION, EXPERTS):
            own = getattr(getattr(module, "config", None), name, None)
            if own is not None:
                setattr(copied.config, name, own if own == _EAGER or name[1] == "e" else "sdpa")
    region = Region(Axis("tp", None, range(plan.tp), rows.tp_rank))
    apply(shard, plan, region.axis, region)
    inner = shard.get_submodule(prefix)
    if plan.tp > 1:
        keep_logits_sharded(inner, loss_chunk)
    dtype = DTYPES.get(precision)
    if dtype is not None:
        to_half(shard, inner, dtype, MasterWeights(), lambda parameter: False)
    for config in {id(m.config): m.config for m in shard.modules() if hasattr(m, "config")}.values():
        config.use_cache = False
    lists: Sequence[Sequence[str]] = ()
    if sequence is not None:
        sequence_parallel.apply(shard, sequence, region)
        lists = [[_below(path, prefix) for path in each] for each in sequence.lists]
    if context is not None:
        context_parallel.apply(inner, context, Axis("cp", None, range(rows.cp), rows.cp_rank), method)
        lists = context.lists
    shard.train()
    return Shard(inner, region, [] if prefix else _without_ends(equal, {each[-1] for each in lists}))


def _below(path: str, prefix: str) -> str:
    return path.removeprefix(f"{prefix}.") if prefix else path


def _without_ends(equal: Sequence[EqualBlocks], ends: set[str]) -> list[EqualBlocks]:
    """The last block of a list makes rows whole again: no other does what it does."""
    left = [replace(group, paths=tuple(path for path in group.paths if path not in ends)) for group in equal]
    return [group for group in left if group.paths]
