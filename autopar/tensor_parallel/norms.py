"""Norms over sharded features: the module's own forward, with means taken over all ranks.

The forward of the plain class runs on this rank's features with this rank's weight; where it takes a mean over the
features (RMSNorm: Zhang and Sennrich 2019; LayerNorm: Ba et al. 2016), the sums of all ranks are added, forward and
backward. Two floats per token travel, not the features. Order of casts, gates and offsets are the module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import copy, reduce
from autopar.errors import PolicyError
from autopar.layout import Layout
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.region_modules import RegionModule


class ShardedNorm(RegionModule):
    """A norm over sharded features. ``[..., n/tp] -> [..., n/tp]``, weight Shard(0)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with GlobalMeans(self.autopar, self.tp, (*args, *kwargs.values())):
            return super().forward(*args, **kwargs)


class GlobalMeans(TorchFunctionMode):
    """Take means over the last dim over the features of all ranks; ``given`` to the norm is what it works on."""

    def __init__(self, plan: ModulePlan, axis: Axis, given: tuple[Any, ...]) -> None:
        super().__init__()
        assert plan.layout is not None
        self.dims = max((x.ndim for x in given if isinstance(x, torch.Tensor)), default=0)
        self.layout, self.groups, self.axis, self.where = plan.layout, plan.groups, axis, plan.where

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.mean, torch.Tensor.mean):
            return self._mean(*args, **kwargs)
        if func in (torch.sum, torch.Tensor.sum) and self.groups is None:
            return self._mean(*args, **kwargs) * self.layout.size
        if func in (F.layer_norm, torch.layer_norm):
            return self._layer_norm(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return self._rms_norm(*args, **kwargs)
        if func in _REDUCTIONS:
            raise PolicyError(f"a norm over sharded features calls {func.__name__}, which is not known", self.where)
        return func(*args, **kwargs)

    def _mean(self, x: torch.Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> torch.Tensor:
        last = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        if last not in (-1, x.ndim - 1):
            raise PolicyError(f"a norm over sharded features takes a mean over dim {dim}, not the last", self.where)
        total = self._total(x.to(kwargs["dtype"]) if kwargs.get("dtype") else x)
        return total if keepdim else total.squeeze(-1)

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over the features of all ranks (of each group, if the norm has groups), last dim kept."""
        layout, axis = self.layout, self.axis
        if self.groups is not None:
            return self._mean_of_groups(x, self.groups)
        if x.shape[-1] != layout.local_size(axis.rank) or x.ndim > self.dims:
            raise PolicyError(
                f"a norm over {layout.local_size(axis.rank)} of {layout.size} sharded features takes a mean over "
                f"{x.shape[-1]}: it has groups, write {{norm_over: ..., within: GROUPS}} or {{sharded: ...}}",
                self.where,
            )
        if layout.replicated:  # a lower rank adds what it holds too
            owned = x.new_zeros(x.shape[-1])
            for start, stop in layout.owned_local(axis.rank):
                owned[start:stop] = 1
            x = x * owned
        return _over_ranks(x.sum(-1, keepdim=True), axis) / layout.size

    def _mean_of_groups(self, x: torch.Tensor, groups: Layout) -> torch.Tensor:
        axis = self.axis
        if not groups.replicated:
            return x.mean(-1, keepdim=True)  # this rank holds whole groups
        ((start, stop),) = groups.ranges(axis.rank)
        sums = x.sum(-1, keepdim=True)  # [..., groups of this rank, 1]
        own = torch.zeros(groups.size, device=x.device, dtype=x.dtype)
        own[start:stop] = 1
        placed = sums * own if stop - start == 1 else sums  # [..., 1, groups]
        if x.ndim == 1 or stop - start != 1:
            raise PolicyError(f"groups that several ranks hold come one to a rank, not {stop - start}", self.where)
        gathered = _over_ranks(placed, axis)
        return gathered[..., start:stop] / (self.layout.size // groups.size)

    def _layer_norm(
        self, x: torch.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        y = self._rms_norm(wide - self._total(wide), shape, None, eps).to(x.dtype)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def _rms_norm(self, x: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        eps = torch.finfo(wide.dtype).eps if eps is None else eps
        y = (wide * torch.rsqrt(self._total(wide * wide) + eps)).to(x.dtype)
        return y if weight is None else y * weight


def _over_ranks(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over the ranks, forward and backward: each rank goes on to use the sum for its own features."""
    return copy(reduce(x, axis), axis)


_REDUCTIONS = {
    *(torch.var, torch.Tensor.var, torch.std, torch.Tensor.std, torch.norm, torch.Tensor.norm, F.normalize),
    *(torch.linalg.vector_norm, torch.sum, torch.Tensor.sum, torch.var_mean, torch.amax, torch.Tensor.amax),
}
