"""The table of operators against torch, and the operations that work on each row by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from autopar.dry_run.operators import ALONG, CONSTANT, EMPTY, SIZES, name_of, on_meta, reduced_dims
from autopar.dry_run.row_tracking import MixedRows, RowTracking, distinct_prime
from autopar.tensor_tracking import TensorTracking, storage_key
from autopar.tools.derivation.feature_tracking import MOVES, RANDOM

Call = Callable[[torch.Tensor], Any]

REDUCE: dict[str, Call] = {
    **{
        name: lambda x, name=name: getattr(torch, name)(x, 1) for name in ("sum", "mean", "prod", "logsumexp", "median")
    },
    **{name: lambda x, name=name: getattr(torch, name)(x, (0, 2)) for name in ("amax", "amin", "var", "std")},
    **{name: lambda x, name=name: getattr(torch, name)(x) for name in ("sum", "mean", "max", "min", "var_mean")},
    **{name: lambda x, name=name: getattr(torch, name)(x, -1) for name in ("softmax", "log_softmax", "logcumsumexp")},
    **{name: lambda x, name=name: getattr(torch, name)(x, 1) for name in ("cumsum", "cumprod", "cummax", "cummin")},
    **{name: lambda x, name=name: getattr(torch, name)(x) for name in ("sort", "argsort")},
    "sort along a dim": lambda x: torch.sort(x, 0),
    "topk": lambda x: torch.topk(x, 2),
    "topk along a dim": lambda x: torch.topk(x, 2, 0),
    "kthvalue": lambda x: torch.kthvalue(x, 2),
    "argmax": lambda x: torch.argmax(x, 1),
    "argmin of all": torch.argmin,
    "the larger of two": lambda x: torch.max(x, torch.zeros_like(x)),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=2),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x, 1),
}
MOVE: dict[str, Call] = {
    "views": lambda x: x.transpose(0, 1).reshape(-1)[3:].unsqueeze(1).expand(-1, 2),
    "parts": lambda x: [part.clone() for part in (*x.split(1), *x.chunk(2, 2), *x.unbind(1))],
    "turned": lambda x: x.roll(1, 2).flip(0).repeat(1, 2, 1),
    "looked up": lambda x: x[:, torch.tensor([1, 0])].index_select(2, torch.tensor([1])),
    "gathered": lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.long)),
    "halves": lambda x: x.tril().triu(),
    "repeated": lambda x: x.repeat_interleave(2, 0).unfold(2, 2, 1),
}


def elements(value: Any) -> list[torch.Tensor]:
    leaves = value if isinstance(value, list | tuple) else [value]
    return [leaf.double() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def readers(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[torch.Tensor]:
    """For each output: ``[output elements, input elements]``, whether a change of an element is seen there."""
    before = elements(function(x))
    found = [torch.zeros(each.numel(), x.numel(), dtype=torch.bool) for each in before]
    for place in range(x.numel()):
        for by in (50.0, -50.0):
            changed = x.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[place] += by
            for seen, old, new in zip(found, before, elements(function(changed)), strict=True):
                seen[:, place] |= old.flatten() != new.flatten()
    return found


class Operators(TensorTracking):
    """Keep the operators that have one tensor of the given shape as first argument, and how they were called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point() and not func._schema.is_mutable:
            copied = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)
            self.calls.append((func, copied, dict(kwargs)))


def operators_in(call: Call, shape: tuple[int, ...]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    with Operators() as seen:
        call(x)
    return seen.calls


SHAPES = [(2, 3, 4), (3, 2, 5)]


@pytest.mark.parametrize("name", REDUCE)
def test_an_operator_reads_along_the_dims_that_the_table_names_and_no_others(name: str) -> None:
    named = 0
    for shape in SHAPES:
        for func, args, kwargs in operators_in(REDUCE[name], shape):
            x, dims = args[0], reduced_dims(func, args, kwargs)
            seen = readers(lambda x, func=func, args=args, kwargs=kwargs: func(x, *args[1:], **kwargs), x)
            if dims is None:
                assert not any((reads.sum(1) > 1).any() for reads in seen), func
                continue
            named += 1
            reduced = {dim % x.ndim for dim in dims}
            kept = [dim for dim in range(x.ndim) if dim not in reduced]
            for reads in seen:
                for row in reads:  # the places that one element of the result reads
                    places = torch.stack(torch.unravel_index(row.nonzero()[:, 0], x.shape), 1)
                    assert all(len(places[:, dim].unique()) <= 1 for dim in kept), (func, dims)
            most = torch.stack([reads.sum(1).max() for reads in seen if reads.numel()]).max()
            assert most > 1 or torch.tensor([x.shape[dim] for dim in reduced]).prod() == 1, (func, dims)
    assert named or name == "the larger of two"


@pytest.mark.parametrize("name", MOVE)
def test_an_operator_that_moves_elements_makes_no_new_ones(name: str) -> None:
    moved = 0
    for shape in SHAPES:
        for func, args, kwargs in operators_in(MOVE[name], shape):
            if name_of(func) not in MOVES:
                continue
            moved += 1
            known = {0.0, *args[0].double().flatten().tolist()}
            for out in elements(func(*args, **kwargs)):
                assert set(out.flatten().tolist()) <= known, func
            for reads in readers(lambda x, func=func, args=args, kwargs=kwargs: func(x, *args[1:], **kwargs), args[0]):
                assert (reads.sum(1) <= 1).all(), func
    assert moved >= len(SHAPES)


def test_what_has_only_the_shape_has_no_values() -> None:
    x = torch.randn(2, 3)
    for name in sorted(CONSTANT):
        more = {"new_zeros": [(2, 3)], "new_ones": [(2, 3)], "new_full": [(2, 3), 5.0], "full_like": [5.0]}.get(
            name, []
        )
        function = getattr(torch.ops.aten, name)
        (reads,) = readers(lambda x, function=function, more=more: function(x, *more), x)
        assert not reads.any() and len(function(x, *more).unique()) == 1, name
    assert all(hasattr(torch.ops.aten, name) for name in (*CONSTANT, *EMPTY, *RANDOM, *SIZES, *MOVES, *ALONG))


def test_a_view_that_says_it_is_none_stays_one_each_time() -> None:
    x = torch.empty(4, 6, device="meta")
    views = [on_meta(torch.ops.aten._unsafe_view.default, (x, [2, 12]), {}) for _ in range(2)]
    assert {storage_key(view) for view in views} == {storage_key(x)}


def test_tensors_out_of_nothing_are_known_by_where_they_are_made() -> None:
    zeros = torch.ops.aten.zeros.default
    for _ in range(2):
        made = [on_meta(zeros, ([2, 3],), {"device": torch.device(where)}) for where in ("meta", "cpu", "meta")]
        assert [x.device.type for x in made] == ["meta", "cpu", "meta"]
        assert [x.shape for x in made] == [(2, 3)] * 3 and storage_key(made[0]) != storage_key(made[2])
        assert on_meta(zeros, ([2, 3],), {}).device.type == "cpu"
        made[1].fill_(1)
        assert not on_meta(zeros, ([2, 3],), {"device": torch.device("cpu")}).any(), "numbers are made anew"


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
