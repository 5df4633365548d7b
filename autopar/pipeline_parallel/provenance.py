"""Provenance of tensors: which results of a stage were computed from tensors that it does not hold.

The code in front of a stage's blocks runs on placeholders, and what it computes is replaced by what the stage receives.
Were anything of it used after all, the result would be wrong. A dispatch mode follows each tensor from the placeholders
on, through views, writes in place and comparisons too, where a value that is not a number leaves no trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils.generic import ModelOutput

from autopar.distributed.rng import Generators
from autopar.distributed.whole_on_read import WholeOnRead, parts_of
from autopar.errors import AutoparError, ConfigError, UnsupportedModelError, listed
from autopar.foreign.tensors import ITEM, schema_of
from autopar.pipeline_parallel.kv_cache import copy_caches
from autopar.pipeline_parallel.outputs import incomplete
from autopar.pipeline_parallel.p2p import map_tensors
from autopar.tensor_tracking import TensorTracking, storage_key, tensors_in, written_in_place

if TYPE_CHECKING:
    from autopar.pipeline_parallel.stage_forward import StageForward

_PADDING = re.compile(r"padding token|pad_token", re.IGNORECASE)

# Operations that read shapes and dtypes only.
_VALUELESS = frozenset(
    f"{name}{ending}"
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    for ending in ("_like",)
) | {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}


class Provenance(TensorTracking):
    """Dispatch mode in which each tensor knows the names of the marked tensors from which it was computed.

    Attributes:
        read_by_control_flow: names whose values decided which code ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, frozenset[str]] = {}  # of a storage
        self._alive: list[Any] = []  # so that no other storage gets the number of a marked one
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
        """The origins of a tensor; of one that is whole on reading those of its parts, which does not read it."""
        keys = [storage_key(part) for part in parts_of(tensor)]
        return frozenset().union(*(self._origins.get(key, frozenset()) for key in keys if key is not None))

    def _set(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        if isinstance(tensor, WholeOnRead):
            return  # made of parts, which are followed
        key = storage_key(tensor)
        if key is None or names == self._origins.get(key, frozenset()):
            return
        if names and key not in self._origins:
            self._alive.append(tensor.untyped_storage())
        self._origins[key] = names

    def track(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the result, and what is written in place, the origins of the arguments."""
        inputs = list(tensors_in((args, kwargs)))
        found = frozenset().union(*map(self._of, inputs))
        if not found or schema_of(func).name.rpartition("::")[2] in _VALUELESS:
            return
        if func is ITEM:
            self.read_by_control_flow |= found
        # the schemas of collectives do not say what they write
        collective = func.namespace in ("c10d", "_c10d_functional")
        for tensor in [*tensors_in(result), *(inputs if collective else written_in_place(func, args, kwargs))]:
            self._set(tensor, found)


@dataclass
class Examined:
    """Result of :func:`examine`.

    Attributes:
        result: of the stage's forward.
        missing: names of placeholders that were used, or outputs of elements ("the output of ...").
        unavailable: entries of the last stage's result that are computed from placeholders, and nothing else is.
    """

    result: Any
    missing: frozenset[str]
    unavailable: tuple[str, ...] = ()


def examine(
    forward: StageForward,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    finish: Callable[[Any], Any] | None = None,
) -> Examined:
    """Run a stage and follow what is computed from placeholders, and from outputs that it did not receive.

    Raises:
        UnsupportedModelError: the model writes in place into outputs of blocks.
    """
    kept = copy_caches(args, kwargs)
    state = Generators.now()
    result, provenance = _followed(forward, model, args, kwargs)
    if forward.skipped_source:  # the block in front of this stage is not called: the one before it is what counts
        state.restore()
        forward.restart(forward.before[-1])
        result, provenance = _followed(forward, model, *kept)
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
    return Examined(result, missing, tuple(unavailable))


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
        if not isinstance(error, AutoparError):
            check_padding(error)
            if forward.start > 0:  # the first stage had the same arguments
                error.add_note(
                    f"Raised behind the elements {forward.start} to {forward.stop - 1} of the pipeline. If "
                    "pipeline_parallel_size=1 does not raise the same,\nthis model cannot be split into pipeline "
                    "stages: its code behind the blocks reads more than the last one's output."
                )
        raise
    finally:
        forward.provenance = None


def check_padding(error: Exception) -> None:
    """Raise ConfigError if the model's own code asks for a padding token."""
    if _PADDING.search(str(error)):
        alone = ", or give every\n  micro-batch one sample (pipeline.microbatch_size: 1)"
        raise ConfigError(
            f"{str(error).splitlines()[0]}\n  Set model.config.pad_token_id (to tokenizer.pad_token_id)"
            f"{alone if 'batch size' in str(error) else ''}."
        ) from error


def explain(forward: StageForward, missing: frozenset[str]) -> str:
    """Return the error of a stage that reads what it does not have."""
    read = listed(sorted(missing), 4)
    return (
        f"this model cannot be split into pipeline stages here: the elements {forward.start} to {forward.stop - 1} of "
        f"the pipeline, or the loss behind them, read {read}, which another stage holds.\n  Blocks or the head use "
        "it beside the output of the block before (features of an image, say). Split the model elsewhere "
        "(pipeline.layers_per_stage), leave that input or criterion out, or use pipeline_parallel_size=1."
    )
