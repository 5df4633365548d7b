"""Replay of equal blocks: in a dry run one of them computes, and the others answer as it did.

A replay stands for a block only where nothing could make a difference: the blocks are equal
(:mod:`autopar.dry_run.equal_blocks`), the arguments have the same structure, shapes and properties, the plain
attributes that the first one's ``forward`` read have the same values, and it neither wrote into its arguments nor
returned a view of them. Everything else is computed. Code around the blocks always runs, once for each block.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.dry_run.equal_blocks import EqualBlocks, Place
from autopar.foreign.tensors import TreeSpec, tree_flatten, tree_unflatten, version_of
from autopar.layout import Layout
from autopar.swap import swap, unswap
from autopar.tensor_tracking import PLAIN, storage_key

_PLAIN = (*PLAIN, Layout)

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""


def form_of(tensor: torch.Tensor) -> Form:
    """Return what a tensor on the meta device is made of."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def tensor_of(form: Form) -> torch.Tensor:
    """Return a tensor on the meta device of that form."""
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


class _ReadsSeen:
    """Class before that of a module some of whose attributes were taken away, so that a read of one is seen.

    ``nn.Module`` asks ``__getattr__`` for what is not in ``__dict__``.
    """

    _autopar_plain_values: dict[str, Any]
    _autopar_reads: set[str]

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("_autopar_plain_values", ())
        if name not in values:
            return super().__getattr__(name)  # type: ignore[misc]
        vars(self)["_autopar_reads"].add(name)
        return vars(self)["_autopar_plain_values"][name]


@contextmanager
def _reads_seen(block: nn.Module, places: Sequence[Place]) -> Iterator[dict[Place, Any]]:
    """Note which of these attributes are read inside, with their values."""
    found: dict[Place, Any] = {}
    names: dict[str, list[str]] = {}
    for path, name in places:
        names.setdefault(path, []).append(name)
    modules = {path: block.get_submodule(path) for path in names}
    try:
        for path, module in modules.items():
            own = {name: vars(module).pop(name) for name in names[path]}
            swap(module, _ReadsSeen, _autopar_plain_values=own, _autopar_reads=set())
        yield found
    finally:
        for path, module in modules.items():
            seen: Any = module
            values, reads = seen._autopar_plain_values, seen._autopar_reads
            unswap(module, _ReadsSeen, "_autopar_plain_values", "_autopar_reads")
            written = {name: vars(module)[name] for name in values if name in vars(module)}
            vars(module).update({**values, **written})
            found |= {(path, name): values[name] for name in {*reads, *written}}


@dataclass
class _Known:
    """Record of one block's forward.

    Attributes:
        read: plain attributes that its forward read.
        values: their values.
        outputs: the leaves of what it returned: the place of an argument (-1: None), or what
            :meth:`BlockReplay.keep` kept.
    """

    read: tuple[Place, ...]
    values: list[Any]
    outputs: list[tuple[int | None, Any]]
    structure: TreeSpec


class BlockReplay(ABC):
    """The replay of the equal blocks of one copy of a model, which is on the meta device. A context manager.

    Subclasses say in :meth:`describe`, :meth:`keep` and :meth:`make` what a dry run follows about tensors.
    """

    alone = True  # whether what the block that runs now did follows from the block and its arguments

    def __init__(self, model: nn.Module, groups: Sequence[EqualBlocks]) -> None:
        self._known: dict[Any, list[_Known]] = {}
        self._blocks: list[nn.Module] = []
        for number, group in enumerate(groups):
            for path in group.paths:
                block = model.get_submodule(path)
                if "forward" not in vars(block):
                    self._attach(block, number, group.differing)

    def _attach(self, block: nn.Module, group: int, differing: tuple[Place, ...]) -> None:
        forward = block.forward

        @functools.wraps(forward)
        def replayed(*args: Any, **kwargs: Any) -> Any:
            return self._call(block, group, differing, forward, args, kwargs)

        block.forward = replayed
        self._blocks.append(block)

    def __enter__(self) -> BlockReplay:
        return self

    def __exit__(self, *exc: object) -> None:
        for block in self._blocks:  # their own forward again
            vars(block).pop("forward", None)

    def comparable(self, block: nn.Module) -> bool:
        """Return whether the block itself is like the others now."""
        return True

    @abstractmethod
    def describe(self, tensor: torch.Tensor) -> Any:
        """Return what must be the same of an argument beside its form; hashable. None: this call must be computed."""

    @abstractmethod
    def keep(self, output: torch.Tensor, block: nn.Module, arguments: list[torch.Tensor]) -> Any:
        """Return what is needed to make an output again; None if that cannot be."""

    @abstractmethod
    def make(self, kept: Any, block: nn.Module, arguments: list[torch.Tensor]) -> torch.Tensor:
        """Return a tensor like the output that was kept, of another block with other arguments."""

    @contextmanager
    def running(self, block: nn.Module) -> Iterator[None]:
        """Watch a block that is computed; may set :attr:`alone` to False."""
        yield

    def _call(
        self, block: nn.Module, group: int, differing: tuple[Place, ...], forward: Any, args: Any, kwargs: Any
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        key = self._key(group, leaves, structure) if self.comparable(block) else None
        if key is None:
            return forward(*args, **kwargs)
        arguments = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for known in self._known.get(key, ()):
            if known.values == [_typed(block, place) for place in known.read]:
                arguments_or_none = [*leaves, None]
                outputs = [
                    self.make(kept, block, arguments) if place is None else arguments_or_none[place]
                    for place, kept in known.outputs
                ]
                return tree_unflatten(outputs, known.structure)
        versions = [version_of(tensor) for tensor in arguments]
        self.alone = True
        with _reads_seen(block, differing) as read, self.running(block):
            output = forward(*args, **kwargs)
        after, structure_after = tree_flatten((args, kwargs))
        untouched = structure_after == structure and all(now is then for now, then in zip(after, leaves, strict=True))
        if self.alone and untouched and [version_of(tensor) for tensor in arguments] == versions:
            outputs_kept = self._kept(output, block, leaves, arguments)
            if outputs_kept is not None:
                values = [_typed(block, place) for place in read]
                self._known.setdefault(key, []).append(_Known(tuple(read), values, *outputs_kept))
        return output

    def _key(self, group: int, leaves: list[Any], structure: TreeSpec) -> Any:
        parts: list[Any] = [group, structure]
        first: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                described = self.describe(leaf) if leaf.is_meta else None
                if described is None:
                    return None
                parts.append((form_of(leaf), described, first.setdefault(id(leaf), place)))
            elif isinstance(leaf, _PLAIN):
                parts.append((type(leaf), leaf))
            else:
                return None
        return tuple(parts)

    def _kept(
        self, output: Any, block: nn.Module, leaves: list[Any], arguments: list[torch.Tensor]
    ) -> tuple[list[tuple[int | None, Any]], TreeSpec] | None:
        given = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        storages = {storage_key(tensor) for tensor in arguments}
        returned, structure = tree_flatten(output)
        made: list[tuple[int | None, Any]] = []
        seen: set[int | None] = set()
        for leaf in returned:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) in given:
                    made.append((given[id(leaf)], None))
                    continue
                storage = storage_key(leaf)
                kept = self.keep(leaf, block, arguments) if leaf.is_meta else None
                if kept is None or storage in storages or storage in seen:
                    return None
                seen.add(storage)
                made.append((None, kept))
            elif leaf is None:
                made.append((-1, None))
            else:
                return None
        return made, structure


def _typed(block: nn.Module, place: Place) -> Any:
    path, name = place
    value = vars(block.get_submodule(path)).get(name)
    return type(value), value
