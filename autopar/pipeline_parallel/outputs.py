"""Merge the outputs of stages, keep KV caches per rank, and find results that depend on placeholders.

Outputs of all micro-batches are merged. Reading an entry that only another stage could compute raises.

Each rank keeps the keys and values of its layers and never sends a cache. A model derives positions and masks from the
length of one layer of its cache, often the first. So layers of other ranks get keys and values of width 1 and this
length.

The code before a stage's blocks runs on placeholders, and received tensors replace its results. A result that is still
used would be wrong. A dispatch mode follows each tensor from the placeholders on, through views, writes in place and
comparisons, where NaN would not show.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from autopar.compat.tensors import ITEM, schema_of
from autopar.distributed.rng import Generators
from autopar.errors import AutoparError, UnsupportedModelError, listed
from autopar.pipeline_parallel.p2p import is_output, map_tensors
from autopar.swap import plain_class, swap
from autopar.tensor_tracking import LIKE, TensorTracking, parts_of, storage_key, tensors_in, written_in_place

if TYPE_CHECKING:
    from autopar.pipeline_parallel.stage_forward import StageForward


def incomplete(output: Any, names: Sequence[str]) -> Any:
    """Make reading these entries of ``output``, or all entries as a tuple, raise; return ``output``."""
    if not names:
        return output
    kept = {name: value for name, value in dict.items(output) if name not in names}
    made = plain_class(output, IncompleteOutput)(**kept)
    readable = next((place for place, name in enumerate(output) if name in names), len(output))
    swap(made, IncompleteOutput, _unavailable=tuple(names), _readable=readable)
    return made


def complete(output: Any) -> Any:
    """Undo :func:`incomplete`, with None for unavailable entries."""
    if not isinstance(output, IncompleteOutput):
        return output
    entries: Any = output
    return plain_class(output, IncompleteOutput)(**dict(dict.items(entries)))


def unavailable(output: Any) -> tuple[str, ...]:
    """Return the names of the unavailable entries."""
    return output._unavailable if isinstance(output, IncompleteOutput) else ()


class IncompleteOutput:
    """A mixin before the class of an output, with the missing entries and the number of entries before the first."""

    _unavailable: tuple[str, ...] = ()
    _readable = 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._unavailable:
            _refuse(self, name)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        own: Any = self
        if isinstance(key, str):
            if key in self._unavailable:
                _refuse(self, key)
            return dict.__getitem__(own, key)
        entries = tuple(dict.values(own))
        if not isinstance(key, int) or not 0 <= key < self._readable:
            _refuse(self, f"[{key}]")
        return entries[key]

    def to_tuple(self) -> Any:
        _refuse(self, "all of them in a row")

    items = values = to_tuple


def _refuse(output: Any, entry: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{entry} of {type(output).__name__} is not available on the last pipeline stage: the first stage computes "
        f"{', '.join(output._unavailable)}.\n"
        "  Read the other entries by name, or use pipeline_parallel_size=1."
    )


def merge_outputs(outputs: list[Any], sizes: list[int], weights: list[float]) -> Any:
    """Merge the outputs of micro-batches: concatenate tensors with rows of samples, average other numbers.

    A sample has one row, ``[samples, ...]``, or several: ``[samples * frames, width]`` of videos, router logits
    ``[samples * seq, experts]``, or a row per image. A table that is equal in all micro-batches is not changed.
    ``sizes``: the numbers of samples. ``weights``: the factors of an average (of losses).
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        parts = [output.detach() for output in outputs]
        if _has_rows(parts, sizes):
            return torch.cat(parts)
        if _is_mean(parts):
            # The loss of a micro-batch without labels is NaN, and its weight is 0.
            return sum(x * weight if weight else torch.zeros_like(x) for x, weight in zip(parts, weights, strict=True))
        return torch.cat(parts) if first.ndim else first.detach()
    if isinstance(first, Cache):
        return None
    if isinstance(first, dict):  # also a ModelOutput
        merged = {name: merge_outputs([o[name] for o in outputs], sizes, weights) for name in first}
        return type(first)(**merged) if is_output(first) else merged
    if isinstance(first, list) and _has_samples(outputs, sizes):
        return [entry for output in outputs for entry in output]
    if isinstance(first, list | tuple):
        entries = [merge_outputs(list(each), sizes, weights) for each in zip(*outputs, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        each = {name: [getattr(output, name) for output in outputs] for name in names}
        return replace(first, **{name: merge_outputs(values, sizes, weights) for name, values in each.items()})
    return first


def _has_samples(outputs: list[Any], sizes: list[int]) -> bool:
    """Return whether lists have an entry per sample, instead of tensors of all samples."""
    tensors = [(entry, size) for output, size in zip(outputs, sizes, strict=True) for entry in output]
    rows = all(isinstance(entry, torch.Tensor) and entry.shape[:1] == (size,) for entry, size in tensors)
    return all(len(output) == size for output, size in zip(outputs, sizes, strict=True)) and not rows


def _has_rows(parts: list[torch.Tensor], sizes: list[int]) -> bool:
    """Return whether tensors have the same number of rows for each sample, at least one."""
    each = {divmod(len(part), max(size, 1)) if part.ndim else (0, 1) for part, size in zip(parts, sizes, strict=True)}
    if each == {(1, 0)}:
        return True
    even = len(each) == 1 and next(iter(each))[1] == 0
    return even and parts[0].ndim > 1 and not all(torch.equal(part, parts[0]) for part in parts[1:])


def _is_mean(parts: list[torch.Tensor]) -> bool:
    """Return whether each micro-batch has a number, or all have the same table, in contrast to rows of images."""
    first = parts[0]
    if not first.is_floating_point() or any(part.shape != first.shape for part in parts):
        return False
    return first.ndim < 2 or all(torch.equal(part, first) for part in parts[1:])


def find_cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cache | None:
    """Return the cache among the arguments of a call, or None."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)


def kind_of_cache(cache: Cache) -> tuple[str, bool | None]:
    """Return the type of a cache and whether it is filled (None: unknown), which determines the code of a model."""
    with contextlib.suppress(Exception):
        return "cache", int(cache.get_seq_length()) > 0
    return "cache", None


def record_length(
    block: nn.Module, cache: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tokens: torch.Tensor | None
) -> None:
    """Extend the layer of a block of another rank by the length of this call.

    The block's hidden states are ``[batch, seq, width]`` or ``[seq, batch, width]``. ``tokens`` of the model's call,
    ``[batch, seq]``, determine the length if there are several streams, or if time comes first.
    """
    hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    index = _layer_index(block)
    if index is None or hidden is None:
        return
    length = getattr(block, "full_length", None)
    if hidden.ndim == 3 and length is not None:  # hidden states may be sequence shards; keys and values are full
        _extend(cache, index, hidden.new_empty(hidden.shape[0], length))
    elif hidden.ndim == 3:
        time_first = tokens is not None and hidden.shape[:2] == tokens.shape[1::-1]
        _extend(cache, index, hidden.transpose(0, 1) if time_first else hidden)
    elif hidden.ndim == 4 and tokens is not None:
        _extend(cache, index, tokens)


def tokens_of(kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tokens among a model's arguments, or their embeddings: ``[batch, seq, ...]``."""
    names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
    return next((kwargs[name] for name in names if isinstance(kwargs.get(name), torch.Tensor)), None)


def record_lengths(cache: Any, kwargs: Mapping[str, Any]) -> None:
    """Extend all layers by the length of this call's tokens, on a rank that ran none of its stages."""
    tokens = tokens_of(kwargs)
    if tokens is not None:
        for index in range(len(getattr(getattr(cache, "self_attention_cache", cache), "layers", ()))):
            _extend(cache, index, tokens)


def _extend(cache: Any, index: int, like: torch.Tensor) -> None:
    """Extend layer ``index`` by keys and values ``[batch, 1, seq, 1]`` for ``like``, ``[batch, seq, ...]``."""
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


class Provenance(TensorTracking):
    """A dispatch mode that maps each tensor to the names of the marked tensors from which it was computed.

    ``read_by_control_flow`` contains the names whose values determined the code that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, frozenset[str]] = {}  # by storage
        self._alive: list[Any] = []  # so that storage numbers stay unique
        self.read_by_control_flow: frozenset[str] = frozenset()

    def mark(self, value: Any, names: Iterable[str]) -> None:
        """Set the origins of every tensor in ``value``."""
        found = frozenset(names)
        map_tensors(value, lambda tensor: self._set(tensor, found))

    def origins(self, value: Any) -> frozenset[str]:
        """Return the names from which any tensor in ``value`` was computed."""
        found: list[frozenset[str]] = []
        map_tensors(value, lambda tensor: found.append(self._of(tensor)))
        return frozenset().union(*found)

    def _of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the origins of a tensor; for a lazily gathered tensor, the origins of its shards."""
        keys = [storage_key(part) for part in parts_of(tensor)]
        return frozenset().union(*(self._origins.get(key, frozenset()) for key in keys if key is not None))

    def _set(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        if hasattr(type(tensor), "made_of"):
            return  # a lazily gathered tensor, whose shards are followed
        key = storage_key(tensor)
        if key is None or names == self._origins.get(key, frozenset()):
            return
        if names and key not in self._origins:
            self._alive.append(tensor.untyped_storage())
        self._origins[key] = names

    def track(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Set the origins of the arguments on the result, and on tensors written in place."""
        inputs = list(tensors_in((args, kwargs)))
        found = frozenset().union(*map(self._of, inputs))
        if not found or schema_of(func).name.rpartition("::")[2] in LIKE:  # reads only shape and dtype
            return
        if func is ITEM:
            self.read_by_control_flow |= found
        # schemas of collectives do not mark the arguments that they mutate
        collective = func.namespace in ("c10d", "_c10d_functional")
        for tensor in [*tensors_in(result), *(inputs if collective else written_in_place(func, args, kwargs))]:
            self._set(tensor, found)


def examine(
    forward: StageForward,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    finish: Callable[[Any], Any] | None = None,
) -> tuple[Any, frozenset[str], tuple[str, ...]]:
    """Run a stage and follow tensors computed from placeholders, and from outputs that it did not receive.

    Returns:
        The result, the names of the placeholders or outputs ("the output of ...") on which it depends, and the entries
        of the last stage's result that depend on placeholders if other entries do not.
    """
    kept = [copy.deepcopy(value) if isinstance(value, Cache) else value for value in (*args, *kwargs.values())]
    state = Generators.now()
    result, provenance = _followed(forward, model, args, kwargs)
    if (
        forward.before and forward.source not in forward.before
    ):  # the block before this stage was skipped, so start again
        state.restore()
        forward.restart(forward.before[-1])
        again = dict(zip(kwargs, kept[len(args) :], strict=True))
        result, provenance = _followed(forward, model, kept[: len(args)], again)
    missing, unavailable = provenance.read_by_control_flow, []
    if forward.last and isinstance(result, ModelOutput):
        chief = next((name for name in result if "loss" not in name), next(iter(result)))  # logits, or hidden states
        for name, value in result.items():
            origins = provenance.origins(value)
            if name == chief or "loss" in name:
                missing |= origins
            elif origins:
                unavailable.append(name)
        result = incomplete(result, unavailable) if unavailable else result
    else:
        missing |= provenance.origins(result)
    if finish is not None and forward.last and not missing:
        with provenance:
            forward.loss = finish(result)
        missing |= provenance.origins(forward.loss) | provenance.read_by_control_flow
    return result, missing, tuple(unavailable)


def _followed(
    forward: StageForward, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Provenance]:
    provenance = forward.provenance = Provenance()
    for name, tensor in forward.context.placeholders.items():
        provenance.mark(tensor, provenance.origins(tensor) | {name})
    try:
        with provenance:
            return forward.run(model, args, kwargs), provenance
    except Exception as error:
        if provenance.read_by_control_flow:
            text = explain(forward, provenance.read_by_control_flow)
            raise UnsupportedModelError(f"{text}\n  It ended with {type(error).__name__}.") from error
        if not isinstance(error, AutoparError) and forward.start > 0:  # the first stage had the same arguments
            error.add_note(
                f"Raised after the elements {forward.start} to {forward.stop - 1} of the pipeline. If it does not "
                "occur with pipeline_parallel_size=1,\nthis model is not supported with pipeline stages: its code "
                "after the blocks reads more than the output of the last block."
            )
        raise
    finally:
        forward.provenance = None


def explain(forward: StageForward, missing: frozenset[str]) -> str:
    """Return the error of a stage that reads tensors of another stage."""
    read = listed(sorted(missing), 4)
    return (
        f"this model cannot be split into pipeline stages here: the elements {forward.start} to {forward.stop - 1} of "
        f"the pipeline, or the loss after them, read {read}, which another stage holds.\n  Blocks or the head use it "
        "in addition to the output of the previous block (for example image features). Split the model elsewhere\n"
        "  (pipeline.layers_per_stage), leave that input or criterion out, or use pipeline_parallel_size=1."
    )
