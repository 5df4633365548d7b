"""Weights that a library stores in another form than a tensor of their shape, such as quantized weights.

A feature finds them in layers (table ``forms`` of :class:`autopar.registry.Feature`), shards and gathers them. In a
plan their layer is an ``nn.Linear`` with a :class:`StandIn` (:func:`as_plain`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from autopar import registry
from autopar.compat.tensors import own_parameters
from autopar.errors import ConfigError
from autopar.layout import Layout

_LIBRARIES = ("bitsandbytes", "torchao")  # packages with parameter classes for such weights


@dataclass(frozen=True)
class Kind:
    """A form of weights, independent of a weight.

    Attributes:
        form: The name of the form, for messages and plans.
        block: The number of consecutive elements along each dim that must be on one rank.
        takes_rows: True if the layer computes a value (a scale) from all inputs of a token.
        size: A function ``(shape, layout, rank)`` that returns the bytes of a rank's shard with its scales; the layout
            is None for a replicated weight.
        config: A function that returns transformers' ``quantization_config``, if the name determines it.
    """

    form: str
    block: tuple[int, int]
    takes_rows: bool
    size: Callable[[tuple[int, int], Layout | None, int], int]
    config: Callable[[], Any] | None = None

    def nbytes(self, shape: tuple[int, int], layout: Layout | None, rank: int) -> int:
        """Return the bytes of a rank's shard of a weight of this shape, including its scales."""
        return self.size(shape, layout if layout is not None and layout.axis_size > 1 else None, rank)

    def check(self, shown: str, shape: torch.Size, layout: Layout, match: Any) -> None:
        """Raise ConfigError if a rank would hold a partial block, or inputs that need a scale over all ranks.

        ``shown`` is the path of the weight, ``match`` the rule with its module
        (:class:`autopar.plan.matching.RuleMatch`).
        """
        if layout.axis_size == 1:
            return
        step, dim, table = self.block[layout.dim], layout.dim, match.scope.table
        what = f"tensor_parallel_size={table.size} does not fit {shown}: its weight ({self.form}) has"
        if shape[1] % self.block[1]:
            raise ConfigError(f"{what} {shape[1]} inputs, which must be a multiple of the block size {self.block[1]}.")

        def fits(size: int) -> bool:
            try:
                other = table.of_experts(size).layout(
                    match.rule.parts, dim, layout.size, shown, match.rule.where, match.scope.block
                )
                return other.in_steps(step) is not None
            except (ConfigError, ValueError):
                return False

        sizes = [layout.local_size(rank) for rank in range(layout.axis_size)]
        try:
            layout.in_steps(step)
        except ValueError:
            others = [size for size in range(2, 2 * table.size) if size != table.size and fits(size)]
            raise ConfigError(
                f"{what} blocks of {step} inputs, and ranks would hold {sizes} of {layout.size}.\n"
                f"  Use a size that fits this layer: {', '.join(map(str, [1, *others]))}."
            ) from None
        if self.takes_rows and dim == 1 and match.rule.kind in ("sharded", "norm_over"):
            raise ConfigError(
                f"tensor_parallel_size={layout.axis_size} does not fit {shown}: its weight ({self.form}) is "
                f"'sharded' inside a region, where ranks would hold {sizes} of {layout.size} inputs with one scale "
                f"({match.rule.where})\n  Use a 'row' rule, quantize it in 4 bits, or exclude it from quantization."
            )


class StoredWeight(Protocol):
    """The weight of one linear layer in the form of a library.

    Attributes:
        kind: The form of the weight.
        shape: The shape of the weight, ``(out, in)``.
        pending: True if it has no memory yet, and :meth:`materialize` makes it.
        hidden: The attributes of the layer that hold further tensors of the weight.
        dtype: The dtype of a parameter that stands for the weight without memory; None if it has memory.
    """

    kind: Kind
    shape: tuple[int, int]
    pending: bool
    hidden: tuple[str, ...] = ()
    dtype: torch.dtype | None = None

    def layer_class(self, rule: str) -> Any:
        """Return the mixin of a ``column`` or ``row`` layer for the class of the library."""

    def shard(self, layout: Layout, rank: int) -> None:
        """Keep only the shard of ``rank``, without communication."""

    def join(self, layout: Layout, axis: Any) -> None:
        """Undo :meth:`shard`; a collective of the axis."""

    def materialize(self, source: Any, layout: Layout | None, mpu: Any, read: Callable[[], torch.Tensor]) -> None:
        """Make this rank's shard of a pending weight from the lazy tensor ``source``.

        ``read`` returns this rank's shard of the dequantized weight if ``source`` is None (random initialization).
        """

    def beside(self) -> dict[str, torch.Tensor]:
        """Return the further tensors of the weight besides the parameter, by name."""

    def check_dtype(self, path: str, dtype: torch.dtype) -> None:
        """Raise ConfigError if the layer at ``path`` cannot multiply inputs of this dtype."""
        return

    def keep_form(self, keep: bool) -> None:
        """Keep evaluation from storing the weight in another form, or allow it again."""
        return

    def drop(self) -> None:
        """Free the memory of the weight."""

    def dequantized(self) -> torch.Tensor:
        """Return the weight, ``[out, in]``, that the layer multiplies with."""


class StandIn(nn.Parameter):
    """A placeholder for a stored weight in a plan, with its shape and kind but without memory."""

    kind: Kind


def stand_in(shape: tuple[int, int], dtype: torch.dtype, kind: Kind) -> StandIn:
    """Make the placeholder for a weight of this shape."""
    made = StandIn(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    made.kind = kind
    return made


def _finders() -> list[Callable[[nn.Module], StoredWeight | None]]:
    tables = (feature.forms.items() for feature in registry.features())
    return [registry.load(entry) for table in tables for library, entry in table if library in sys.modules]


def stored_weight(module: nn.Module) -> StoredWeight | None:
    """Return the stored weight of a layer; None for an ordinary weight."""
    return next(filter(None, (find(module) for find in _finders())), None)


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """Return the stored weights of ``model``, by the path of their layer."""
    if not _finders():
        return {}
    return {path: stored for path, module in model.named_modules() if (stored := stored_weight(module)) is not None}


def keep_form(model: nn.Module, keep: bool) -> None:
    """Keep evaluation from storing weights in another form, or allow it again."""
    for stored in stored_weights(model).values():
        stored.keep_form(keep)


@contextlib.contextmanager
def form_kept(model: nn.Module) -> Iterator[None]:
    """Keep evaluation in the block from storing weights in another form."""
    keep_form(model, keep=True)
    try:
        yield
    finally:
        keep_form(model, keep=False)


def block_of(model: nn.Module) -> int:
    """Return the number of consecutive inputs of stored weights that must be on one rank (in :func:`as_plain`)."""
    return max((p.kind.block[1] for p in model.parameters() if isinstance(p, StandIn)), default=1)


def without_memory(model: nn.Module) -> set[int]:
    """Return the ids of parameters that stand for stored weights without memory."""
    held = ((model.get_submodule(path), stored) for path, stored in stored_weights(model).items())
    return {id(own_parameters(module)["weight"]) for module, stored in held if stored.dtype is not None}


@contextlib.contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """Show layers with stored weights as ``nn.Linear`` in the block, with weights without memory.

    Raises ConfigError if the feature for such weights is not installed.
    """
    if any(type(parameter).__module__.partition(".")[0] in _LIBRARIES for parameter in model.parameters()):
        registry.need("transformers", f"{type(model).__name__} with quantized weights")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    found: list[tuple[Any, type, nn.Parameter, dict[str, Any]]] = []
    try:
        for path, stored in stored_weights(model).items():
            module = model.get_submodule(path)
            hidden = {name: vars(module).pop(name) for name in stored.hidden if name in vars(module)}
            found.append((module, type(module), own_parameters(module)["weight"], hidden))
            own_parameters(module)["weight"] = stand_in(stored.shape, dtype, stored.kind)
            module.__class__ = nn.Linear
        yield
    finally:
        for module, kind, weight, hidden in found:
            module.__class__ = kind
            own_parameters(module)["weight"] = weight
            vars(module).update(hidden)


def quantizers(what: str, quantizer: Any) -> Any:
    """Return the entry ``quantizers`` of a model that ``quantizer`` quantized; None if it is dequantized on loading.

    Raises:
        ConfigError: The form cannot be sharded, or the feature is not installed.
    """
    plain = quantizer is None or (
        quantizer.pre_quantized and getattr(quantizer.quantization_config, "dequantize", False)
    )  # transformers dequantizes weights while it loads them
    if plain:
        return None
    found = registry.entry("quantizers", "transformers", f"{what} with quantized weights")
    found.check(what, str(getattr(quantizer.quantization_config.quant_method, "value", "")))
    return found
