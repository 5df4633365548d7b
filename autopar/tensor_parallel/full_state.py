"""State dicts of a model that was built of parallel layers: whole, as those of the plain model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.errors import CheckpointError
from autopar.layout import Layout

__all__ = ["full_state_dict", "load_full_state_dict"]


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the plain model, with whole weights, on every rank; every rank of the group calls it.

    Its names are the model's own, so that a plain model with the same names loads it, on any number of ranks.
    """
    sharded = dict(_sharded(model))
    whole: dict[str, torch.Tensor] = {}
    done: dict[int, torch.Tensor] = {}  # tied weights are gathered once
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            value = tensor.detach()
            if name in sharded:
                axis, layout = sharded[name]
                value = all_gather(value, axis, layout, layout.dim)
            done[id(tensor)] = value
        whole[name] = done[id(tensor)]
    return whole


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load the state dict of the plain model: every rank takes its shards. No communication.

    Raises:
        CheckpointError: names or whole shapes differ; nothing is loaded.
    """
    sharded = dict(_sharded(model))
    own = model.state_dict(keep_vars=True)
    missing, unexpected = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or unexpected:
        raise CheckpointError(
            f"the state dict does not fit {type(model).__name__}: missing {', '.join(missing[:3]) or 'none'}; "
            f"unexpected {', '.join(unexpected[:3]) or 'none'}"
        )
    for name, tensor in own.items():
        due = list(tensor.shape)
        if name in sharded:
            due[sharded[name][1].dim] = sharded[name][1].size
        if list(state[name].shape) != due:
            raise CheckpointError(f"{name} has shape {list(state[name].shape)}, the whole one of the model has {due}")
    for name, tensor in own.items():
        axis, layout = sharded.get(name, (None, None))
        tensor.data.copy_(state[name] if layout is None or axis is None else layout.shard(state[name], axis.rank))


def _sharded(model: nn.Module) -> Iterator[tuple[str, tuple[Axis, Layout]]]:
    for path, module in model.named_modules(remove_duplicate=False):
        found: Mapping[str, Any] = getattr(module, "autopar_layouts", {})
        for name, layout in found.items():
            yield f"{path}.{name}".lstrip("."), (module.tp, layout)
