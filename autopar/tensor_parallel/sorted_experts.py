"""Expert parallelism of experts that are given rows sorted by expert, and not which expert each row has chosen."""

from __future__ import annotations

from typing import Any

import torch

from autopar.layout import even_shards
from autopar.tensor_parallel.experts import ExpertParallel
from autopar.tensor_parallel.region_modules import argument_names


class SortedExperts(ExpertParallel):
    """Experts, of which this rank holds some: ``[rows, in] -> [rows, out]``, the rows of one expert after the other.

    The second argument says how many rows each expert has. Without one all have equally many, of which those that are
    not an expert's own are zeros; these stay here, as experts without biases make zeros of them.
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
        here = self.tokens.numel()
        if rows.is_meta:  # even routes
            counts = [stop - start for start, stop in even_shards(len(rows), here)]
        else:
            counts = torch.bincount(local, minlength=here).tolist()
        order = torch.argsort(local, stable=True)
        if len(argument_names(type(self))) > 1:  # type: ignore[arg-type]
            y: torch.Tensor = super(ExpertParallel, self).forward(rows[order], counts)
            return y[torch.argsort(order)]
        most = max(1, *counts)
        places = [torch.arange(count, device=local.device) + n * most for n, count in enumerate(counts)]
        place = torch.empty_like(local).index_copy(0, order, torch.cat(places))
        y = super(ExpertParallel, self).forward(rows.new_zeros(here * most, rows.shape[1]).index_copy(0, place, rows))
        return y[place]
