"""The random initialization of a lazily built model as steps: which module's touches which parameter, and when.

All steps run on the meta device first, where they cost nothing, to find what each of them touches. So a parameter has
to be whole only from the first step that touches it to the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers import initialization as hf_init

from autopar.deferred_init.sources import inits_of, sources_of
from autopar.layout import Layout
from autopar.storage.lazy_tensor import InMemory, LazyTensor

__all__ = ["DeferredParameter", "Steps"]


@dataclass
class DeferredParameter:
    """One parameter that has no memory yet; tied ones are one."""

    name: str
    parameter: nn.Parameter
    source: LazyTensor | None
    shape: tuple[int, ...]
    layout: Layout | None
    shard: torch.Tensor | None = None

    @property
    def drawn(self) -> bool:
        """Whether random initialization has a say in it; what comes from a file is final."""
        return self.source is None or isinstance(self.source, InMemory)


class Steps:
    """The random initialization of a model as steps, each on one module, in transformers' order: children first.

    Args:
        drawn: ``id(parameter)`` -> those that it may fill.
    """

    def __init__(self, model: nn.Module, inner: nn.Module, drawn: Mapping[int, DeferredParameter]) -> None:
        self._model, self._inner, self._drawn = model, inner, drawn
        self.first: list[set[int]] = []
        self.last: list[set[int]] = []
        self._calls: list[tuple[nn.Module, Callable[[], Any]]] = []
        if not any(pending.source is None for pending in drawn.values()):
            return  # transformers has initialized what it missed in the files
        own = list(_own_inits(model, inner, None))
        try:
            touches = self._rehearse(own)
            self._rehearse_resets(own, touches)
        except Exception:  # a step that looks at values: then everything is held until the end
            self._calls, touches = own, []
            everything = set(drawn)
            self.first = [everything] + [set()] * (len(own) - 1)
            self.last = [set()] * (len(own) - 1) + [everything]
            return
        seen: set[int] = set()
        for touched in touches:
            self.first.append(touched - seen)
            seen |= touched
        later: set[int] = set()
        for touched in reversed(touches):
            self.last.insert(0, touched - later)
            later |= touched

    def touched(self) -> set[int]:
        """The parameters that some step works on."""
        return set().union(*self.first)

    def _rehearse(self, own: list[tuple[nn.Module, Callable[[], Any]]]) -> list[set[int]]:
        self._calls = own
        return self._touches(own)

    def _rehearse_resets(self, own: list[tuple[nn.Module, Callable[[], Any]]], touches: list[set[int]]) -> None:
        """What no _init_weights touches keeps what its module's constructor gives it."""
        lacking = {key for key, p in self._drawn.items() if p.source is None} - set().union(*touches)
        for module in self._model.modules():
            names = [name for name, p in module._parameters.items() if id(p) in lacking]
            if not names:
                continue
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                reset = partial(_repeat, module, names)
            at = next((number for number, (other, _) in enumerate(self._calls) if other is module), len(self._calls))
            touches.insert(at, self._touches([(module, reset)])[0])
            self._calls.insert(at, (module, reset))

    def _touches(self, calls: list[tuple[nn.Module, Callable[[], Any]]]) -> list[set[int]]:
        result = []
        state = torch.get_rng_state()
        try:
            with self._context():
                for module, call in calls:
                    watch = _Watch({p.parameter.untyped_storage()._cdata: key for key, p in self._drawn.items()})
                    with watch, watch.init_functions():
                        call()
                    result.append(watch.touched)
                    module._is_hf_initialized = True  # type: ignore[assignment]  # some look whether their parts are
        finally:
            torch.set_rng_state(state)
            for module, _ in calls:
                vars(module).pop("_is_hf_initialized", None)
        return result

    def run(self, take: Callable[[int], None], keep: Callable[[int], None]) -> None:
        """Do all steps; ``take`` gives a parameter memory before the first that touches it, ``keep`` ends it."""
        with self._context():
            for (module, call), first, last in zip(self._calls, self.first, self.last, strict=True):
                for key in sorted(first, key=lambda key: self._drawn[key].name):
                    take(key)
                call()
                module._is_hf_initialized = True  # type: ignore[assignment]
                for key in sorted(last, key=lambda key: self._drawn[key].name):
                    keep(key)
        for module in self._inner.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]

    @contextmanager
    def _context(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.device("cpu"))  # whatever the default device is
            stack.enter_context(hf_init.guard_torch_init_functions())
            stack.enter_context(_untied(self._inner))
            yield


def _own_inits(
    module: nn.Module, inner: nn.Module, owner: PreTrainedModel | None
) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """Each module with what initializes it, children first: a Hugging Face model's, or its own reset_parameters."""
    if isinstance(module, PreTrainedModel):
        owner = module
    for child in module.children():
        yield from _own_inits(child, inner, owner)
    if getattr(module, "_is_hf_initialized", False):
        return
    if owner is not None:
        yield module, partial(owner._init_weights, module)
        return
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, name, None)) and any(p.is_meta for p in module.parameters(recurse=False)):
            yield module, partial(_as_built, module, getattr(module, name))
            return


def _as_built(module: nn.Module, reset: Callable[[], Any]) -> None:
    """``reset_parameters``, and then what the constructor around did to its parameters: that had the last word."""
    reset()
    sources, inits = sources_of(module), inits_of(module)
    for name, parameter in module._parameters.items():
        source = sources.get(name)
        if parameter is not None and isinstance(source, InMemory):
            parameter.copy_(source.tensor)
        elif parameter is not None and len(inits.get(name, ())) > 1:  # the first is that of reset_parameters
            _repeat(module, [name])


def _repeat(module: nn.Module, names: list[str]) -> None:
    """Do what the constructor did with ``torch.nn.init``."""
    for name in names:
        parameter = module._parameters[name]
        for init in inits_of(module).get(name, ()):
            # by its name: the functions that initialization uses now, which leave alone what is initialized
            getattr(hf_init, init.function.__name__, init.function)(parameter, *init.args, **init.kwargs)


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Put a stand-in that is marked as initialized where a tied weight is used a second time."""
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            there = _parameter(model, target)
            if there is None or there[2] is not (_parameter(model, source) or (None,) * 3)[2]:
                continue
            module, name, parameter = there
            stand_in = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            stand_in._is_hf_initialized = True  # type: ignore[attr-defined]
            replaced.append(there)
            module._parameters[name] = stand_in
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


def _parameter(model: nn.Module, full: str) -> tuple[nn.Module, str, nn.Parameter] | None:
    path, _, name = full.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    parameter = module._parameters.get(name)
    return None if parameter is None else (module, name, parameter)


class _Watch(TorchDispatchMode):
    """Which of some meta tensors, known by their storage, are worked on."""

    def __init__(self, known: Mapping[int, int]) -> None:
        super().__init__()
        self._known = known
        self.touched: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._note(leaf)
        return func(*args, **(kwargs or {}))

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_meta:
            key = self._known.get(value.untyped_storage()._cdata)
            if key is not None:
                self.touched.add(key)

    @contextmanager
    def init_functions(self) -> Iterator[None]:
        """Note what ``torch.nn.init`` is called with; some of its functions do nothing at all on the meta device."""
        real: dict[str, Any] = dict(hf_init.TORCH_INIT_FUNCTIONS)

        def noting(function: Callable[..., Any]) -> Callable[..., Any]:
            def init(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                self._note(tensor)
                return tensor if tensor.is_meta else function(tensor, *args, **kwargs)

            return init

        try:
            hf_init.TORCH_INIT_FUNCTIONS.update({name: noting(function) for name, function in real.items()})
            yield
        finally:
            hf_init.TORCH_INIT_FUNCTIONS.update(real)
