"""``summary``: what a parallelized model is made of, and what this rank holds of it, as a table."""

from __future__ import annotations

from typing import Any

from torch import nn

from autopar.errors import not_parallelized
from autopar.plan.plan import held as held_here
from autopar.plan.plan import rows, rule_of
from autopar.tools.tables import lines, shape, table


def summary(model: nn.Module) -> str:
    """Print a table of a parallelized model on the first rank: parameters, how they are sharded, what this rank holds.

    Returns:
        The table of this rank, on every rank. No communication.

    Raises:
        ConfigError: the model is not parallelized.
    """
    from rich.markup import escape

    state = vars(model).get("_autopar")
    if state is None:
        raise not_parallelized(model)
    mpu, plan, stages = state.mpu, state.plan, state.stages
    held = dict(model.named_parameters())
    entries: list[dict[str, Any]] = []
    for name, tensor in plan.tensors.items():
        here: Any = held.get(name)
        names = [name, *tensor.aliases]
        here = next((held[each] for each in names if each in held), None) if here is None else here
        if here is None and not any(each in stages.tensors for each in names):
            continue
        local = here.to_local() if hasattr(here, "to_local") else here
        if here is None and mpu.pp.rank in stages.holders(name):
            continue  # a buffer
        entries.append(
            {
                "name": name,
                "shape": shape(tensor.shape),
                "rule": rule_of(plan, tensor),
                "here": "-" if local is None else shape(local.shape),
                "dtype": tensor.dtype if local is None else str(local.dtype).removeprefix("torch."),
                "stages": ", ".join(map(str, stages.holders(name))),
            }
        )
    staged = mpu.pp.size > 1
    header = ["parameter", "shape", "rule", "on this rank", "dtype", *(["pp rank"] if staged else [])]
    tensors = table(*header)
    for name, row in rows(entries):
        tensors.add_row(*map(escape, [name, *list(row.values())[1 : len(header)]]))
    sizes = mpu.sizes._asdict()
    if sizes.get("cp") == 1:
        del sizes["cp"]
    if mpu.ep.size > 1:
        sizes["ep"] = mpu.ep.size
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    place = f"{mesh}, rank {mpu.rank}: " + ", ".join(f"{axis} {getattr(mpu, axis).rank}" for axis in sizes)
    elements, size = held_here(model)
    text = [
        f"{plan.model_type} by policy {plan.policy}; {place}",
        *filter(None, lines(tensors)),
        f"this rank: {elements:,} parameters, {size / 1e6:,.1f} MB",
    ]
    if mpu.is_master:
        print("\n".join(text))
    return "\n".join(text)
