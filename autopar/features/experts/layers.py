"""Expert parallelism: tokens go to the ranks that hold the experts they chose, and back.

Lepikhin et al., "GShard" (2020), section 3; Megatron-LM, core/transformer/moe/token_dispatcher.py. Experts lie on the
tp ranks of one replica or of several. The tp ranks of one replica hold the same tokens, so each takes
an equal share of them. By ``all_to_all`` it sends every (token, chosen expert) pair to the expert's rank, gets the
output back, and weights it. By ``all_reduce`` all tokens go to all ranks, which compute the pairs that chose their
experts: an all-gather and a reduce-scatter, in which no rank waits for the choices of other tokens. Then the shares are
gathered. The experts' own forward computes: it sees one chosen expert per row, counted from this rank's first one.

[Note: gradients over replicas] Tokens of several replicas meet in one expert, so its gradient is the sum over their
losses, where any other weight's is the mean over replicas. The gradient of the expert's output is divided by the number
of these replicas, and the gradient of the tokens is multiplied by it again: an expert's weight then has the mean over
them, and replicas that hold the same experts are averaged as for other weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.call_site import described, hooks_below
from autopar.compat.tensors import in_backward
from autopar.distributed import gloo_collectives
from autopar.distributed.autograd_functions import any_order, keep_none
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import (
    all_gather,
    all_to_all,
    even_layout,
    gather,
    gather_sum,
    reduce_scatter,
    run,
    scatter as own_part,
)
from autopar.distributed.gloo_collectives import all_reduce
from autopar.errors import ConfigError
from autopar.layout import Block, Layout, even_shards
from autopar.swap import argument_names
from autopar.tensor_parallel.region_modules import RegionModule


class ExpertParallel(RegionModule):
    """Experts, of which this rank holds some: ``[tokens, hidden] -> [tokens, hidden]``. Parameters Shard(0).

    Attributes:
        tp: The ranks over which experts are sharded.
        dispatch: ``all_to_all`` or ``all_reduce``.
        tokens: Number of tokens of each of this rank's experts, ``[experts here]``, int64; None before the first.
    """

    dispatch: str = "all_to_all"
    tokens: torch.Tensor | None = None
    replicated_ends = True
    autopar_state: tuple[str, ...] = ("dispatch", "tokens")

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        """Compute the output; ``chosen``, ``weights``: ``[tokens, k]``, the experts of each token and their weights."""
        if self.tp.group is None and not torch.is_grad_enabled():  # a dry run: the routes depend on data
            return torch.empty_like(hidden)
        if not torch.compiler.is_compiling():
            self._refuse_hooks()
        x = hidden.reshape(chosen.shape[0], -1)
        y = self._exchanged(x, chosen, weights)
        y = y + self._without_experts(x, chosen, weights) if self.autopar.once else y
        return y if y.shape == hidden.shape else y.view_as(hidden)  # a view would lose FSDP2's hook when written into

    @property
    def beside(self) -> Axis:
        """The tensor-parallel ranks of this replica, which hold the same tokens."""
        return self.region.axis

    @property
    def here(self) -> int:
        """The number of this rank's experts."""
        assert self.autopar.layout is not None
        return self.autopar.layout.local_size(self.tp.rank)

    def _exchanged(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the experts' weighted outputs, ``[tokens, hidden]``."""
        layout = even_layout(len(x), self.beside.size)
        x = own_part(x, self.beside, layout, 0)  # [tokens/tp, hidden]
        w = own_part(weights, self.beside, layout, 0)  # [tokens/tp, k]
        ids = layout.shard(chosen, self.beside.rank, 0)  # [tokens/tp, k]
        y = (self._by_all_to_all if self.dispatch == "all_to_all" else self._by_all_reduce)(x, w, ids)
        return gather(y, self.beside, layout, 0)

    def _without_experts(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs of modules with indices after the last expert's, ``[tokens, hidden]``."""
        assert self.autopar.layout is not None
        w = weights.masked_fill(chosen < self.autopar.layout.size, 0).sum(-1, keepdim=True)
        return sum((getattr(self, name)(x) * w for name in self.autopar.once), torch.zeros_like(x)).to(x.dtype)

    def _refuse_hooks(self) -> None:
        for path, hook in hooks_below(self):
            raise ConfigError(
                f"the hook {described(hook)} on {self.autopar.path}.{path} is inside of experts that ranks hold "
                f"whole: it would see the tokens of all of\n  ranks {list(self.tp.ranks)} that chose this rank's, "
                "in another order. A hook on the experts sees this rank's tokens;\n  "
                "autopar.local_hooks(module) is for what is here."
            )

    def _by_all_to_all(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        axis, k = self.tp, ids.shape[1]
        owner, local, known = self._placed(ids.reshape(-1))
        w = w.reshape(-1).masked_fill(~known, 0)
        order = torch.argsort(owner, stable=True)
        out_splits, in_splits = _splits(owner, axis)
        rows = all_to_all(x[order // k], axis, out_splits, in_splits)  # [received, hidden]
        y = self._compute(rows, all_to_all(local[order], axis, out_splits, in_splits))
        back = all_to_all(y, axis, in_splits, out_splits)  # [tokens/tp * k, hidden], in the order of sending
        weighted = back * w[order].unsqueeze(-1)  # here, so that only rows are sent
        return x.new_zeros(len(x), weighted.shape[1]).index_add(0, order // k, weighted.to(x.dtype))

    def _by_all_reduce(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        axis, k = self.tp, ids.shape[1]
        layout = _layout_of_tokens(x, axis)
        x, w = gather_sum(x, axis, 0, layout), gather_sum(w, axis, 0, layout)  # [all tokens, hidden], [all tokens, k]
        owner, local, known = self._placed(gather(ids, axis, layout, 0).reshape(-1))
        if x.is_meta:  # even routes
            mine = torch.empty(-(-len(owner) // axis.size), dtype=torch.long, device="meta")
        else:
            mine = torch.nonzero((owner == axis.rank) & known).squeeze(1)  # pairs of a token and an expert of this rank
        y = self._compute(x[mine // k], local[mine])
        weighted = y * w.reshape(-1)[mine].unsqueeze(-1)
        outputs = x.new_zeros(len(x), weighted.shape[1]).index_add(0, mine // k, weighted.to(x.dtype))
        return reduce_scatter(outputs, axis, 0, layout)

    def _placed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rank of each expert, its number there, and whether it exists."""
        axis, experts = self.tp, self.autopar.layout
        assert experts is not None
        starts, ends = zip(*(experts.ranges(rank)[0] for rank in range(axis.size)), strict=True)
        owner = torch.bucketize(ids, torch.tensor(ends, device=ids.device), right=True)
        known = ids < experts.size  # a router may choose no expert with an index after the last
        owner = torch.where(known, owner, axis.rank)
        return owner, torch.where(known, ids - torch.tensor(starts, device=ids.device)[owner], 0), known

    def _count(self, local: torch.Tensor) -> None:
        if self.tokens is None or self.tokens.device != local.device:
            with torch.inference_mode(mode=False):  # it is written into outside of inference, too
                self.tokens = torch.zeros(self.here, dtype=torch.int64, device=local.device)
        self.tokens.index_add_(0, local, torch.ones_like(local))

    def _compute(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if not rows.is_meta and not torch.compiler.is_compiling() and not in_backward():  # which computes blocks again
            self._count(local)
        replicas = self.tp.size // self.beside.size  # [Note: gradients over replicas]
        rows = _ScaledGradient.apply(rows, float(replicas)) if replicas > 1 else rows
        y = self._outputs(rows, local)
        return _ScaledGradient.apply(y, 1 / replicas) if replicas > 1 else y

    def _outputs(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return the outputs of this rank's experts ``local``, ``[rows, hidden]``."""
        if rows.shape[0]:
            ids, w = local.unsqueeze(-1), torch.ones_like(rows[:, :1])
            if self.autopar.once:  # LongCat Flash's experts take two choices or more: one of no expert, without weight
                assert self.autopar.layout is not None
                ids, w = F.pad(ids, (0, 1), value=self.autopar.layout.size - 1), F.pad(w, (0, 1))
            y: torch.Tensor = super().forward(rows, ids, w)
            return y.reshape(rows.shape)
        read = [(each, name) for each in self.modules() for name in vars(each).get("autopar_layouts", ())]  # type: ignore[attr-defined]
        own = (getattr(module, name) for module, name in read)  # adapters may be added to them
        return rows + sum(p.sum() for p in own) * 0  # empty, with the parameters in the graph


def _splits(owner: torch.Tensor, axis: Axis) -> tuple[list[int], list[int]]:
    """Return the numbers of rows from and to each rank; without data even ones."""
    even = [stop - start for start, stop in even_shards(owner.numel(), axis.size)] if owner.is_meta else []
    if axis.group is None:
        return even, even
    sent = owner.new_empty(axis.size) if even else torch.bincount(owner, minlength=axis.size)
    received = torch.empty_like(sent)
    run(gloo_collectives.all_to_all_single, axis, received, sent)
    return ([even[axis.rank]] * axis.size, even) if even else (received.tolist(), sent.tolist())


def _layout_of_tokens(x: torch.Tensor, axis: Axis) -> Layout:
    """Return the layout of all ranks' tokens, of which each rank may have another number."""
    counts = [x.shape[0]] * axis.size
    if axis.group is not None:
        own = torch.tensor([x.shape[0]], device=x.device)
        everyone = all_gather(own, axis, axis.one_each)
        counts = counts if x.is_meta else everyone.tolist()
    ends = [sum(counts[: rank + 1]) for rank in range(axis.size)]
    ranges = tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
    return Layout.of(0, [Block("tokens", ends[-1], 1, ranges)])


class SortedExperts(ExpertParallel):
    """Experts, of which this rank holds some: ``[rows, in] -> [rows, out]``, sorted by expert.

    The second argument is the number of rows of each expert. Without it all have equally many, padded with zeros; zeros
    stay on this rank, as experts without biases map them to zeros.
    """

    def forward(self, hidden: torch.Tensor, sizes: list[int] | None = None) -> Any:  # type: ignore[override]
        """Compute the output, in the order of the rows."""
        assert self.autopar.layout is not None
        if self.tp.group is None and not torch.is_grad_enabled():  # a dry run: the routes depend on data
            return torch.empty_like(hidden)
        experts = torch.arange(self.autopar.layout.size, device=hidden.device)
        each = len(hidden) // len(experts) if sizes is None else torch.tensor(sizes, device=hidden.device)
        ids = experts.repeat_interleave(each, output_size=len(hidden))
        if not torch.compiler.is_compiling():
            self._refuse_hooks()
        if sizes is not None or hidden.is_meta:
            return self._rows(hidden, ids)
        own = hidden.detach().any(-1).nonzero().squeeze(1)
        y = self._rows(hidden[own], ids[own])
        return y.new_zeros(len(hidden), y.shape[1]).index_copy(0, own, y)

    def _rows(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._exchanged(x, ids.unsqueeze(-1), torch.ones_like(x[:, :1]))

    def _outputs(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        here = self.here
        if rows.is_meta:  # even routes
            counts = [stop - start for start, stop in even_shards(len(rows), here)]
        else:
            counts = torch.bincount(local, minlength=here).tolist()
        order = torch.argsort(local, stable=True)
        if len(argument_names(self)) > 1:
            y: torch.Tensor = super(ExpertParallel, self).forward(rows[order], counts)
            return y[torch.argsort(order)]
        most = max(1, *counts)
        places = [torch.arange(count, device=local.device) + n * most for n, count in enumerate(counts)]
        place = torch.empty_like(local).index_copy(0, order, torch.cat(places))
        y = super(ExpertParallel, self).forward(rows.new_zeros(here * most, rows.shape[1]).index_copy(0, place, rows))
        return y[place]


def stacked_experts(plain: type[nn.Module]) -> type[ExpertParallel]:
    """Return the mixin of stacked experts; experts without arguments for indices and weights get sorted rows."""
    return ExpertParallel if len(argument_names(plain)) >= 3 else SortedExperts


def choose_dispatch(model: nn.Module, dispatch: str) -> None:
    """Set how tokens travel to the experts of a parallelized model."""
    for module in model.modules():
        if isinstance(module, ExpertParallel):
            module.dispatch = dispatch


@torch.no_grad()
def expert_load(model: nn.Module, *, reset: bool = True) -> dict[str, torch.Tensor]:
    """Return the number of tokens of each expert since the last call. Collective.

    A token counts once for each expert that it has chosen, padding too; recomputed blocks count once. No token is
    dropped: experts have no capacity::

        for path, tokens in autopar.expert_load(model).items():
            print(path, "busiest", int(tokens.max()), "idle", int((tokens == 0).sum()))

    Args:
        model: Model parallelized with ``expert_parallel_size`` above 1, or a wrapper around it.
        reset: True if the counts start again from zero.

    Returns:
        Path of the experts of this rank's stage -> ``[experts]``, int64, over all replicas; the same on every rank of
        the stage.

    Raises:
        ConfigError: The experts of ``model`` are not distributed over ranks.
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
                if module.tokens is not None:
                    tokens[start:stop] = module.tokens.to(tokens.device)
                for axis in (module.tp, root.mpu.copies):
                    if axis.size > 1:
                        all_reduce(tokens, group=axis.group)
                found[path] = tokens
                if reset:
                    module.tokens = None
    return found


class _ScaledGradient(torch.autograd.Function):
    """Multiply the gradient by ``factor``; it cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        keep_none(ctx)
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @any_order(lambda ctx, grad: _refuse_scaled())
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def _refuse_scaled() -> Any:
    raise ConfigError(
        "create_graph=True with experts that several replicas share (expert_parallel_size above "
        "tensor_parallel_size):\n  a penalty on gradients, a Hessian or a meta-gradient of experts would be a sum over "
        "replicas, where that of other\n  weights is a mean. expert_parallel_size: 1, or that of tensor_parallel_size, "
        "goes with it."
    )
