"""Which modules go on from a state as if their rows were whole: found out by running them on small numbers.

A module that takes a cache may keep in it all that rows behind need to know of those in front, or some of it: many a
scan begins at zero when it has several rows. So a copy of the module with random weights runs over a few rows at once
and in pieces (:mod:`~autopar.dry_run.rows_in_pieces`): what makes the same of both needs nothing but states.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.context_parallel.apply import undo
from autopar.context_parallel.handed_states import HandedStates, argument_of, place_of
from autopar.context_parallel.state import RowPlan, WholeModule
from autopar.dry_run.rows_in_pieces import BATCH, ROWS, Call, goes_on
from autopar.foreign.tensors import tree_flatten_with_path, tree_map_with_path
from autopar.foreign.transformers import initialize_weights
from autopar.tensor_parallel.sequence_parallel import argument_names

_WAYS = ((1, True), (0, True), (0, False))  # spare rows of convolutions, and whether these are apart: the least first
_LARGE = 1 << 16  # numbers of a weight that is not made
_CHUNK = 4  # rows that scans take at a time: few rows are several chunks


def calls_of(model: nn.Module, paths: Iterable[str]) -> dict[str, Call]:
    """Return the arguments that the modules at ``paths`` get, with all rows; filled while the model runs."""
    calls: dict[str, Call] = {}
    for path in paths:

        def note(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            calls[path] = (args, kwargs)

        model.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)
    return calls


def hand_on_states(
    model: nn.Module, copied: nn.Module, plan: RowPlan, calls: Mapping[str, Call], rows: int, batch: int
) -> None:
    """Let modules of ``plan`` hand on their states, where they make the same of rows then.

    Args:
        model: is only read; ``copied``: its copy without memory, which has run.
        calls: arguments of the modules in the rehearsal: ``rows`` rows of ``batch`` sequences.
    """
    undo(copied)
    known: dict[Any, HandedStates | None] = {}
    for path, where in plan.whole.items():
        module, like = model.get_submodule(path), copied.get_submodule(path)
        sizes = [(name, tuple(x.shape)) for name, x in module.named_parameters()]
        kind = (type(module), f"{module}, {sizes}, {where.inputs}, {where.outputs}")
        if path not in calls:
            continue
        if kind not in known:
            known[kind] = _states_of(model, module, like, where, calls[path], rows, batch)
        where.states = known[kind]


def _states_of(
    model: Any, module: nn.Module, like: nn.Module, where: WholeModule, call: Call, rows: int, batch: int
) -> HandedStates | None:
    """Return how a module's states pass from rank to rank; None if it needs all rows."""
    argument = _cache_of(like)
    if argument is None or not where.inputs or any(times != 1 for times in where.folded.values()):
        return None
    given = [(place_of(path, x), x) for path, x in tree_flatten_with_path(call)[0] if isinstance(x, torch.Tensor)]
    others = tuple(sorted(place for place, x in given if place not in where.inputs and rows not in x.shape))
    ways = [HandedStates(argument, spare, apart, others) for spare, apart in _WAYS]
    try:
        made = _filled(model, module, like)
        words = model.get_input_embeddings().num_embeddings
        numbers = _numbers(made, call, where, rows, batch, words)
    except Exception:  # weights of a kind of their own
        return None
    return next((how for how in ways if goes_on(made, how, numbers, where)), None)


def _cache_of(module: nn.Module) -> str | None:
    """The argument of a module's forward that is a cache."""
    forward = inspect.unwrap(type(module).forward)
    found = [name for name, each in inspect.signature(forward).parameters.items() if "Cache" in str(each.annotation)]
    return found[0] if len(found) == 1 else None


# -- numbers -------------------------------------------------------------------------------------------------------


def _filled(model: Any, module: nn.Module, like: nn.Module) -> nn.Module:
    """A copy of ``module`` on the CPU with random weights; its buffers are its own, or as its model fills them."""
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
    """The forward of a large layer, ``[..., in] -> [..., out]``, whose weight has one number in each row.

    It treats rows apart, whatever its weight is; memory and time for a whole one are the only ones that count here.
    """

    def __init__(self, layer: nn.Linear, numbers: torch.Generator) -> None:
        self.place = torch.randint(layer.in_features, (layer.out_features,), generator=numbers)
        self.factor = torch.randn(layer.out_features, generator=numbers)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(-1, self.place) * self.factor


def _numbers(module: nn.Module, call: Call, where: WholeModule, rows: int, batch: int, words: int) -> Call:
    """Arguments of the kind of ``call``, by name, without masks of padding."""
    numbers, names = torch.Generator().manual_seed(1), argument_names(module)

    def number(path: Any, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        dim = where.inputs.get(place_of(path, x))
        if dim is None and x.ndim == 2 and x.shape[1] == rows and "mask" in argument_of(path, names):
            return None
        shape = [BATCH if at == 0 and size == batch else size for at, size in enumerate(x.shape)]
        if dim is not None:
            shape[dim] = ROWS
        if x.is_floating_point():
            return torch.randn(shape, generator=numbers)
        return torch.randint(words, shape, generator=numbers).to(x.dtype)

    args, kwargs = tree_map_with_path(number, call)
    return args, kwargs
