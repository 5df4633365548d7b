"""Expert parallelism of experts that are modules in a list: each rank has some of them, and the others without weights.

Rows travel as those of stacked experts do (:mod:`autopar.tensor_parallel.experts`). Which rows are given to which
expert is seen in a run of the code that calls them (:mod:`autopar.tensor_parallel.expert_calls`): the list's own
forward, where it has one, or that of the module around it. So weights, masks and dropout behind experts stay as they
are on the rank of the tokens, and only the experts compute elsewhere.

[Note: gradients of idle experts] An expert that nobody calls has no gradient on one process, and has none here: an
optimizer leaves it alone, weight decay too. One that is called without rows has zeros; with FSDP2, which reduces the
same gradients on all ranks, so has any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autopar.distributed.rng import TorchGenerators
from autopar.errors import ConfigError
from autopar.foreign.modules import own_modules
from autopar.foreign.tensors import tree_map
from autopar.layout import even_shards
from autopar.plan.by_expert import expert_names
from autopar.tensor_parallel.expert_calls import Calls, first_floats
from autopar.tensor_parallel.experts import ExpertParallel
from autopar.tensor_parallel.region_modules import RegionModule


class ModuleExperts(ExpertParallel):
    """A list of experts, of which this rank holds some. Each parameter lies on one rank.

    Attributes:
        idle_zeros: whether an expert that nobody calls has a gradient of zeros.
    """

    autopar_names: tuple[str, ...]
    idle_zeros = False
    _called: frozenset[int] = frozenset()  # without rows, in the forward that runs
    _inside: TorchGenerators | None = None  # what this rank's experts draw from; None: nothing is drawn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the list's own forward; of a list without one, return ``[rows, hidden]`` of rows and their experts."""
        if not self.calls_itself:
            return self.computed(*args)
        return _run(self, [self], super(RegionModule, self).forward, args, kwargs)  # type: ignore[misc]

    @property
    def calls_itself(self) -> bool:
        """Whether the list has a forward of its own, which calls the experts."""
        kind: Any = type(self)
        return kind._autopar_plain.forward is not nn.Module.forward

    @property
    def experts(self) -> list[Any]:
        """All experts, in order."""
        if "autopar_names" not in vars(self):
            self.autopar_names = expert_names(self)  # type: ignore[arg-type]
        return [own_modules(self)[name] for name in self.autopar_names]

    def computed(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return what experts make of ``rows``, ``[rows, hidden]``, given to those with numbers ``ids``, ``[rows]``."""
        self._refuse_hooks()
        return self._exchanged(rows, ids.unsqueeze(-1), torch.ones_like(rows[:, :1]))

    def _outputs(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        assert self.autopar.layout is not None
        ((start, stop),) = self.autopar.layout.ranges(self.tp.rank)
        if rows.is_meta:  # even routes
            counts = [high - low for low, high in even_shards(len(rows), stop - start)]
        else:
            counts = torch.bincount(local, minlength=stop - start).tolist()
        order = torch.argsort(local, stable=True)
        mine = zip(range(start, stop), self.experts[start:stop], rows[order].split(counts), strict=True)
        outside = TorchGenerators.now() if self._inside is not None else None
        if self._inside is not None:
            self._inside.restore()
        made = [expert(part) for n, expert, part in mine if len(part) or self.idle_zeros or n in self._called]
        if outside is not None:
            outside.restore()
        if not made:
            return rows
        return torch.cat(made).to(rows.dtype)[torch.argsort(order)]


class ExpertCaller(RegionModule):
    """A module around lists of experts, whose forward calls them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        lists: list[Any] = [each for each in own_modules(self).values() if isinstance(each, ModuleExperts)]
        outer = [each for each in lists if not each.calls_itself]
        return _run(self, outer, super().forward, args, kwargs)


class _Present(torch.autograd.Function):
    """``x``, which is part of the graph as on other ranks; neither it nor the weight gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


# What is called depends on data.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(caller: Any, lists: Sequence[Any], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run the forward of a module that calls experts, with outputs from the ranks that hold them."""
    path, like = caller.autopar.path, first_floats((args, kwargs))
    if like is None:
        raise ConfigError(f"expert_parallel_size: {path} is given no hidden states, [..., hidden], for its experts")
    inside = _of_this_rank(caller)
    calls = Calls(path, caller, [each.experts for each in lists])
    out = calls.note(forward, args, kwargs)
    if like.is_meta and not torch.is_grad_enabled():  # a dry run: the routes depend on data
        return out
    weight = next((p for p in caller.parameters() if p.requires_grad), None)
    outputs = []
    for place, experts in enumerate(lists):
        rows, ids = calls.rows(place, like)
        if weight is not None and torch.is_grad_enabled() and not rows.requires_grad:
            rows = _Present.apply(rows, weight)
        experts._called, experts._inside = frozenset(calls.without_rows(place)), inside
        outputs.append(experts.computed(rows, ids) if experts is caller else experts(rows, ids))
    calls.take(outputs)
    out = calls.replay(forward, args, kwargs)
    idle = [y.sum() for y in outputs if not len(y) and y.requires_grad]
    return _tied(out, idle) if idle else out


def _of_this_rank(caller: Any) -> TorchGenerators | None:
    """Return the generators that this rank's experts draw from, as in a sharded region; None if nothing is drawn."""
    if not caller.region.draws(caller.training):
        return None
    caller.region.draw_per_rank(caller.training)
    inside = TorchGenerators.now()
    caller.region.draw_alike()
    return inside


def _tied(out: Any, zeros: list[torch.Tensor]) -> Any:
    """Add zeros to the first floating-point tensor: the backward pass goes to ranks whose rows experts here have."""
    left = list(zeros)

    def add(x: Any) -> Any:
        if not left or not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        total = sum(left, x.new_zeros(()))
        left.clear()
        return x + total.to(x.dtype)

    return tree_map(add, out)
