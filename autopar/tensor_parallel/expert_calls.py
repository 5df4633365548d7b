"""A forward that calls experts one by one, run twice: to see what it gives them, and with what they return.

Classes choose experts in many ways: by indices, by masks, in a loop over all of them or over those that are hit, with
weights before or behind them. All of them call the experts as modules. So the code is not read but run: first with
outputs of zeros, while the rows of each call are noted; then, when the rows have been to the ranks that hold the
experts, with their outputs. The first run's own result is dropped, and costs no memory in the backward pass.

[Note: what runs once] Modules that are called before the first expert, a router among them, cannot depend on experts:
the second run is given what they returned, so that their hooks and what they count happen once. Both runs draw the same
random numbers, each works on copies of the arguments, and buffers that the first one writes into are put back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.distributed.rng import TorchGenerators
from autopar.errors import ConfigError
from autopar.foreign.modules import called_instead, own_buffers
from autopar.foreign.tensors import tree_leaves, tree_map, version_of


class _Call(NamedTuple):
    """One call of an expert.

    Attributes:
        place: number of its list; ``number``: its own in it.
        rows: ``[..., hidden]``; ``version``: how often they had been written into.
        dtype: of what it returns.
    """

    place: int
    number: int
    rows: torch.Tensor
    version: int
    dtype: torch.dtype


class Calls:
    """The calls of experts in one forward.

    Args:
        path: of the module that calls them, for messages; ``caller``: itself.
        lists: of experts, each list in order.
    """

    def __init__(self, path: str, caller: nn.Module, lists: Sequence[Sequence[nn.Module]]) -> None:
        self._path, self._caller, self._lists = path, caller, lists
        self._own = {id(expert) for experts in lists for expert in experts}
        self._made: list[_Call] = []
        self._before: list[tuple[nn.Module, Any, TorchGenerators]] = []
        self._outputs: list[torch.Tensor] = []
        self._next, self._given = 0, 0
        self._start = TorchGenerators.now()

    def note(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` on copies, with outputs of zeros; return what it makes of them."""
        buffers = {n: (b, version_of(b), b.clone()) for n, b in own_buffers(self._caller).items() if b is not None}
        args, kwargs = _copied((args, kwargs))
        with called_instead(self._in_place(self._note, self._keep)):
            out = forward(*args, **kwargs)
        for buffer, version, earlier in buffers.values():
            if version_of(buffer) != version:
                buffer.copy_(earlier)
        written = next((call for call in self._made if version_of(call.rows) != call.version), None)
        if written is not None:
            raise ConfigError(
                f"expert_parallel_size: {self._path} writes into the {list(written.rows.shape)} that it has given to "
                f"expert {written.number} before the ranks that hold it have them.\n  Let it make a new tensor, or "
                "leave expert_parallel_size out: each expert is sharded instead."
            )
        return out

    def rows(self, place: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows given to the experts of one list, ``[rows, hidden]``, and their experts, ``[rows]``.

        Args:
            like: ``[..., hidden]``, of which there are no rows where none were given.
        """
        calls = [call for call in self._made if call.place == place]
        width = like.shape[-1]
        other = next((call.rows for call in calls if call.rows.shape[-1] != width), None)
        if other is not None:
            raise ConfigError(
                f"expert_parallel_size: {self._path} is given {width} features and gives its experts "
                f"{other.shape[-1]}. Those of both must be as many.\n  Leave it out: each expert is sharded instead."
            )
        parts = [call.rows.reshape(-1, width) for call in calls] or [like.reshape(-1, width)[:0]]
        numbers = torch.tensor([call.number for call in calls], dtype=torch.long)
        counts = torch.tensor([len(part) for part in parts[: len(calls)]], dtype=torch.long)
        ids = numbers.repeat_interleave(counts).to(like.device)
        return torch.cat(parts), ids

    def without_rows(self, place: int) -> set[int]:
        """Return the experts of one list that were called with no rows, as some code calls all."""
        return {call.number for call in self._made if call.place == place and not call.rows.numel()}

    def take(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take what experts return for the rows of each list, ``[rows, hidden]``."""
        sizes = [call.rows.numel() // max(call.rows.shape[-1], 1) for call in self._made]
        found = [
            iter(out.split([size for size, call in zip(sizes, self._made, strict=True) if call.place == place]))
            for place, out in enumerate(outputs)
        ]
        self._outputs = [next(found[call.place]).view(call.rows.shape).to(call.dtype) for call in self._made]

    def replay(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` with the experts' outputs."""
        self._start.restore()
        with called_instead(self._in_place(self._give, self._give_kept)):
            out = forward(*args, **kwargs)
        if self._next != len(self._made):
            raise self._another()
        return out

    def _in_place(self, of_expert: Any, of_other: Any) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        for place, experts in enumerate(self._lists):
            for number, expert in enumerate(experts):
                yield expert, functools.partial(of_expert, place, number)
        for module in _outermost(self._caller, self._own):
            yield module, functools.partial(of_other, module)

    def _note(self, place: int, number: int, call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(rows, torch.Tensor) or not rows.ndim:
            raise ConfigError(
                f"expert_parallel_size: {self._path} gives its experts {len(args) + len(kwargs)} arguments, and only "
                "one tensor, [..., hidden], can travel.\n  Leave it out: each expert is sharded instead."
            )
        device = rows.device.type
        kind = torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None
        dtype = rows.dtype if kind is None else kind
        self._made.append(_Call(place, number, rows, version_of(rows), dtype))
        return torch.zeros(rows.shape, dtype=dtype, device=rows.device)

    def _keep(self, module: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        if self._made:
            return out
        self._before.append((module, out, TorchGenerators.now()))
        return _copied(out)

    def _give(self, place: int, number: int, call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = self._made[self._next] if self._next < len(self._made) else None
        self._next += 1
        if made is None or (made.place, made.number) != (place, number) or args[0].shape != made.rows.shape:
            raise self._another()
        return self._outputs[self._next - 1]

    def _give_kept(self, module: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        if self._given == len(self._before):
            return call(*args, **kwargs)
        kept, out, after = self._before[self._given]
        self._given += 1
        if kept is not module:
            raise self._another()
        after.restore()
        return out

    def _another(self) -> ConfigError:
        return ConfigError(
            f"expert_parallel_size: {self._path} calls its experts in another way when its forward is run again, as "
            "it is to learn what\n  travels. Leave expert_parallel_size out: each expert is sharded instead."
        )


def _copied(values: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)


def _outermost(module: nn.Module, experts: set[int]) -> Iterator[nn.Module]:
    """Yield the modules inside that have a forward, but those inside of others, and experts."""
    for child in module.children():
        if id(child) in experts:
            continue
        if type(child).forward is nn.Module.forward:
            yield from _outermost(child, experts)
        elif not any(id(inside) in experts for inside in child.modules()):
            yield child


def first_floats(values: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of two dims or more in nested values."""
    found = (x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim > 1)
    return next(found, None)
