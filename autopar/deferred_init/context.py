"""Build a model without memory for its weights: ``with autopar.lazy_init(): model = GPT2LMHeadModel(config)``.

Inside the ``with``, parameters are on the meta device, and each module records the sources of their values: files of a
checkpoint (``from_pretrained``), a value that the constructor computed (``torch.ones(hidden)``), or random
initialization. ``autopar.initialize`` then shards the shapes and allocates only this rank's shards. Buffers are real.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, initialization as hf_init
from transformers.integrations.peft import PeftAdapterMixin

from autopar.compat.tensors import function_modes, own_buffers, own_parameters, storage_id
from autopar.deferred_init.files import Init, by_parameter, load_lazily, set_source, sources_of
from autopar.errors import ConfigError
from autopar.storage.lazy_tensor import InMemory
from autopar.swap import replace_storage
from autopar.tensor_tracking import storage_key, tensors_in

_WRITE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
_NO_WRITE = {"requires_grad_", "detach_", "share_memory_"}


@contextmanager
def lazy_init() -> Iterator[None]:
    """Build models, or load them with transformers' ``from_pretrained``, without memory for their weights.

    :func:`autopar.initialize` reads each rank's shards from the checkpoint's files, or draws them with the model's
    initialization. With the same ``torch.manual_seed`` before ``initialize``, full weights are equal on any mesh; they
    differ from the weights that the constructor would draw.

    A custom module around the Hugging Face model must fill its parameters with ``torch.nn.init``, have a
    ``reset_parameters``, or compute them (``nn.Parameter(torch.zeros(3))``).

    The weights have no values before ``initialize``. A later write into them raises, here or in ``initialize``, except
    that a write through ``weight.data`` after the ``with`` is silently lost. Buffers are on the CPU, for any default
    device of torch.

    Raises:
        ConfigError: Code writes into the weights of a finished model, or makes buffers on the meta device
            (``torch.device("meta")`` inside); or ``from_pretrained`` reads a quantized checkpoint or adapter files, or
            gets ``device_map``.
        CheckpointError: Files for ``from_pretrained`` are missing or damaged.
    """
    made: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()  # some are temporary
    empty = _EmptyOnMeta()
    with ExitStack() as patches:
        _patch_torch(patches, made, empty)
        _patch_transformers(patches, empty)
        with torch.device("cpu"), empty:
            yield
    _move_to_meta(list(made.values()), empty)


def _patch(patches: ExitStack, owner: Any, name: str, body: Callable[..., Any]) -> None:
    """Patch a function of a class or a module for this thread; ``body`` gets the original one, then the arguments."""
    found, thread = owner.__dict__[name], threading.get_ident()
    plain = found.__func__ if isinstance(found, staticmethod) else found

    @functools.wraps(plain)
    def patched(*args: Any, **kwargs: Any) -> Any:
        mine = threading.get_ident() == thread
        return body(plain, *args, **kwargs) if mine else plain(*args, **kwargs)

    patches.callback(setattr, owner, name, found)
    setattr(owner, name, staticmethod(patched) if isinstance(found, staticmethod) else patched)


def _patch_torch(patches: ExitStack, made: MutableMapping[int, nn.Module], empty: _EmptyOnMeta) -> None:
    def register(plain: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(module, *args, **kwargs)
        made[id(module)] = module

    def register_parametrization(plain: Any, module: nn.Module, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
        if (parameter := own_parameters(module).get(tensor_name)) is not None:
            empty.materialize(parameter)  # the new parameters are computed from it
        return plain(module, tensor_name, *args, **kwargs)

    _patch(patches, nn.Module, "register_parameter", register)
    _patch(patches, nn.Module, "register_buffer", register)
    _patch(patches, parametrize, "register_parametrization", register_parametrization)
    for module_name in hf_init.TORCH_MODULES_TO_PATCH:
        for name in hf_init.TORCH_INIT_FUNCTIONS:
            if hasattr(module := sys.modules.get(module_name), name):
                _patch(patches, module, name, empty.record)


def _patch_transformers(patches: ExitStack, empty: _EmptyOnMeta) -> None:
    def begin(plain: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        empty.begun[id(model)] = model
        plain(model, *args, **kwargs)

    def init_weights(plain: Any, model: Any) -> None:
        model.tie_weights(recompute_mapping=False)  # as transformers does on the meta device
        empty.begun.pop(id(model), None)
        if not empty.begun:
            empty.built.add(model)

    def load(plain: Any, model: Any, state_dict: Any, files: Any, config: Any, *rest: Any, **kwargs: Any) -> Any:
        empty.loaded.add(model)
        if state_dict is not None:
            return plain(model, state_dict, files, config, *rest, **kwargs)
        with empty.off():
            return load_lazily(plain, model, files, config, *rest, **kwargs)

    def finalize(plain: Any, *args: Any, **kwargs: Any) -> Any:
        with empty.off():  # weights that the files lack are initialized in memory
            return plain(*args, **kwargs)

    def load_adapter(_: Any, model: Any, path: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        named = path or kwargs.get("peft_model_id") or kwargs.get("model_id")
        raise ConfigError(adapter_first(str(named or "adapter_state_dict")))

    for owner in (PeftAdapterMixin, getattr(sys.modules.get("peft"), "PeftModel", None)):
        if owner is not None:
            _patch(patches, owner, "load_adapter", load_adapter)
    _patch(patches, PreTrainedModel, "__init__", begin)
    _patch(patches, PreTrainedModel, "init_weights", init_weights)
    _patch(patches, PreTrainedModel, "_load_pretrained_model", load)
    _patch(patches, PreTrainedModel, "_finalize_model_loading", finalize)


def adapter_first(path: str) -> str:
    """Return the error text for files of an adapter, which a model without memory cannot read."""
    return (
        f"{path} holds an adapter, which lazy_init does not support; load it after initialize:\n"
        "  with autopar.lazy_init(): model = AutoModelForCausalLM.from_pretrained(base)\n"
        "  model = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(folder))\n"
        "  model = autopar.initialize(model, config); model.load_adapter(folder, 'default')"
    )


def in_lazy_init() -> bool:
    """Return whether this thread is inside :func:`lazy_init`."""
    return any(isinstance(mode, _EmptyOnMeta) for mode in function_modes())


class _EmptyOnMeta(TorchFunctionMode):
    """Make ``torch.empty`` on the meta device, record ``torch.nn.init``, and materialize before other writes.

    Attributes:
        begun: The Hugging Face models whose constructor has started; an inner model is built with the outer one.
        built: The models whose constructor has finished.
        loaded: The models with values from files; their materialized weights are final.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun: dict[int, nn.Module] = {}
        self.built: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._on = True
        self._made: dict[int, torch.Tensor] = {}  # by storage; keeps the tensors alive, so that numbers stay unique
        self.inits: dict[int, list[Init]] = {}  # the recorded ``torch.nn.init`` calls, by storage
        self._alive: list[Any] = []  # the storages with inits

    @contextmanager
    def off(self) -> Iterator[None]:
        """Allocate memory as usual in the block."""
        was, self._on = self._on, False
        try:
            yield
        finally:
            self._on = was

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._on:
            return func(*args, **kwargs)
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            self._made[storage_id(made.untyped_storage())] = made
            return made
        if args and isinstance(args[0], torch.Tensor) and _writes(func):
            self.refuse((args, kwargs))
            if args[0].is_meta:
                self.materialize(args[0])
        return func(*args, **kwargs)

    def refuse(self, values: Any) -> None:
        """Raise ConfigError if an operation's arguments contain a weight of a finished model.

        A constructor may write into weights, because random initialization or the files overwrite them.
        """
        if self.begun or not self.built:
            return
        storages = {storage_key(tensor) for tensor in tensors_in(values)}
        for model in self.built:
            for name, parameter in model.named_parameters():
                pending = parameter.is_meta or model not in self.loaded  # initialize fills it
                if pending and storage_key(parameter) in storages:
                    raise ConfigError(
                        f"{name} of {type(model).__name__} has no value inside lazy_init; it cannot be read or set\n"
                        "  Use it after autopar.initialize, or build the model without lazy_init."
                    )

    def is_empty(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the meta device because of this mode."""
        return storage_id(tensor.untyped_storage()) in self._made

    def materialize(self, tensor: torch.Tensor) -> None:
        """Allocate the memory of a full tensor that this mode left empty, and run the recorded calls."""
        if not self.is_empty(tensor) or tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            return
        recorded = self.inits.get(storage_id(tensor.untyped_storage()), ())
        real = torch.empty_like(tensor, device="cpu")
        if isinstance(tensor, nn.Parameter):
            replace_storage(tensor, real)
        else:
            torch.utils.swap_tensors(tensor, real)
        for function, args, kwargs in recorded:
            function(tensor, *args, **kwargs)

    def record(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record a call of ``torch.nn.init`` on an empty tensor; run it for other tensors."""
        if self._on:
            self.refuse(tensor)
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self.inits.setdefault(storage_id(storage), []).append((function, args, kwargs))
        return tensor


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITE or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITE)


def _move_to_meta(modules: list[nn.Module], empty: _EmptyOnMeta) -> None:
    """Move the values that constructors computed for parameters of ``modules`` to their sources."""
    for module in modules:
        for name, buffer in own_buffers(module).items():
            if buffer is not None and buffer.is_meta and not empty.is_empty(buffer):
                raise ConfigError(
                    f"the buffer {name} of a {type(module).__name__} must have values, but is on the meta device\n"
                    "  Leave out torch.device('meta') inside of lazy_init."
                )
    values = {key: source for key, (source, _) in by_parameter(modules).items()}
    for module in modules:
        for name, parameter in own_parameters(module).items():
            if parameter is None:
                continue
            if not parameter.is_meta:
                values[id(parameter)] = InMemory(parameter.data)
                replace_storage(parameter, torch.empty_like(parameter, device="meta"))
            elif (known := sources_of(module).get(name)) is not None and known.parameter is parameter:
                continue  # its values come from files
            set_source(
                module, name, values.get(id(parameter)), empty.inits.get(storage_id(parameter.untyped_storage()), ())
            )
        for name, buffer in own_buffers(module).items():
            if buffer is not None and buffer.is_meta:  # torch.empty, filled by its user
                own_buffers(module)[name] = torch.empty_like(buffer, device="cpu")
