"""Attention over a sequence that is sharded over ranks, with the model's attention function and its full mask.

:func:`attention_over_rows` replaces the attention function of the blocks
(:mod:`autopar.features.context_parallel.setup`), and calls the function that the model's config names (``eager``,
``sdpa``, ...). There are two methods:

* ``ulysses`` (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509): an all-to-all exchanges local rows of all heads
  for all rows of local heads. Each rank computes attention over the full sequence, and the output is exchanged back.
* ``gather``: keys and values are gathered, and the local queries use their rows of the mask. It works with any number
  of heads. Causal attention without a mask only needs the keys up to the last query of a run of rows; with zigzag
  sharding these are equally many on every rank. Long runs are computed in pieces, and again in the backward pass, so
  that only the mask of one piece exists at a time.

With both methods the model's code makes the full mask on each rank. The exchange supports uneven numbers of rows and
heads, rows in any order, and heads that several ranks hold.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autopar.compat.tensors import own_parameters
from autopar.compat.transformers import attention_of
from autopar.distributed.autograd_functions import refuse_again
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gather_sum, linear, note_on_meta, run
from autopar.distributed.gloo_collectives import all_to_all_single
from autopar.errors import ConfigError
from autopar.features.context_parallel.state import RowState
from autopar.layout import Block, Layout, even_shards
from autopar.swap import replaced

IMPLEMENTATION = "autopar_rows"
"""Name of :func:`attention_over_rows` among transformers' attention functions."""
_MOST = 1 << 24
"""Largest number of mask entries that exist at a time."""
_PER_HEAD = ("s_aux", "sinks")  # arguments and attributes with one number for each head
_BIASES = ("position_bias",)  # [batch or 1, heads, queries, keys]
_EAGER = ("eager_attention_forward", "simple_eager_attention_forward", "text_eager_attention_forward")


class _Call(NamedTuple):
    """A call of the model's attention function; ``given``: its other arguments."""

    function: Callable[..., Any]
    module: nn.Module
    query: torch.Tensor  # [batch, heads, rows, head_dim]
    key: torch.Tensor  # [batch, kv_heads, rows, head_dim], like value
    value: torch.Tensor
    mask: Any  # [batch, 1 or heads, rows, rows], or another value that the function supports
    given: dict[str, Any]

    def made(self) -> torch.Tensor:
        """Return the output, ``[batch, rows, heads, head_dim]``."""
        return self.function(self.module, self.query, self.key, self.value, self.mask, **self.given)[0]


class Implementation(str):
    """Name of an attention function: equal to the model's name (``== "sdpa"``), hashed as :data:`IMPLEMENTATION`."""

    def __eq__(self, other: object) -> bool:
        return other == IMPLEMENTATION or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(IMPLEMENTATION)


def register() -> None:
    """Register :func:`attention_over_rows` in transformers; only models that name it use it."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_over_rows)


def attention_over_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for the local rows.

    Args:
        query: Queries, ``[batch, heads, rows/cp, head_dim]``.
        key: Keys, ``[batch, kv_heads, rows/cp, head_dim]``, or all rows of another sequence (of an encoder).
        value: Values, shaped like ``key``.
        attention_mask: Full mask, ``[batch, 1 or heads, rows, rows]``.

    Returns:
        The output, ``[batch, rows/cp, heads, head_dim]``, and None for attention maps.
    """
    state: RowState = module._autopar_rows  # type: ignore[assignment]
    name, function = plain_attention(module)
    call = _Call(function, module, query, key, value, attention_mask, kwargs)
    layout = state.layouts.get(module._autopar_list) if state.cutting else None  # type: ignore[call-overload]
    if not state.cutting:
        state.check_recomputed()
    if layout is None:
        return function(module, query, key, value, attention_mask, **kwargs)
    if state.watch is not None:
        others = {name: x for name, x in kwargs.items() if name not in _BIASES}
        return state.watch(module, query, key, value, attention_mask, others), None
    crosses = state.plan.crosses.get(str(module._autopar_path))
    if crosses is None:
        raise ConfigError(
            f"context_parallel_size={state.axis.size} is not supported with these inputs: {module._autopar_path} "
            "computes attention that the dry run of initialize did not reach.\n"
            "  Use tensor_parallel_size or sequence_parallel for these inputs."
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    ulysses = state.method == "ulysses" or (state.method == "auto" and kv_heads % state.axis.size == 0)
    if not crosses and ulysses and heads % kv_heads == 0:
        return _ulysses(state, layout, call), None
    if not crosses:
        key, value = (gather_sum(x, state.axis, 2, layout) for x in (key, value))
        call = call._replace(key=key, value=value)
    return _with_whole_keys(layout, state.axis.rank, name, call, crosses), None


def plain_attention(module: nn.Module) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of the attention that the model's config names.

    Raises:
        ConfigError: The function is not found.
    """
    name = str(attention_of(type(module.config)._autopar_whole) or "eager")  # type: ignore[union-attr]
    for kind in type(module).__mro__:
        file = sys.modules.get(kind.__module__)
        functions = getattr(file, "ALL_ATTENTION_FUNCTIONS", None)
        if functions is not None:
            if name != "eager":
                return name, functions[name]
            eager = [getattr(file, each) for each in _EAGER if hasattr(file, each)]
            if len(eager) == 1:
                return name, eager[0]
    raise ConfigError(
        f"context_parallel_size is not supported with attention '{name}' of {type(module).__name__}: "
        f"{type(module).__module__} has no function for it\n"
        "  Use another one, such as model.set_attn_implementation('sdpa')."
    )


# -- ulysses ------------------------------------------------------------------------------------------------------


def _ulysses(state: RowState, rows: Layout, call: _Call) -> torch.Tensor:
    axis, (heads, kv_heads) = state.axis, (call.query.shape[1], call.key.shape[1])
    groups = heads // kv_heads
    if kv_heads >= axis.size:  # each rank gets full groups of query heads, with their keys
        of_queries, of_keys = heads_layout(kv_heads, groups, axis.size), heads_layout(kv_heads, 1, axis.size)
    else:
        of_queries = heads_layout(heads, 1, axis.size)
        of_keys = keys_layout(of_queries, kv_heads)
    query = exchange(call.query, axis, of_queries, rows, to_heads=True)  # [batch, heads/cp, rows, head_dim]
    key, value = (exchange(x, axis, of_keys, rows, to_heads=True) for x in (call.key, call.value))
    if kv_heads < axis.size and query.shape[1]:
        low, high = of_queries.ranges(axis.rank)[0]
        if key.shape[1] == 1 and "num_key_value_groups" in vars(call.module):
            groups = high - low
        else:  # one key for each query head, because the rank may hold partial groups
            place = torch.tensor([head // groups - low // groups for head in range(low, high)], device=key.device)
            key, value, groups = key.index_select(1, place), value.index_select(1, place), 1
    full = {name: state.full_of(x) for name, x in call.given.items() if isinstance(x, torch.Tensor)}  # positions
    given = call.given | full
    given |= {name: _of_heads(given[name], of_queries, axis.rank) for name in (*_PER_HEAD, *_BIASES) if name in given}
    if query.shape[1]:
        mask = _of_heads(call.mask, of_queries, axis.rank)
        with _narrowed(call.module, of_queries, axis.rank, groups):
            out = call._replace(query=query, key=key, value=value, mask=mask, given=given).made()
    else:  # fewer heads than ranks: no heads here, but the collectives need this rank
        out = (query + 0 * (key.sum() + value.sum())).transpose(1, 2)[..., : value.shape[-1]]
    out = exchange(out.transpose(1, 2), axis, of_queries, rows, to_heads=False)
    return out.transpose(1, 2).contiguous()


def _of_heads(x: Any, layout: Layout, rank: int) -> Any:
    """Keep the local heads of ``[heads]`` or ``[batch, heads, queries, keys]``; a broadcast dim of 1 stays."""
    if not isinstance(x, torch.Tensor):
        return x
    dim = 1 if x.ndim == 4 else 0
    return layout.shard(x, rank, dim) if x.shape[dim] == layout.size and layout.size > 1 else x


@contextmanager
def _narrowed(module: nn.Module, layout: Layout, rank: int, groups: int) -> Iterator[None]:
    """Set head counts and per-head parameters of the module to the local heads while its function runs."""
    own, mine = vars(module), own_parameters(module)
    counts = {"num_key_value_groups": groups} if "num_key_value_groups" in own else {}
    held = {name: _of_heads(mine[name], layout, rank) for name in _PER_HEAD if mine.get(name) is not None}
    with replaced(own, counts), replaced(mine, held):
        yield


# -- keys of all rows ---------------------------------------------------------------------------------------------


def _with_whole_keys(rows: Layout, rank: int, name: str, call: _Call, crosses: bool) -> torch.Tensor:
    mask = call.mask
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 4):
        kind = f"{list(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ConfigError(
            f"context_parallel_method=gather requires a mask of 4 dims; '{name}' attention got {kind}.\n"
            "  Use context_parallel_method: ulysses, or model.set_attn_implementation('sdpa')."
        )
    if name not in ("eager", "sdpa"):
        raise ConfigError(
            f"context_parallel_method=gather is not supported with '{name}' attention, which does not use mask tensors"
            "\n  Use context_parallel_method: ulysses, or model.set_attn_implementation('sdpa')."
        )
    given = dict(call.given)
    biases = {bias: _of_rows(given[bias], rows, rank) for bias in _BIASES if given.get(bias) is not None}
    causal = given.get("is_causal")
    causal = getattr(call.module, "is_causal", True) if causal is None else causal  # like transformers' sdpa
    if mask is None and name == "sdpa" and not crosses and causal:
        if not biases:
            return _causal_attention(call, rows, rank)
        mask = _causal_rows(rows, rank, call.query.device)
    given |= biases
    if "is_causal" in given or name != "eager":
        given["is_causal"] = False
    return call._replace(mask=_of_rows(mask, rows, rank), given=given).made()


def _causal_rows(rows: Layout, rank: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of the local rows, ``[1, 1, rows/cp, rows]``: True where a row may attend."""
    positions = torch.arange(rows.size, device=device)
    own = rows.shard(positions, rank, 0)
    return (own[:, None] >= positions[None, :])[None, None]


def _of_rows(mask: Any, rows: Layout, rank: int) -> Any:
    """Keep the local rows of ``[batch, heads, rows, keys]``; a broadcast row or a local mask stays."""
    if mask is None or mask.shape[2] in (1, rows.local_size(rank)):
        return mask
    return rows.shard(mask, rank, 2)


def _causal_attention(call: _Call, rows: Layout, rank: int) -> torch.Tensor:
    """Compute causal attention of the local rows to the keys of all rows."""
    runs = rows.ranges(rank)
    pieces = list(_pieces(runs))
    again = len(pieces) > len(runs) and torch.is_grad_enabled()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        device = query.device
        mask = torch.arange(start, stop, device=device)[:, None] >= torch.arange(stop, device=device)
        given = {**call.given, "is_causal": False}
        return call._replace(query=query, key=key, value=value, mask=mask[None, None], given=given).made()

    found = []
    for place, start, stop in pieces:
        queries = call.query[:, :, place : place + stop - start]
        given = (queries, call.key[:, :, :stop], call.value[:, :, :stop], start, stop)
        found.append(checkpoint(attend, *given, use_reentrant=False) if again else attend(*given))
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def _pieces(runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(index among the local rows, first row, end row)`` of each piece."""
    place = 0
    for low, high in runs:
        size = max(_MOST // high, 16)
        for start in range(low, high, size):
            stop = min(start + size, high)
            yield place, start, stop
            place += stop - start


# -- rows exchanged for heads --------------------------------------------------------------------------------------


def heads_layout(units: int, width: int, ranks: int) -> Layout:
    """Return the layout along dim 1 of ``units`` groups of ``width`` heads each; a rank may have none."""
    return Layout.of(1, [Block("heads", units, width, even_shards(units, ranks))])


def keys_layout(queries: Layout, kv_heads: int) -> Layout:
    """Return the layout of the KV heads that each rank's query heads need, for more ranks than KV heads.

    >>> keys_layout(heads_layout(6, 1, 4), 2).ranges(1)  # heads 2 and 3, of groups of three
    ((0, 2),)
    """
    each = queries.size // kv_heads
    held = [next(iter(queries.ranges(rank)), (0, 0)) for rank in range(queries.axis_size)]
    needed = tuple((low // each, -(-high // each)) if low < high else (0, 0) for low, high in held)
    return Layout.of(1, [Block("heads", kv_heads, 1, needed)])


def exchange(x: torch.Tensor, axis: Axis, heads: Layout, rows: Layout, *, to_heads: bool) -> torch.Tensor:
    """Exchange rows for heads, ``[batch, heads, rows/cp, d] -> [batch, heads/cp, rows, d]``, or back."""
    return _Exchange.apply(x, axis, heads, rows, to_heads)


def _exchange(x: torch.Tensor, axis: Axis, heads: Layout, rows: Layout, to_heads: bool) -> torch.Tensor:
    given, taken = (1, 2) if to_heads else (2, 1)  # dim that becomes sharded, dim that becomes full
    by_given, by_taken = (heads, rows) if to_heads else (rows, heads)
    shape = list(x.shape)
    shape[given] = by_given.local_size(axis.rank)
    received = []
    for rank in range(axis.size):
        shape[taken] = by_taken.local_size(rank)
        received.append(tuple(shape))
    if axis.group is None:
        note_on_meta("all_to_all_single", x, [sum(math.prod(each) for each in received)])
        shape[taken] = by_taken.size
        return x.new_empty(shape)
    sent = [by_given.shard(x, rank, given).view(-1) for rank in range(axis.size)]
    sizes = [math.prod(each) for each in received]
    out = x.new_empty(sum(sizes))
    run(all_to_all_single, axis, out, torch.cat(sent), sizes, [part.numel() for part in sent])
    parts = [part.view(each) for part, each in zip(out.split(sizes), received, strict=True)]
    return _summed(parts, by_taken, taken) if by_taken.replicated else by_taken.unshard(parts, taken)


def _exchange_back(grad: torch.Tensor, axis: Axis, heads: Layout, rows: Layout, to_heads: bool) -> torch.Tensor:
    return _exchange(grad, axis, heads, rows, not to_heads)


_Exchange = linear("_Exchange", _exchange, _exchange_back, refuse_again, "all-to-all: rows and heads")


def _summed(parts: list[torch.Tensor], layout: Layout, dim: int) -> torch.Tensor:
    """Join gradients; gradients of heads that several ranks hold are summed."""
    shape = list(parts[0].shape)
    shape[dim] = layout.size
    full = parts[0].new_zeros(shape)
    for rank, part in enumerate(parts):
        offset = 0
        for start, stop in layout.ranges(rank):
            full.narrow(dim, start, stop - start).add_(part.narrow(dim, offset, stop - start))
            offset += stop - start
    return full
