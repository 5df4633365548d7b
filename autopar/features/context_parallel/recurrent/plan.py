"""Find the modules that compute the same from states as from the full sequence, by a trial on small numbers.

The cache of a module may hold everything that later rows need from earlier rows, or only a part: some scans start at
zero when they get several rows. So a copy of the module with random weights runs once over a few rows at once, and once
over pieces of them, each with the states of the previous piece. Outputs and all gradients must be equal, and must
differ without any one of the states. A module that passes this trial needs only states from the previous rank.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from autopar.compat.tensors import keystr, tree_flatten_with_path, tree_map_only
from autopar.compat.transformers import initialize_weights
from autopar.features.context_parallel.recurrent.state_passing import (
    HandedStates,
    Key,
    States,
    argument_of,
    own_arguments,
    place_of,
    with_states,
)
from autopar.features.context_parallel.setup import undo
from autopar.features.context_parallel.state import GatheredModule, RowPlan
from autopar.layout import Block, Layout
from autopar.swap import argument_names, change_given, replaced
from autopar.tensor_tracking import map_tensors, tensors_in

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a module, with all rows."""

_PIECES = (2, 2, 7)  # rows per piece: fewer and more than the kernel of a convolution
ROWS, BATCH = sum(_PIECES), 1
_CLOSE, _FAR = 1e-4, 1e-3  # relative to the largest number


def is_exact_in_pieces(module: nn.Module, how: HandedStates, call: Call, where: GatheredModule) -> bool:
    """Return whether ``module`` computes the same values and gradients from pieces as from all rows of ``call``.

    Without any one of the states that ``how`` describes, the result must differ.
    """
    keys: set[Key] = set()
    try:
        with _plain_functions(module):
            pieces = _in_pieces(module.train(), how, call, where, keys)
            if _difference(_at_once(module, call, where), pieces) >= _CLOSE:
                return False
            module.eval()
            with torch.no_grad():
                for each in (call, _with_padding(module, call)):
                    expected = _at_once(module, each, where)
                    if _difference(expected, _in_pieces(module, how, each, where, keys)) >= _CLOSE:
                        return False
                without = [_in_pieces(module, how, each, where, set(), dropped=key) for key in keys]
            return bool(keys) and all(_difference(expected, each) > _FAR for each in without)
    except Exception:  # it needs more than states, or returns a value without rows
        return False


def _plain_functions(module: nn.Module) -> AbstractContextManager[None]:
    """Use the plain functions of the module's file inside, not the GPU kernels that decorators put in their place."""
    names = vars(sys.modules[inspect.unwrap(type(module).forward).__module__])
    kernels = {name: each for name, each in names.items() if inspect.isfunction(each) and hasattr(each, "__wrapped__")}
    return replaced(names, {name: inspect.unwrap(each) for name, each in kernels.items()})


def _with_padding(module: nn.Module, call: Call) -> Call:
    """Return ``call`` with left padding in the mask arguments of the module."""
    padding, names = torch.ones(BATCH, ROWS, dtype=torch.long), argument_names(module)
    padding[:, :3] = 0
    args, kwargs = change_given(module, *call, lambda name, x: padding if x is None and "mask" in name else x)
    masks = [name for name in names[len(args) :] if "mask" in name]
    return args, {**dict.fromkeys(masks, padding), **kwargs}


def _at_once(module: nn.Module, call: Call, where: GatheredModule) -> list[torch.Tensor]:
    """Return the outputs of a single call, followed by gradients if they are enabled."""
    call = _leaves(call)
    return _with_gradients(module, call, _outputs(module(*call[0], **call[1]), where))


def _in_pieces(
    module: nn.Module, how: HandedStates, call: Call, where: GatheredModule, keys: set[Key], dropped: Key | None = None
) -> list[torch.Tensor]:
    """Run in pieces; add the keys of passed states to ``keys``, and replace the ``dropped`` state by zeros."""
    call, ends = _leaves(call), list(itertools.accumulate(_PIECES))
    layout = Layout.of(1, [Block("row", ends[-1], 1, tuple(zip([0, *ends], ends, strict=False)))])
    pieces, before, ties = [], None, Counter[str]()
    for number in range(len(_PIECES)):
        states = _StatesOfPiece(how, before, ties, dropped)
        values = own_arguments(module, call, how, where.inputs, layout, number)
        args, kwargs = with_states(module, values, how, states)
        pieces.append(_outputs(module(*args, **kwargs), where))
        if states.left:
            raise ValueError(f"{list(states.left)} of the previous piece are not used")
        keys.update(states.given)
        before = states
    dims = where.outputs.values()
    made = [torch.cat(parts, dim) for parts, dim in zip(zip(*pieces, strict=True), dims, strict=True)]
    found = _with_gradients(module, call, made)
    if ties["made"] != ties["seen"]:
        raise ValueError("rows of the previous piece are not used")
    return found


class _StatesOfPiece(States):
    """The states from the previous piece and for the next piece, in one graph.

    Attributes:
        ties: Number of tensors tied to states (``made``), and number of these that got a gradient (``seen``).
    """

    def __init__(
        self, how: HandedStates, before: _StatesOfPiece | None, ties: Counter[str], dropped: Key | None
    ) -> None:
        super().__init__(how, first=before is None)
        self.left: dict[Key, torch.Tensor] = {} if before is None else dict(before.given)
        self.given: dict[Key, torch.Tensor] = {}
        self.ties, self.dropped = ties, dropped

    def take(self, key: Key) -> torch.Tensor:
        """Return a state and remove it."""
        state = self.left.pop(key)
        return torch.zeros_like(state) if key == self.dropped else state

    def give(self, key: Key, state: torch.Tensor, through: torch.Tensor | None = None) -> torch.Tensor | None:
        """Keep a state; ranks receive gradients in reverse order, so recurrent states must come last."""
        if key in self.given or (through is not None and any(kind == "recurrent" for kind, _ in self.given)):
            raise ValueError(f"{key} is passed a second time, or after a recurrent state")
        self.given[key] = state
        if through is not None and through.requires_grad:
            through = through.view_as(through)
            through.register_hook(lambda _: self.ties.update(["seen"]))
            self.ties["made"] += 1
        return through


def _leaves(call: Call) -> Call:
    """Return copies of the arguments as leaves; they require gradients if gradients are enabled."""

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().requires_grad_(x.is_floating_point() and torch.is_grad_enabled())

    args, kwargs = tree_map_only(torch.Tensor, leaf, call)
    return args, kwargs


def _outputs(out: Any, where: GatheredModule) -> list[torch.Tensor]:
    """Return the tensors in the output of a module, all of which must have rows."""
    leaves = [(keystr(path), x) for path, x in tree_flatten_with_path(out)[0] if isinstance(x, torch.Tensor)]
    if [name for name, _ in leaves] != list(where.outputs):
        raise ValueError(f"expected outputs {list(where.outputs)}, got {[name for name, _ in leaves]}")
    return [x for _, x in leaves]


def _with_gradients(module: nn.Module, call: Call, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs, followed by the gradients of arguments and weights."""
    if not torch.is_grad_enabled():
        return outputs
    numbers = torch.Generator().manual_seed(2)
    leaves = [x for x in (*tensors_in(call), *module.parameters()) if x.requires_grad]
    factors = [torch.randn(x.shape, generator=numbers) for x in outputs]
    found = torch.autograd.grad(outputs, leaves, factors, allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


def _difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest value of its tensor."""
    pairs = zip(expected, found, strict=True)
    parts = [float(((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).detach()) for a, b in pairs]
    return max(parts) if all(part == part for part in parts) else float("inf")


_WAYS = ((1, True), (0, True), (0, False))  # (spare, apart) of HandedStates, cheapest first
_LARGE = 1 << 16  # number of weight elements from which on no weight is made
_CHUNK = 4  # chunk size of scans, small so that few rows make several chunks


def hand_on_states(
    model: nn.Module, copied: nn.Module, plan: RowPlan, calls: Mapping[str, Call], rows: int, batch: int
) -> None:
    """Let modules of ``plan`` pass states if they then compute the same result; ``model`` stays unchanged.

    Args:
        copied: Copy of the model on the meta device, which has run with ``calls``.
        calls: Path of a module -> arguments of its call, with ``batch`` sequences of ``rows`` rows.
    """
    undo(copied)
    known: dict[Any, HandedStates | None] = {}
    for path, where in plan.whole.items():
        if path not in calls:
            continue
        module, like = model.get_submodule(path), copied.get_submodule(path)
        sizes = [(name, tuple(x.shape)) for name, x in module.named_parameters()]
        kind = (type(module), f"{module}, {sizes}, {where.inputs}, {where.outputs}")
        if kind not in known:
            known[kind] = _states_of(model, module, like, where, calls[path], rows, batch)
        where.states = known[kind]


def _states_of(
    model: Any, module: nn.Module, like: nn.Module, where: GatheredModule, call: Call, rows: int, batch: int
) -> HandedStates | None:
    """Return the states that a module passes from rank to rank; None if it needs full sequences."""
    forward = inspect.signature(inspect.unwrap(type(like).forward))
    caches = [name for name, each in forward.parameters.items() if "Cache" in str(each.annotation)]
    if len(caches) != 1 or not where.inputs or any(times != 1 for times in where.folded.values()):
        return None
    given = [(place_of(path, x), x) for path, x in tree_flatten_with_path(call)[0] if isinstance(x, torch.Tensor)]
    others = tuple(sorted(place for place, x in given if place not in where.inputs and rows not in x.shape))
    ways = [HandedStates(caches[0], spare, apart, others) for spare, apart in _WAYS]
    try:
        made = _filled(model, module, like)
        words = model.get_input_embeddings().num_embeddings
        numbers = _numbers(made, call, where, rows, batch, words)
    except Exception:  # weights of an unknown kind
        return None
    return next((how for how in ways if is_exact_in_pieces(made, how, numbers, where)), None)


# -- weights and arguments of the trial ----------------------------------------------------------------------------


def _filled(model: Any, module: nn.Module, like: nn.Module) -> nn.Module:
    """Return a copy of ``module`` on the CPU with random weights; buffers with values keep them."""
    made, numbers = copy.deepcopy(like).to_empty(device="cpu").float(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in made.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.0
            if isinstance(getattr(each, "chunk_size", None), int):
                each.chunk_size = _CHUNK  # type: ignore[assignment]
            if type(each) is nn.Linear and each.weight.numel() > _LARGE:
                each.forward = _OneNumberEach(each, numbers)  # type: ignore[assignment]
                continue
            initialize_weights(model, each)
            for parameter in each.parameters(recurse=False):
                width = parameter[0].numel() if parameter.ndim > 1 else 4
                parameter.normal_(0, width**-0.5, generator=numbers)
                parameter.requires_grad_()
        for buffer, own in zip(made.buffers(), module.buffers(), strict=True):
            if not own.is_meta:
                buffer.copy_(own)
    return made


class _OneNumberEach:
    """The forward of a large layer, ``[..., in] -> [..., out]``, with one nonzero weight per output.

    It saves memory and time; for the trial it matters only that the layer treats rows separately.
    """

    def __init__(self, layer: nn.Linear, numbers: torch.Generator) -> None:
        self.place = torch.randint(layer.in_features, (layer.out_features,), generator=numbers)
        self.factor = torch.randn(layer.out_features, generator=numbers)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(-1, self.place) * self.factor


def _numbers(module: nn.Module, call: Call, where: GatheredModule, rows: int, batch: int, words: int) -> Call:
    """Return random arguments shaped like ``call``, without padding masks."""
    numbers, names = torch.Generator().manual_seed(1), argument_names(module)

    def number(path: Any, x: torch.Tensor) -> Any:
        dim = where.inputs.get(place_of(path, x))
        if dim is None and x.ndim == 2 and x.shape[1] == rows and "mask" in argument_of(path, names):
            return None
        shape = [BATCH if at == 0 and size == batch else size for at, size in enumerate(x.shape)]
        if dim is not None:
            shape[dim] = ROWS
        if x.is_floating_point():
            return torch.randn(shape, generator=numbers)
        return torch.randint(words, shape, generator=numbers).to(x.dtype)

    args, kwargs = map_tensors(number, call)
    return args, kwargs
