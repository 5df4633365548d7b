"""Expert parallelism: send tokens to the ranks of their chosen experts, and the outputs back.

See Lepikhin et al., "GShard" (2020), section 3, and Megatron-LM, core/transformer/moe/token_dispatcher.py. Experts are
distributed over the tp ranks of one replica or of several replicas. The tp ranks of a replica have identical tokens, so
each handles an equal slice of them. With ``all_to_all`` a rank sends each (token, chosen expert) pair to the expert's
rank, receives the output, and weights it. With ``all_reduce`` all ranks get all tokens, and each computes the pairs for
its experts: an all-gather and a reduce-scatter whose sizes do not depend on the routers. Then the slices are
gathered. The experts' own forward computes the rows, with one expert per row, numbered from the first local expert.

[Note: gradients over replicas] Tokens of several replicas meet in one expert, so its gradient is a sum over their
losses. The gradients of all other weights are means over replicas. So the gradient of the expert's output is divided by
the number of these replicas, and the gradient of its input is multiplied by it again. The expert's weights then get the
mean, and replicas that hold the same experts average them like other weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.call_site import described, hooks_below
from autopar.compat.tensors import in_backward
from autopar.distributed import gloo_collectives
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import (
    all_gather,
    all_to_all,
    as_view,
    even_layout,
    gather,
    gather_sum,
    linear,
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
    """Experts distributed over ranks: ``[tokens, hidden] -> [tokens, hidden]``, parameters Shard(0).

    Attributes:
        tp: Axis over which experts are distributed.
        dispatch: ``all_to_all`` or ``all_reduce``.
        tokens: Number of tokens of each local expert, ``[local experts]``, int64; None before the first forward.
    """

    dispatch: str = "all_to_all"
    tokens: torch.Tensor | None = None
    replicated_ends = True
    autopar_state: tuple[str, ...] = ("dispatch", "tokens")

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        """Compute the output; ``chosen`` and ``weights``: experts of each token and their weights, ``[tokens, k]``."""
        if self.tp.group is None and not torch.is_grad_enabled():  # a dry run, in which the choices have no values
            return torch.empty_like(hidden)
        if not torch.compiler.is_compiling():
            self._refuse_hooks()
        x = hidden.reshape(chosen.shape[0], -1)
        y = self._exchanged(x, chosen, weights)
        y = y + self._without_experts(x, chosen, weights) if self.autopar.once else y
        return y if y.shape == hidden.shape else y.view_as(hidden)  # an in-place change of a view loses FSDP2's hook

    @property
    def peers(self) -> Axis:
        """The tensor-parallel axis of this replica, whose ranks have identical tokens."""
        return self.region.axis

    @property
    def here(self) -> int:
        """The number of local experts."""
        assert self.autopar.layout is not None
        return self.autopar.layout.local_size(self.tp.rank)

    def _exchanged(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs of the experts, ``[tokens, hidden]``."""
        layout = even_layout(len(x), self.peers.size)
        x = own_part(x, self.peers, layout, 0)  # [tokens/tp, hidden]
        w = own_part(weights, self.peers, layout, 0)  # [tokens/tp, k]
        ids = layout.shard(chosen, self.peers.rank, 0)  # [tokens/tp, k]
        y = (self._by_all_to_all if self.dispatch == "all_to_all" else self._by_all_reduce)(x, w, ids)
        return gather(y, self.peers, layout, 0)

    def _without_experts(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs of modules whose index follows the last expert, ``[tokens, hidden]``."""
        assert self.autopar.layout is not None
        w = weights.masked_fill(chosen < self.autopar.layout.size, 0).sum(-1, keepdim=True)
        return sum((getattr(self, name)(x) * w for name in self.autopar.once), torch.zeros_like(x)).to(x.dtype)

    def _refuse_hooks(self) -> None:
        for path, hook in hooks_below(self):
            raise ConfigError(
                f"the hook {described(hook)} on {self.autopar.path}.{path} is inside distributed experts: it would see "
                f"tokens in another order\n  They are the tokens of ranks {list(self.tp.ranks)}. "
                "Put the hook on the experts, where it sees the tokens of this rank. "
                "autopar.local_hooks(module) allows hooks\n  that support sharded tokens."
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
        weighted = back * w[order].unsqueeze(-1)  # weighted after the exchange, so that only rows are sent
        return x.new_zeros(len(x), weighted.shape[1]).index_add(0, order // k, weighted.to(x.dtype))

    def _by_all_reduce(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        axis, k = self.tp, ids.shape[1]
        layout = _layout_of_tokens(x, axis)
        x, w = gather_sum(x, axis, 0, layout), gather_sum(w, axis, 0, layout)  # [all tokens, hidden], [all tokens, k]
        owner, local, known = self._placed(gather(ids, axis, layout, 0).reshape(-1))
        if x.is_meta:  # assume balanced routers
            mine = torch.empty(-(-len(owner) // axis.size), dtype=torch.long, device="meta")
        else:
            mine = torch.nonzero((owner == axis.rank) & known).squeeze(1)  # pairs of a token and a local expert
        y = self._compute(x[mine // k], local[mine])
        weighted = y * w.reshape(-1)[mine].unsqueeze(-1)
        outputs = x.new_zeros(len(x), weighted.shape[1]).index_add(0, mine // k, weighted.to(x.dtype))
        return reduce_scatter(outputs, axis, 0, layout)

    def _placed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rank of each expert, its index on this rank, and whether it exists."""
        axis, experts = self.tp, self.autopar.layout
        assert experts is not None
        starts, ends = zip(*(experts.ranges(rank)[0] for rank in range(axis.size)), strict=True)
        owner = torch.bucketize(ids, torch.tensor(ends, device=ids.device), right=True)
        known = ids < experts.size  # a router may choose "no expert" by an index after the last expert
        owner = torch.where(known, owner, axis.rank)
        return owner, torch.where(known, ids - torch.tensor(starts, device=ids.device)[owner], 0), known

    def _count(self, local: torch.Tensor) -> None:
        if self.tokens is None or self.tokens.device != local.device:
            with torch.inference_mode(mode=False):  # because later forwards outside inference mode change it
                self.tokens = torch.zeros(self.here, dtype=torch.int64, device=local.device)
        self.tokens.index_add_(0, local, torch.ones_like(local))

    def _compute(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if not rows.is_meta and not torch.compiler.is_compiling() and not in_backward():  # not in a recomputation
            self._count(local)
        replicas = self.tp.size // self.peers.size  # [Note: gradients over replicas]
        rows = _ScaledGradient.apply(rows, self.tp, float(replicas)) if replicas > 1 else rows
        y = self._outputs(rows, local)
        return _ScaledGradient.apply(y, self.tp, 1 / replicas) if replicas > 1 else y

    def _counts(self, rows: torch.Tensor, local: torch.Tensor) -> list[int]:
        """Return the number of rows of each local expert."""
        if rows.is_meta:  # assume balanced routers
            return [stop - start for start, stop in even_shards(len(rows), self.here)]
        return torch.bincount(local, minlength=self.here).tolist()

    def _outputs(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the local experts ``local`` of each row, ``[rows, hidden]``."""
        if rows.shape[0]:
            ids, w = local.unsqueeze(-1), torch.ones_like(rows[:, :1])
            if self.autopar.once:  # LongCat Flash needs two choices or more: add "no expert" with weight 0
                assert self.autopar.layout is not None
                ids, w = F.pad(ids, (0, 1), value=self.autopar.layout.size - 1), F.pad(w, (0, 1))
            y: torch.Tensor = super().forward(rows, ids, w)
            return y.reshape(rows.shape)
        read = [(each, name) for each in self.modules() for name in vars(each).get("autopar_layouts", ())]  # type: ignore[attr-defined]
        own = (getattr(module, name) for module, name in read)  # getattr includes adapters
        return rows + sum(p.sum() for p in own) * 0  # no rows, but the parameters are in the graph


def _splits(owner: torch.Tensor, axis: Axis) -> tuple[list[int], list[int]]:
    """Return the numbers of rows from each rank and to each rank; even numbers in a run without data."""
    even = [stop - start for start, stop in even_shards(owner.numel(), axis.size)] if owner.is_meta else []
    if axis.group is None:
        return even, even
    sent = owner.new_empty(axis.size) if even else torch.bincount(owner, minlength=axis.size)
    received = torch.empty_like(sent)
    run(gloo_collectives.all_to_all_single, axis, received, sent)
    return ([even[axis.rank]] * axis.size, even) if even else (received.tolist(), sent.tolist())


def _layout_of_tokens(x: torch.Tensor, axis: Axis) -> Layout:
    """Return the layout of the tokens of all ranks, which may have different numbers of tokens."""
    counts = [x.shape[0]] * axis.size
    if axis.group is not None:
        own = torch.tensor([x.shape[0]], device=x.device)
        everyone = all_gather(own, axis, axis.one_each)
        counts = counts if x.is_meta else everyone.tolist()
    ends = [sum(counts[: rank + 1]) for rank in range(axis.size)]
    ranges = tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
    return Layout.of(0, [Block("tokens", ends[-1], 1, ranges)])


class SortedExperts(ExpertParallel):
    """Experts distributed over ranks whose rows are sorted by expert: ``[rows, in] -> [rows, out]``.

    The second argument is the number of rows of each expert. Without it all experts have equally many rows, padded with
    zeros. Zero rows are not sent, since experts without biases map them to zeros.
    """

    def forward(self, hidden: torch.Tensor, sizes: list[int] | None = None) -> Any:  # type: ignore[override]
        """Compute the output, in the order of the rows."""
        assert self.autopar.layout is not None
        if self.tp.group is None and not torch.is_grad_enabled():  # a dry run, in which the choices have no values
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
        here, counts = self.here, self._counts(rows, local)
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
    """Return the mixin for stacked experts; classes without arguments for indices and weights get sorted rows."""
    return ExpertParallel if len(argument_names(plain)) >= 3 else SortedExperts


def choose_dispatch(model: nn.Module, dispatch: str) -> None:
    """Set the dispatch method of all experts of a parallelized model."""
    for module in model.modules():
        if isinstance(module, ExpertParallel):
            module.dispatch = dispatch


@torch.no_grad()
def expert_load(model: nn.Module, *, reset: bool = True) -> dict[str, torch.Tensor]:
    """Return the number of tokens of each expert since the last call. A collective of the model.

    A token, also a padding token, counts once for each expert that it chose; recomputed blocks count once. Experts have
    no capacity limit and drop no tokens::

        for path, tokens in autopar.expert_load(model).items():
            print(path, "busiest", int(tokens.max()), "idle", int((tokens == 0).sum()))

    Args:
        model: Model parallelized with ``expert_parallel_size`` above 1, or a wrapper around it.
        reset: True to reset the counts to zero.

    Returns:
        Path of the experts in this rank's stage -> number of tokens over all replicas, ``[experts]``, int64; identical
        on all ranks of the stage.

    Raises:
        ConfigError: The experts of ``model`` are not distributed over ranks.
    """
    root: Any = next((module for module in model.modules() if "_autopar" in vars(module)), None)
    if root is None or root.mpu.ep.size == 1:
        raise ConfigError(
            f"expert_load: the experts of {type(model).__name__} are not distributed over ranks, so no tokens are "
            "counted\n  Set expert_parallel_size above 1."
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


def _refuse_scaled(*_: Any) -> Any:
    raise ConfigError(
        "create_graph=True is not supported with experts that several replicas share (expert_parallel_size above "
        "tensor_parallel_size):\n  second derivatives of experts would be sums over replicas instead of means. Set "
        "expert_parallel_size to 1\n  or to tensor_parallel_size."
    )


_ScaledGradient = linear("_ScaledGradient", as_view, lambda grad, axis, factor: grad * factor, _refuse_scaled)
"""The identity, whose gradient is multiplied by a factor; second derivatives raise."""
