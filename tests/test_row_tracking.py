"""Row tracking: which operations work on each row by itself. Pure: everything is on the meta device."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from autopar.dry_run.row_tracking import MixedRows, RowTracking, distinct_prime

P = 29


def tracked(function: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> bool:
    tracking = RowTracking(P, ranks=2)
    with torch.device("meta"), tracking, torch.no_grad():
        return tracking.holds_rows(function(tracking.mark_rows(torch.empty(shape))))


def test_what_treats_rows_alike_and_apart_passes() -> None:
    with torch.device("meta"):
        mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=64))
        norms = [LlamaRMSNorm(32), nn.LayerNorm(32)]
    for module in (mlp, *norms):
        assert tracked(module, 3, P, 32)
    assert tracked(lambda x: x.flatten(0, 1) * torch.sigmoid(x[..., :1]).flatten(0, 1), 3, P, 32)
    assert tracked(lambda x: x.view(3, P, 4, 8).transpose(1, 2).softmax(-1), 3, P, 32)
    assert tracked(lambda x: torch.ones(64, 8)[x.long()], 3, P)


@pytest.mark.parametrize(
    ("mixing", "text"),
    [
        (lambda x: x.cumsum(1), r"cumsum: works along the rows of \[3, 29, 32\]"),
        (lambda x: x.softmax(1), "softmax: works along the rows"),
        (lambda x: x.roll(1, 1), "roll: works along the rows"),
        (lambda x: x.mean(1, keepdim=True), r"mean: leaves no dim of rows, \[\[3, 29, 32\]\] -> \[3, 1, 32\]"),
        (lambda x: x[:, 1:], "slice: leaves no dim of rows"),
        (lambda x: x @ x.mT, "bmm: makes a table of rows by rows"),
        (lambda x: F.conv1d(x.mT, torch.ones(32, 1, 3), padding=1, groups=32), "convolution: works along the rows"),
        (lambda x: x + torch.arange(x.shape[1])[:, None], "arange: counts the rows of one rank from 0"),
        (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], "constant_pad_nd: leaves no dim of rows"),
        (lambda x: F.unfold(x[None], (1, 2)), "im2col: not known to work on each row by itself"),
    ],
)
def test_what_mixes_rows_is_named(mixing: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    with pytest.raises(MixedRows, match=text):
        tracked(mixing, 3, P, 32)


def test_the_prime_divides_no_size_of_the_model() -> None:
    assert distinct_prime(nn.Linear(29, 31 * 2), 2) == 37
    assert distinct_prime(nn.Linear(32, 32), 2, longest=20) == 7
    assert distinct_prime(nn.Linear(35, 11), 2, longest=20) == 29  # a longer sequence is a last resort
