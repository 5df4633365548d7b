"""Attention over rows that lie on several ranks, by the model's own attention function and its own whole mask.

The function that a model's config names (``eager``, ``sdpa``, ...) is called by this one, which takes its place in the
blocks (:mod:`autopar.features.context_parallel.setup`). With ``n`` ranks of the axis:

* ``ulysses`` (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509): rows of all heads are exchanged for all rows of
  some heads, attention is computed as if the sequence were whole, and the output is exchanged back.
* ``gather``: keys and values of all ranks are gathered, and this rank's queries take their rows of the mask. No
  condition on the number of heads. Keys that no query sees are left out. Under plain causal attention a run of rows
  needs the keys up to its last row, and no more: with zigzag rows that is as much on every rank. No table of rows by
  rows is made: long runs are computed some queries at a time, and again in the backward pass, so that no more than the
  mask of one piece exists.

In both the mask is whole on each rank, made by the model's own code; none is ever replaced by a flag.
"""

from __future__ import annotations

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
from autopar.distributed.collectives import gather_sum
from autopar.errors import ConfigError
from autopar.features.context_parallel.rows import exchange, heads_layout, keys_layout
from autopar.features.context_parallel.state import RowState
from autopar.layout import Layout

IMPLEMENTATION = "autopar_rows"
"""Name of :func:`attention_over_rows` among transformers' attention functions."""
_MOST = 1 << 24
"""Entries of a mask that are made at a time."""


class _Call(NamedTuple):
    """A call of the model's own attention function.

    Attributes:
        query: ``[batch, heads, rows, head_dim]``; ``key``, ``value``: ``[batch, kv_heads, rows, head_dim]``.
        mask: ``[batch, 1 or heads, rows, rows]``, or what the function takes instead.
        given: the other arguments.
    """

    function: Callable[..., Any]
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    given: dict[str, Any]

    def made(self) -> torch.Tensor:
        """Return what it makes, ``[batch, rows, heads, head_dim]``."""
        return self.function(self.module, self.query, self.key, self.value, self.mask, **self.given)[0]


class Implementation(str):
    """Name of an attention: compared as the model's own (``== "sdpa"``), looked up as :data:`IMPLEMENTATION`."""

    def __eq__(self, other: object) -> bool:
        return other == IMPLEMENTATION or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(IMPLEMENTATION)


_PER_HEAD = ("s_aux", "sinks")  # arguments and attributes with one number for each head
_BIASES = ("position_bias",)  # [batch or 1, heads, queries, keys]


def register() -> None:
    """Make the function known to transformers; models that do not name it are not concerned."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_over_rows)


def attention_over_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of this rank's rows.

    Args:
        query: ``[batch, heads, rows/cp, head_dim]``; ``key``, ``value``: ``[batch, kv_heads, rows/cp, head_dim]``, or
            with all rows where they are those of another sequence (an encoder's).
        attention_mask: whole, ``[batch, 1 or heads, rows, rows]``.

    Returns:
        ``[batch, rows/cp, heads, head_dim]``, and no attention maps.
    """
    state: RowState = module._autopar_rows  # type: ignore[assignment]
    name, function = plain_attention(module)
    call = _Call(function, module, query, key, value, attention_mask, kwargs)
    layout = state.layout(module._autopar_list) if state.cutting else None  # type: ignore[arg-type]
    if not state.cutting:
        state.check_recomputed()
    if layout is None:
        return function(module, query, key, value, attention_mask, **kwargs)
    if state.watch is not None:
        return state.watch(
            module, query, key, value, attention_mask, {n: x for n, x in kwargs.items() if n not in _BIASES}
        ), None
    crosses = state.plan.crosses.get(str(module._autopar_path))
    if crosses is None:
        raise ConfigError(
            f"context_parallel_size={state.axis.size}: {module._autopar_path} computes attention, which the rehearsal "
            "of initialize did not see:\n  whether its keys are rows or another sequence is not known. These inputs "
            "need tensor_parallel_size, or sequence_parallel."
        )
    if not crosses and state.picks_ulysses(query.shape[1], key.shape[1]):
        return _ulysses(state, layout, call), None
    if not crosses:
        key, value = (gather_sum(x, state.axis, 2, layout) for x in (key, value))
        call = call._replace(key=key, value=value)
    return _with_whole_keys(layout, state.axis.rank, name, call, crosses), None


def plain_attention(module: nn.Module) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of the attention that the model's config asks for.

    Raises:
        ConfigError: it is ``eager``, and the model's file has no function of the usual name.
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
        f"context_parallel_size: the attention '{name}' of {type(module).__name__} is not found in "
        f"{type(module).__module__}. Another one may be: model.set_attn_implementation('sdpa')"
    )


_EAGER = ("eager_attention_forward", "simple_eager_attention_forward", "text_eager_attention_forward")


# -- ulysses ------------------------------------------------------------------------------------------------------


def _ulysses(state: RowState, rows: Layout, call: _Call) -> torch.Tensor:
    axis, (heads, kv_heads) = state.axis, (call.query.shape[1], call.key.shape[1])
    groups = heads // kv_heads
    if kv_heads >= axis.size:  # whole groups of heads with their key
        of_queries, of_keys = heads_layout(kv_heads, groups, axis.size), heads_layout(kv_heads, 1, axis.size)
    else:
        of_queries = heads_layout(heads, 1, axis.size)
        of_keys = keys_layout(of_queries, kv_heads)
    query = exchange(call.query, axis, of_queries, rows, to_heads=True)  # [batch, heads/cp, rows, head_dim]
    key, value = (exchange(x, axis, of_keys, rows, to_heads=True) for x in (call.key, call.value))
    if kv_heads < axis.size and query.shape[1]:
        key, value, groups = _of_groups(call.module, key, value, groups, of_queries.ranges(axis.rank)[0])
    given = {
        name: state.whole_of(x) if isinstance(x, torch.Tensor) else x for name, x in call.given.items()
    }  # positions
    given |= {name: _of_heads(given[name], of_queries, axis.rank) for name in (*_PER_HEAD, *_BIASES) if name in given}
    if query.shape[1]:
        mask = _of_heads(call.mask, of_queries, axis.rank)
        with _narrowed(call.module, of_queries, axis.rank, groups):
            out = call._replace(query=query, key=key, value=value, mask=mask, given=given).made()
    else:  # fewer heads than ranks: this one has none, and still takes part
        out = (query + 0 * (key.sum() + value.sum())).transpose(1, 2)[..., : value.shape[-1]]
    out = exchange(out.transpose(1, 2), axis, of_queries, rows, to_heads=False)
    return out.transpose(1, 2).contiguous()


def _of_groups(
    module: nn.Module, key: torch.Tensor, value: torch.Tensor, groups: int, held: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return keys and values of the query heads ``held``, and how many heads share one; parts of groups share none."""
    low, high = held
    if key.shape[1] == 1 and "num_key_value_groups" in vars(module):
        return key, value, high - low
    place = torch.tensor([head // groups - low // groups for head in range(low, high)], device=key.device)
    return key.index_select(1, place), value.index_select(1, place), 1


def _of_heads(x: Any, layout: Layout, rank: int) -> Any:
    """Some heads of ``[heads]`` or ``[batch, heads, queries, keys]``; what is the same for all heads stays."""
    if not isinstance(x, torch.Tensor):
        return x
    dim = 1 if x.ndim == 4 else 0
    return layout.shard(x, rank, dim) if x.shape[dim] == layout.size and layout.size > 1 else x


@contextmanager
def _narrowed(module: nn.Module, layout: Layout, rank: int, groups: int) -> Iterator[None]:
    """Let the module have numbers for some heads while its function reads them."""
    own, mine = vars(module), own_parameters(module)
    before = {"num_key_value_groups": own["num_key_value_groups"]} if "num_key_value_groups" in own else {}
    held = {name: mine.pop(name) for name in _PER_HEAD if mine.get(name) is not None}
    try:
        own.update(dict.fromkeys(before, groups))
        own.update({name: _of_heads(x, layout, rank) for name, x in held.items()})
        yield
    finally:
        own.update(before)
        for name, x in held.items():
            del own[name]
            own_parameters(module)[name] = x


# -- keys of all rows ---------------------------------------------------------------------------------------------


def _with_whole_keys(rows: Layout, rank: int, name: str, call: _Call, crosses: bool) -> torch.Tensor:
    mask = call.mask
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 4):
        kind = f"{list(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ConfigError(
            f"context_parallel_method=gather takes rows out of a mask of 4 dims, and '{name}' attention made one of "
            f"{kind}: use context_parallel_method: ulysses, or model.set_attn_implementation('sdpa')"
        )
    if name not in ("eager", "sdpa"):
        raise ConfigError(
            f"context_parallel_method=gather does not go with '{name}' attention, which is told of masks by flags: use "
            "context_parallel_method: ulysses, or model.set_attn_implementation('sdpa')"
        )
    given = dict(call.given)
    biases = {bias: _of_rows(given[bias], rows, rank) for bias in _BIASES if given.get(bias) is not None}
    causal = given.get("is_causal")
    causal = getattr(call.module, "is_causal", True) if causal is None else causal  # as transformers' sdpa decides it
    if mask is None and name == "sdpa" and not crosses and causal:
        if not biases:
            return _causal_attention(call, rows, rank)
        mask = _causal_rows(rows, rank, call.query.device)
    given |= biases
    if "is_causal" in given or name != "eager":
        given["is_causal"] = False
    return call._replace(mask=_of_rows(mask, rows, rank), given=given).made()


def _causal_rows(rows: Layout, rank: int, device: torch.device) -> torch.Tensor:
    """The mask of this rank's rows, ``[1, 1, rows/cp, rows]``: True where a row may look."""
    positions = torch.arange(rows.size, device=device)
    own = rows.shard(positions, rank, 0)
    return (own[:, None] >= positions[None, :])[None, None]


def _of_rows(mask: Any, rows: Layout, rank: int) -> Any:
    """This rank's rows of ``[batch, heads, rows, keys]``; a row for all stays, and what the module made of its rows."""
    if mask is None or mask.shape[2] in (1, rows.local_size(rank)):
        return mask
    return rows.shard(mask, rank, 2)


def _causal_attention(call: _Call, rows: Layout, rank: int) -> torch.Tensor:
    """Compute attention to keys of all rows where rows see themselves and what is before them."""
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
    """Yield where each piece begins among own rows, and its first row and the one behind its last."""
    place = 0
    for low, high in runs:
        size = max(_MOST // high, 16)
        for start in range(low, high, size):
            stop = min(start + size, high)
            yield place, start, stop
            place += stop - start
