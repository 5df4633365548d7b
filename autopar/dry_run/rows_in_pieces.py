"""A module over a few rows at once, and over the same rows piece by piece, each with the states of the one before.

Outputs and every gradient have to be equal, and each state has to matter: without it they must not be.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.context_parallel.handed_states import HandedStates, Key, States, own_arguments, with_states
from autopar.context_parallel.state import WholeModule
from autopar.foreign.tensors import keystr, tree_flatten_with_path, tree_map_only
from autopar.layout import Block, Layout
from autopar.tensor_parallel.sequence_parallel import argument_names
from autopar.tensor_tracking import tensors_in

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a module, with all rows."""

_PIECES = (2, 2, 7)  # rows: fewer than a convolution looks back, and more
ROWS, BATCH = sum(_PIECES), 1
_CLOSE, _FAR = 1e-4, 1e-3  # parts of the largest number


def goes_on(module: nn.Module, how: HandedStates, call: Call, where: WholeModule) -> bool:
    """Return whether ``module`` makes the same of rows in pieces, as ``how`` says, as of all of ``call``."""
    try:
        with _plain_functions(module):
            return _is_equal_in_pieces(module, how, call, where)
    except Exception:  # it asks for more than states, or returns what is no tensor of rows
        return False


@contextmanager
def _plain_functions(module: nn.Module) -> Iterator[None]:
    """Let the module's file have its own functions inside, not kernels of GPUs that decorators put in their place."""
    names = vars(sys.modules[inspect.unwrap(type(module).forward).__module__])
    kernels = {name: each for name, each in names.items() if inspect.isfunction(each) and hasattr(each, "__wrapped__")}
    names.update({name: inspect.unwrap(each) for name, each in kernels.items()})
    try:
        yield
    finally:
        names.update(kernels)


def _is_equal_in_pieces(module: nn.Module, how: HandedStates, call: Call, where: WholeModule) -> bool:
    """Return whether pieces make what all rows make, also of gradients, and not without their states."""
    keys: set[Key] = set()
    if _difference(_at_once(module.train(), call, where), _in_pieces(module, how, call, where, keys)) >= _CLOSE:
        return False
    module.eval()
    with torch.no_grad():
        for each in (call, _with_padding(module, call)):
            expected = _at_once(module, each, where)
            if _difference(expected, _in_pieces(module, how, each, where, keys)) >= _CLOSE:
                return False
        without = [_in_pieces(module, how, each, where, set(), dropped=key) for key in keys]
    return bool(keys) and all(_difference(expected, each) > _FAR for each in without)


def _with_padding(module: nn.Module, call: Call) -> Call:
    """The same with padding on the left, where the module takes a mask."""
    padding = torch.ones(BATCH, ROWS, dtype=torch.long)
    padding[:, :3] = 0
    args, kwargs, names = list(call[0]), dict(call[1]), argument_names(module)
    for place, name in enumerate(names):
        if "mask" in name and place < len(args):
            args[place] = padding if args[place] is None else args[place]
        elif "mask" in name and kwargs.get(name) is None:
            kwargs[name] = padding
    return tuple(args), kwargs


def _at_once(module: nn.Module, call: Call, where: WholeModule) -> list[torch.Tensor]:
    """Outputs, and with gradients those too."""
    call = _leaves(call)
    return _with_gradients(module, call, _outputs(module(*call[0], **call[1]), where))


def _in_pieces(
    module: nn.Module, how: HandedStates, call: Call, where: WholeModule, keys: set[Key], dropped: Key | None = None
) -> list[torch.Tensor]:
    """The same of pieces; ``keys`` is filled with their states, of which ``dropped`` is not handed on."""
    call, ends = _leaves(call), list(itertools.accumulate(_PIECES))
    layout = Layout.of(1, [Block("row", ends[-1], 1, tuple(zip([0, *ends], ends, strict=False)))])
    pieces, before, ties = [], None, _Ties()
    for number in range(len(_PIECES)):
        states = _StatesOfPiece(how, before, ties, dropped)
        values = own_arguments(module, call, how, where.inputs, layout, number)
        args, kwargs = with_states(module, values, how, states)
        pieces.append(_outputs(module(*args, **kwargs), where))
        states.check()
        keys.update(states.given)
        before = states
    dims = where.outputs.values()
    made = [torch.cat(parts, dim) for parts, dim in zip(zip(*pieces, strict=True), dims, strict=True)]
    found = _with_gradients(module, call, made)
    ties.check()
    return found


class _StatesOfPiece(States):
    """States of the piece before, and for the piece behind, in one graph."""

    def __init__(self, how: HandedStates, before: _StatesOfPiece | None, ties: _Ties, dropped: Key | None) -> None:
        super().__init__(how, first=before is None)
        self.left: dict[Key, torch.Tensor] = {} if before is None else dict(before.given)
        self.given: dict[Key, torch.Tensor] = {}
        self.ties, self.dropped = ties, dropped

    def take(self, key: Key) -> torch.Tensor:
        """Return a state, once."""
        state = self.left.pop(key)
        return torch.zeros_like(state) if key == self.dropped else state

    def give(self, key: Key, state: torch.Tensor, through: torch.Tensor | None = None) -> torch.Tensor | None:
        """Keep a state; ranks receive gradients in the reverse order, those of recurrences last."""
        if key in self.given or (through is not None and any(kind == "recurrent" for kind, _ in self.given)):
            raise ValueError(f"{key} is handed on a second time, or after a recurrence")
        self.given[key] = state
        return through if through is None else self.ties.tie(through)

    def check(self) -> None:
        """Raise ValueError if a state of the piece before was not taken."""
        if self.left:
            raise ValueError(f"{list(self.left)} are not taken")


class _Ties:
    """Tensors passed to the next rank beside states, and whether gradients came through all of them."""

    def __init__(self) -> None:
        self.made = self.seen = 0

    def tie(self, through: torch.Tensor) -> torch.Tensor:
        """Return the same, watched."""
        if through.requires_grad:
            through = through.view_as(through)
            through.register_hook(self._see)
            self.made += 1
        return through

    def check(self) -> None:
        """Raise ValueError if something was not used."""
        if self.made != self.seen:
            raise ValueError("rows that were put in front of others are not used")

    def _see(self, grad: torch.Tensor) -> None:
        self.seen += 1


def _leaves(call: Call) -> Call:
    """The same numbers, as tensors that want gradients where these are wanted."""

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().requires_grad_(x.is_floating_point() and torch.is_grad_enabled())

    args, kwargs = tree_map_only(torch.Tensor, leaf, call)
    return args, kwargs


def _outputs(out: Any, where: WholeModule) -> list[torch.Tensor]:
    """The tensors that a module returns, all of which have rows."""
    leaves = [(keystr(path), x) for path, x in tree_flatten_with_path(out)[0] if isinstance(x, torch.Tensor)]
    if [name for name, _ in leaves] != list(where.outputs):
        raise ValueError(f"it returns {[name for name, _ in leaves]}, and rows in {list(where.outputs)}")
    return [x for _, x in leaves]


def _with_gradients(module: nn.Module, call: Call, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, and behind them the gradients of arguments and weights."""
    if not torch.is_grad_enabled():
        return outputs
    numbers = torch.Generator().manual_seed(2)
    leaves = [x for x in (*tensors_in(call), *module.parameters()) if x.requires_grad]
    factors = [torch.randn(x.shape, generator=numbers) for x in outputs]
    found = torch.autograd.grad(outputs, leaves, factors, allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


def _difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference, as a part of the largest number of its tensor."""
    parts = [
        float(((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).detach())
        for a, b in zip(expected, found, strict=True)
    ]
    return max(parts) if all(part == part for part in parts) else float("inf")
