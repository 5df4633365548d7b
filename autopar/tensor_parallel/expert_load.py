"""Count which experts of a mixture the tokens of all ranks have chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.distributed.gloo_collectives import all_reduce
from autopar.errors import ConfigError
from autopar.tensor_parallel.experts import ExpertParallel


@torch.no_grad()
def expert_load(model: nn.Module, *, reset: bool = True) -> dict[str, torch.Tensor]:
    """Return how many tokens each expert has been given since the last call; every rank calls it.

    A token counts once for each expert that it has chosen, padding too; recomputed blocks count once. No token is
    dropped: experts have no capacity. Collective::

        for path, tokens in autopar.expert_load(model).items():
            print(path, "busiest", int(tokens.max()), "idle", int((tokens == 0).sum()))

    Args:
        model: parallelized with ``expert_parallel_size`` above 1, or a wrapper around it.
        reset: begin anew.

    Returns:
        Path of the experts, of this rank's stage -> ``[experts]``, int64, over all replicas and rows; the same on every
        rank of the stage.

    Raises:
        ConfigError: no experts of ``model`` are held whole by ranks.
    """
    root: Any = next((module for module in model.modules() if "_autopar" in vars(module)), None)
    if root is None or root.mpu.ep.size == 1:
        raise ConfigError(
            f"expert_load: ranks do not hold whole experts of {type(model).__name__}, so that no tokens are counted; "
            "expert_parallel_size above 1 does that"
        )
    found = {}
    with root._autopar.failures.wait("autopar.expert_load", root.mpu.model.ranks):
        for path, module in root.named_modules():
            if isinstance(module, ExpertParallel):
                layout = module.autopar.layout
                assert layout is not None
                ((start, stop),) = layout.ranges(module.tp.rank)
                tokens = torch.zeros(layout.size, dtype=torch.int64, device=root.mpu.device)
                tokens[start:stop] = module.tokens.to(tokens.device)
                for axis in (module.tp, root.mpu.copies):
                    if axis.size > 1:
                        all_reduce(tokens, group=axis.group)
                found[path] = tokens
                if reset:
                    module.tokens.zero_()
    return found
