"""Follow tensors through operations: the base of the dispatch modes, and what they ask of an operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from autopar.compat.tensors import TorchDispatchMode, dispatch_modes, schema_of, storage_id, tree_leaves

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of values that are known by themselves: no tensor is in them."""


class TensorTracking(TorchDispatchMode):
    """A dispatch mode that looks at every operation, and keeps no tensor that one returned, or copies.

    Attributes:
        answer: Function that carries out collectives instead of their backends, in a rehearsal; else None.
    """

    answer: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.run(func, args, kwargs)
        self.track(func, args, kwargs, result)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation."""
        return func(*args, **kwargs)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what ``func`` made of its arguments."""
        raise NotImplementedError

    def as_one(self, kind: str, group: Any) -> AbstractContextManager[None]:
        """Note one collective of that kind over a group, and none of the operations inside."""
        return nullcontext()


@contextmanager
def as_one(kind: str, group: Any) -> Iterator[Any]:
    """Let modes note what ranks do inside as one collective: it takes messages, or goes through a store.

    Yields:
        The ``answer`` of a mode that carries out collectives; None outside of a rehearsal.
    """
    with ExitStack() as stack:
        modes = [mode for mode in dispatch_modes() if isinstance(mode, TensorTracking)]
        for mode in modes:
            stack.enter_context(mode.as_one(kind, group))
        yield next((mode.answer for mode in modes if mode.answer is not None), None)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list):  # of an operation; torch takes ten times as long
        for each in value:
            yield from tensors_in(each)
    elif type(value) is dict:
        yield from tensors_in([*value.values()])
    elif not isinstance(value, PLAIN):
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that one without memory is made of, as its method ``made_of`` says; another tensor itself."""
    made_of = getattr(type(tensor), "made_of", None)
    return [tensor] if made_of is None else [x for part in made_of(tensor) for x in parts_of(part)]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number that views of a tensor have in common while one lives; None without a storage (sparse)."""
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def written_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation writes into, by its schema."""
    if not schema_of(func).is_mutable:
        return []
    return [
        tensor
        for place, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    ]
