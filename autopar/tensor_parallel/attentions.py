"""Attention maps of sharded heads, and hidden states of sequence parallelism, in what a model returns.

Blocks have maps of this rank's heads and rows of the sequence. Users get both whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gather
from autopar.layout import Block, Layout
from autopar.plan.plan import Plan
from autopar.tensor_parallel.regions import Region

_OTHER_HEADS = ("kv_heads", "state_heads", "key_heads", "value_heads")


def head_layouts(plan: Plan) -> list[Layout]:
    """Return the different layouts of attention heads in this model; one element is one head."""
    found: dict[Any, Layout] = {}
    for module in plan.modules.values():
        for block in module.layout.blocks if module.layout is not None else ():
            if "heads" in block.unit and block.unit not in _OTHER_HEADS:
                found[block.count, block.ranges] = Layout.of(1, [Block(block.unit, block.count, 1, block.ranges)])
    return [layout for layout in found.values() if not layout.replicated]


def gather_attentions(output: Any, axis: Axis, layouts: list[Layout]) -> Any:
    """Gather every attention map in ``output``; a collective of the axis if there is any.

    The layout of a map follows from its sizes on all ranks, so that every rank chooses the same.
    """
    maps: list[torch.Tensor] = []

    def collect(x: torch.Tensor) -> torch.Tensor:
        maps.append(x)
        return x

    _walk(output, collect, inside=False)
    return _gather_maps(output, maps, axis, layouts) if maps and layouts else output


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather_maps(output: Any, maps: list[torch.Tensor], axis: Axis, layouts: list[Layout]) -> Any:
    sizes: list[list[int]] = [[]] * axis.size
    dist.all_gather_object(sizes, [x.shape[1] for x in maps], group=axis.group)
    known = {tuple(layout.local_size(rank) for rank in range(axis.size)): layout for layout in layouts}
    chosen = iter([known.get(each) for each in zip(*sizes, strict=True)])

    def full(x: torch.Tensor) -> torch.Tensor:
        layout = next(chosen)
        return x if layout is None else gather(x, axis, layout, dim=1)

    return _walk(output, full, inside=False)


def _walk(value: Any, change: Any, inside: bool) -> Any:
    """``value`` with ``change`` applied to each map; ``inside``: below a key that names attention maps."""
    if isinstance(value, dict):
        for name in list(value):
            entry = value[name]
            if isinstance(entry, (tuple, list, dict, torch.Tensor)) and not (inside is False and _plain(name, entry)):
                value[name] = _walk(entry, change, inside or "attentions" in name)
        return value
    if isinstance(value, (tuple, list)):
        maps = inside or (len(value) > 0 and all(isinstance(x, torch.Tensor) and x.ndim == 4 for x in value))
        return type(value)([_walk(entry, change, maps) for entry in value]) if type(value) in (tuple, list) else value
    return change(value) if inside and isinstance(value, torch.Tensor) and value.ndim == 4 else value


def _plain(name: str, entry: Any) -> bool:
    """Entries of a dict that hold no maps by their name: hidden states, features, caches."""
    return "attentions" not in name and not isinstance(entry, dict)


def gather_hidden_states(output: Any, region: Region) -> Any:
    """Return what a model returns with hidden states gathered; a collective of the axis if it holds rows."""
    if isinstance(output, torch.Tensor):
        ref, gather = region.row_tensors.get(id(output), (None, None))
        return gather(output) if ref is not None and gather is not None and ref() is output else output
    if isinstance(output, dict):
        for name, value in list(output.items()):
            changed = gather_hidden_states(value, region)
            if changed is not value:
                output[name] = changed
        return output
    if type(output) in (tuple, list):
        entries = [gather_hidden_states(entry, region) for entry in output]
        same = all(new is old for new, old in zip(entries, output, strict=True))
        return output if same else type(output)(entries)
    return output
