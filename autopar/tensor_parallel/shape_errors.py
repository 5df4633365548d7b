"""Add to torch's words about shapes that do not fit: the weight of which this rank has a shard."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable

from torch import nn

from autopar.distributed.axis import Axis
from autopar.foreign.modules import own_parameters
from autopar.layout import Layout

_LISTED = 3


def shards_named(model: nn.Module) -> Callable[[BaseException], str | None]:
    """Return a function that tells of an error which sharded parameters have the sizes that it names; None of others.

    The model is held weakly.
    """
    held = weakref.ref(model)

    def explain(error: BaseException) -> str | None:
        living, text = held(), str(error)
        if living is None or not isinstance(error, RuntimeError) or not re.search(r"\b(size|shape)", text):
            return None
        sizes = {int(number) for number in re.findall(r"\d+", text)}
        found: dict[int, str] = {}  # tied ones once
        for name, module in living.named_modules():
            found = _fitting(name, module, sizes) | found
        if not found:
            return None
        more = f"\n  and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        return (
            "autopar: parameters of these sizes are shards of whole ones:\n"
            + "\n".join(list(found.values())[:_LISTED])
            + more
            + "\n  What was made of whole weights (an average, a product) fits them before autopar.initialize, or "
            "after autopar.deparallelize(model)."
        )

    return explain


def _fitting(path: str, module: nn.Module, sizes: set[int]) -> dict[int, str]:
    """Describe the shards of a module of which both sizes, here and in the plain model, are among ``sizes``, by id."""
    axis: Axis | None = vars(module).get("tp")
    layouts: dict[str, Layout] = vars(module).get("autopar_layouts", {})
    lines: dict[int, str] = {}
    if axis is None:
        return lines
    for name, layout in layouts.items():
        parameter = own_parameters(module).get(name)
        if parameter is None or parameter.shape[layout.dim] == layout.size:
            continue
        if {parameter.shape[layout.dim], layout.size} <= sizes:
            whole = [*parameter.shape]
            whole[layout.dim] = layout.size
            lines[id(parameter)] = f"  {path}.{name}: rank {axis.rank}'s shard {list(parameter.shape)} of {whole}"
    return lines
