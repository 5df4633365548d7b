"""Random initialization of a lazily built model in steps, one per module, so that few parameters are full at a time.

All steps run on the meta device first, where they cost nothing, to find the parameters that each of them touches. So a
parameter is full only from the first step that touches it to the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as hf_init

from autopar.adapters import tuner_layers
from autopar.deferred_init.files import sources_of
from autopar.distributed.rng import kept
from autopar.errors import ConfigError
from autopar.foreign.tensors import own_parameters
from autopar.foreign.transformers import adapters_available, initialize_weights, is_initialized
from autopar.layout import Layout
from autopar.storage.lazy_tensor import InMemory, LazyTensor
from autopar.tensor_tracking import TensorTracking, storage_key, tensors_in

_Step = tuple[nn.Module, Callable[[], Any]]


@dataclass
class DeferredParameter:
    """One parameter without memory; tied ones are one."""

    name: str
    parameter: nn.Parameter
    source: LazyTensor | None
    shape: tuple[int, ...]
    layout: Layout | None
    shard: torch.Tensor | None = None

    @property
    def drawn(self) -> bool:
        """Whether random initialization may fill it; values from a file are final."""
        return self.source is None or isinstance(self.source, InMemory)


class InitSteps:
    """The random initialization of a model, one step per module, in transformers' order: children first.

    Args:
        drawn: ``id(parameter)`` -> those that it may fill.
    """

    def __init__(self, model: nn.Module, inner: nn.Module, drawn: Mapping[int, DeferredParameter]) -> None:
        self._model, self._inner, self._drawn = model, inner, drawn
        self.first: list[set[int]] = []
        self.last: list[set[int]] = []
        self._calls: list[_Step] = []
        if not any(pending.source is None for pending in drawn.values()):
            return  # transformers has initialized what it missed in the files
        self._calls = list(_own_inits(model, inner, None, adapter_inits(model)))
        try:
            touches = self._touches(self._calls)
            self._add_resets(touches)
        except Exception:  # a step that reads values: then everything is full until the end
            touches = [set(drawn) for _ in self._calls]
        seen: set[int] = set()
        for touched in touches:
            self.first.append(touched - seen)
            seen |= touched
        later: set[int] = set()
        for touched in reversed(touches):
            self.last.insert(0, touched - later)
            later |= touched

    def touched(self) -> set[int]:
        """Return the parameters that some step touches."""
        return set().union(*self.first)

    def _add_resets(self, touches: list[set[int]]) -> None:
        """Add steps for parameters that no _init_weights touches: they keep the initialization of their constructor."""
        lacking = {key for key, p in self._drawn.items() if p.source is None} - set().union(*touches)
        for module in self._model.modules():
            names = [name for name, p in own_parameters(module).items() if id(p) in lacking]
            if not names:
                continue
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                reset = partial(_repeat, module, names)
            place = next((n for n, (other, _) in enumerate(self._calls) if other is module), len(self._calls))
            touches.insert(place, self._touches([(module, reset)])[0])
            self._calls.insert(place, (module, reset))

    def _touches(self, calls: list[_Step]) -> list[set[int]]:
        by_storage = {storage_key(p.parameter): key for key, p in self._drawn.items()}
        result = []
        try:
            with kept(), self._context():
                for module, call in calls:
                    with _Touched(by_storage) as touched, touched.init_functions():
                        call()
                    result.append(touched.keys)
                    module._is_hf_initialized = True  # type: ignore[assignment]  # some check this of their children
        finally:
            for module, _ in calls:
                vars(module).pop("_is_hf_initialized", None)
        return result

    def run(self, materialize: Callable[[int], None], shard: Callable[[int], None]) -> None:
        """Run all steps; ``materialize`` a parameter before the first that touches it, ``shard`` it after the last."""
        with self._context():
            for (module, call), first, last in zip(self._calls, self.first, self.last, strict=True):
                for key in sorted(first, key=lambda key: self._drawn[key].name):
                    materialize(key)
                call()
                module._is_hf_initialized = True  # type: ignore[assignment]
                for key in sorted(last, key=lambda key: self._drawn[key].name):
                    shard(key)
        for module in self._inner.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]

    @contextmanager
    def _context(self) -> Iterator[None]:
        on_cpu = torch.device("cpu")  # whatever the default device is
        with torch.no_grad(), on_cpu, hf_init.guard_torch_init_functions(), _untied(self._inner):
            yield


def _own_inits(
    module: nn.Module, inner: nn.Module, owner: PreTrainedModel | None, adapters: Mapping[int, list[_Step]]
) -> Iterator[_Step]:
    """The modules, children first, with their initialization: a Hugging Face model's, or their reset_parameters.

    Args:
        adapters: ``id(layer)`` -> the steps of its adapters.
    """
    if isinstance(module, PreTrainedModel):
        owner = module
    if id(module) in adapters:
        base: Any = module.base_layer
        yield from _own_inits(base, inner, owner, adapters)
        yield from adapters[id(module)]
        return
    for child in module.children():
        yield from _own_inits(child, inner, owner, adapters)
    if is_initialized(module):
        return
    if owner is not None:
        yield module, partial(initialize_weights, owner, module)
        return
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, name, None)) and any(p.is_meta for p in module.parameters(recurse=False)):
            yield module, partial(_as_built, module, getattr(module, name))
            return


def _as_built(module: nn.Module, reset: Callable[[], Any]) -> None:
    """Run ``reset_parameters``, then the initialization by the constructor of an outer module, which came later."""
    reset()
    for name, source in sources_of(module).items():
        parameter = own_parameters(module).get(name)
        if parameter is not None and isinstance(source.lazy, InMemory):
            parameter.copy_(source.lazy.tensor)
        elif parameter is not None and len(source.inits) > 1:  # the first is that of reset_parameters
            _repeat(module, [name])


def _repeat(module: nn.Module, names: list[str]) -> None:
    """Repeat the constructor's calls of ``torch.nn.init``."""
    for name in names:
        parameter = own_parameters(module)[name]
        source = sources_of(module).get(name)
        for init in source.inits if source is not None else ():
            # by name: transformers' functions, which skip what is initialized
            getattr(hf_init, init.function.__name__, init.function)(parameter, *init.args, **init.kwargs)


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Replace the second use of a tied weight by a placeholder that is marked as initialized."""
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            try:
                parameter = model.get_parameter(target)
                if parameter is not model.get_parameter(source):
                    continue
            except AttributeError:  # not in this model
                continue
            path, _, name = target.rpartition(".")
            module = model.get_submodule(path)
            placeholder = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
            replaced.append((module, name, parameter))
            own_parameters(module)[name] = placeholder
        yield
    finally:
        for module, name, parameter in replaced:
            own_parameters(module)[name] = parameter


class _Touched(TensorTracking):
    """A dispatch mode that finds which of some meta tensors are arguments of operations.

    Args:
        by_storage: storage of each tensor -> its key.

    Attributes:
        keys: of the tensors found.
    """

    def __init__(self, by_storage: Mapping[int | None, int]) -> None:
        super().__init__()
        self._by_storage = by_storage
        self.keys: set[int] = set()

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._note((args, kwargs))

    def _note(self, value: Any) -> None:
        storages = {storage_key(tensor) for tensor in tensors_in(value) if tensor.is_meta}
        self.keys |= {self._by_storage[storage] for storage in storages & self._by_storage.keys()}

    @contextmanager
    def init_functions(self) -> Iterator[None]:
        """Note the arguments of ``torch.nn.init``, some of whose functions do nothing at all on the meta device."""
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


# -- PEFT's adapters ---------------------------------------------------------------------------------------------------
# PEFT's own functions draw them: a model's ``_init_weights`` would draw them as it draws its linear layers. Adapters
# that are made from the values of the weights (PiSSA, OLoRA) have no place here: there are no values yet.


def adapter_parameters(root: nn.Module) -> set[int]:
    """Return ``id(parameter)`` of every adapter's, in layers that are not whole copies."""
    return {
        id(parameter)
        for _, layer in tuner_layers(root)
        for name, child in layer.named_children()
        if name != "base_layer"
        for parameter in child.parameters()
    }


def adapter_inits(root: nn.Module) -> dict[int, list[_Step]]:
    """Return ``id(layer)`` -> the steps that initialize its adapters, each with its module.

    Raises:
        ConfigError: an adapter without memory is initialized from the values of the weights, or in a way not known.
    """
    configs: dict[str, Any] = {}
    for module in root.modules():
        found = vars(module).get("peft_config")
        configs |= found if isinstance(found, dict) else {}
    return {id(layer): list(_steps(path, layer, configs)) for path, layer in tuner_layers(root)}


def _steps(path: str, layer: Any, configs: dict[str, Any]) -> Iterator[_Step]:
    own = [child for name, child in layer.named_children() if name != "base_layer"]
    if not any(parameter.is_meta for child in own for parameter in child.parameters()):
        return
    for name in adapters_available(layer):
        config = configs.get(name)
        kind = getattr(config, "init_lora_weights", getattr(config, "init_ia3_weights", None))
        if kind in (True, "gaussian") and hasattr(layer, "reset_lora_parameters"):
            yield layer, partial(layer.reset_lora_parameters, name, kind)
        elif kind is True and hasattr(layer, "reset_ia3_parameters"):
            yield layer, partial(layer.reset_ia3_parameters, name)
        else:
            raise ConfigError(
                f"adapter '{name}' at {path} is initialized by {kind!r}, which a model that was built in lazy_init "
                "cannot do.\n  Leave init_lora_weights at True (or 'gaussian'), or build the model without lazy_init."
            )
