"""The dry run of a plain module, which comes with its first forward: its arguments are not known before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.distributed.rng import kept
from autopar.dry_run.inputs import meta_copy
from autopar.dry_run.plan_model import warn_no_dry_run
from autopar.dry_run.tensor_parallel import check_plan_with
from autopar.foreign.tensors import tree_map_only
from autopar.plan.plan import Plan
from autopar.tensor_parallel.hooks import Hook

__all__ = ["FirstForward"]


class FirstForward(Hook):
    """Forward pre-hook of a plain module: the dry run of its first forward, before anything is computed.

    Args:
        model: the plain module, not yet sharded; only read.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.plain: nn.Module | None = None
        if plan.tp > 1:
            try:
                self.plain = meta_copy(model)
            except Exception:  # it holds something that cannot be copied
                warn_no_dry_run(model)
        self._handle: Any = None

    def attach(self, model: nn.Module) -> None:
        """Register the hook on ``model``, which the plan has been applied to."""
        if self.plain is not None:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plain = self.plain
        if plain is None:
            return
        with kept():
            args, kwargs = tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs))
            done = check_plan_with(plain, self.plan, args, kwargs)
        if not done:
            warn_no_dry_run(model)
        self.plain = None
        if self._handle is not None:
            self._handle.remove()
