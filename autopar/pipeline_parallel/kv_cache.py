"""KV caches of a model in stages: each rank keeps the keys and values of its own layers, and sends no cache.

A model makes positions and masks from the length of the sequence so far, for which it asks one layer of its cache,
often the first. So layers that run on other ranks are told the length: they get keys and values of width 1.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache


def find_cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cache | None:
    """Return the cache among the arguments of a call; None without one."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)


def copy_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Copy the caches among the arguments of a call that may have to run twice; the rest stays the same object."""
    copied = [copy.deepcopy(value) if isinstance(value, Cache) else value for value in (*args, *kwargs.values())]
    return copied[: len(args)], dict(zip(kwargs, copied[len(args) :], strict=True))


def kind_of_cache(cache: Cache) -> tuple[str, bool | None]:
    """Return what of a cache decides which code of a model runs: whether it holds anything, if it tells."""
    with contextlib.suppress(Exception):
        return "cache", int(cache.get_seq_length()) > 0
    return "cache", None


def record_length(
    block: nn.Module, cache: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tokens: torch.Tensor | None
) -> None:
    """Extend the layer of a block that runs on another rank by the length of this call.

    Args:
        args, kwargs: of the block; its hidden states are ``[batch, seq, width]``, or ``[seq, batch, width]``.
        tokens: of the model's call, ``[batch, seq]``; for hidden states of several streams, or with time first.
    """
    hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    index = _layer_index(block)
    if index is None or hidden is None:
        return
    rows = getattr(getattr(block, "rows_list", None), "rows", None)
    if hidden.ndim == 3 and rows is not None:  # sequence parallelism: keys and values are whole
        _extend(cache, index, hidden.new_empty(hidden.shape[0], rows.size))
    elif hidden.ndim == 3:
        time_first = tokens is not None and hidden.shape[:2] == tokens.shape[1::-1]
        _extend(cache, index, hidden.transpose(0, 1) if time_first else hidden)
    elif hidden.ndim == 4 and tokens is not None:
        _extend(cache, index, tokens)


def tokens_of(kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tokens among a model's arguments, or what they are embedded as: ``[batch, seq, ...]``."""
    names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
    found = (kwargs.get(name) for name in names)
    return next((value for value in found if isinstance(value, torch.Tensor)), None)


def record_lengths(cache: Any, kwargs: Mapping[str, Any]) -> None:
    """Extend all layers by the length of this call's tokens, on a rank that ran nothing of it."""
    tokens = tokens_of(kwargs)
    if tokens is not None:
        for index in range(len(getattr(getattr(cache, "self_attention_cache", cache), "layers", ()))):
            _extend(cache, index, tokens)


def _extend(cache: Any, index: int, like: torch.Tensor) -> None:
    """Extend layer ``index`` by keys and values ``[batch, 1, seq, 1]``; ``like`` is ``[batch, seq, ...]``."""
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if layers is None or (index < len(layers) and not hasattr(layers[index], "get_mask_sizes")):
        return
    narrow = torch.zeros(like.shape[0], 1, like.shape[1], 1, device=like.device)
    cache.update(narrow, narrow, index)


def _layer_index(block: nn.Module) -> int | None:
    for module in block.modules():
        for name in ("layer_idx", "layer_index", "layer_id"):
            value = vars(module).get(name)
            if type(value) is int:
                return value
    return None
