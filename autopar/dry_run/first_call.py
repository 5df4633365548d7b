"""The rehearsal of a plain module: with the arguments of its first forward, for nobody knows them before.

A Hugging Face model says what it takes, so its policy is rehearsed before it is touched
(:mod:`autopar.dry_run.tensor_parallel`). Of a plain module a copy without data is kept until its first forward, which
is rehearsed before anything is computed: a policy that would give wrong numbers gives none.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autopar.dry_run.inputs import meta_copy
from autopar.dry_run.tensor_parallel import rehearse_with
from autopar.plan.plan import Plan
from autopar.tensor_parallel.hooks import Hook

__all__ = ["FirstCall"]

_log = logging.getLogger(__name__)


class FirstCall(Hook):
    """Forward pre-hook that rehearses the first forward, and goes.

    Args:
        model: the plain module, still whole; only read.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.sketch: nn.Module | None = None
        if plan.tp > 1:
            try:
                self.sketch = meta_copy(model)
            except Exception:  # it holds what cannot be copied
                self._warn(model)
        self._handle: Any = None

    def attach(self, model: nn.Module) -> None:
        """Watch the first forward of ``model``, which the plan has been applied to."""
        if self.sketch is not None:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sketch = self.sketch
        if sketch is None:
            return
        with torch.random.fork_rng(devices=[]):
            args, kwargs = tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs))
            done = rehearse_with(sketch, self.plan, args, kwargs)
        if not done:
            self._warn(model)
        self.sketch = None
        if self._handle is not None:
            self._handle.remove()

    def _warn(self, model: nn.Module) -> None:
        _log.warning(
            "%s does not run without data, so your policy could not be rehearsed: compare its loss and gradients with "
            "the plain model's once.",
            type(model).__name__,
        )
