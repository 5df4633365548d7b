"""Materialize this rank's shards of a lazily built model, directly in their final storage.

Values come from the files of a checkpoint (each rank reads its byte ranges), from the constructor, or from the model's
random initialization. The latter needs full parameters and draws the same numbers on every rank, so a parameter is full
from the first step that touches it to the last one (:class:`InitSteps`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, initialization as hf_init

from autopar.compat.c10d import take_new_shards
from autopar.compat.peft import Init, adapter_inits, adapter_parameters
from autopar.compat.tensors import local_part, own_parameters, version_of
from autopar.compat.transformers import OWN_ADAPTERS, initialize_weights, is_initialized
from autopar.config import ParallelConfig
from autopar.deferred_init.context import adapter_first
from autopar.deferred_init.files import by_parameter, clear_sources, sources_of
from autopar.distributed.digest import sync_parameters
from autopar.distributed.mesh import MPU
from autopar.distributed.process import cores_of_a_rank
from autopar.distributed.rng import kept, same_draws
from autopar.errors import ConfigError, listed
from autopar.layout import Layout, replica_rows
from autopar.plan.plan import Plan
from autopar.storage.lazy_tensor import Converted, InMemory, LazyTensor, full_box, lazy_shard, narrowed
from autopar.storage.progress import progress_bar
from autopar.stored import stored_weights
from autopar.swap import replace_storage
from autopar.tensor_tracking import TensorTracking, storage_key, tensors_in

_MOST_THREADS = 8  # more threads would wait for memory


def deferred_fingerprint(model: nn.Module) -> list[list[str]]:
    """Return the kind of source of each parameter, which must be identical on all ranks."""
    return [
        [path, name, "draw" if source.lazy is None else "value" if isinstance(source.lazy, InMemory) else "file"]
        for path, module in model.named_modules()
        for name, source in sources_of(module).items()
    ]


class Materializer:
    """The deferred parameters of a model and their sources, created before the model is sharded.

    Args:
        model: The root model with full shapes, some or all on the meta device.
        inner: The Hugging Face model in it, or a custom module.

    Raises:
        ConfigError: A parameter gets no values, or was written into while it had no memory.
    """

    def __init__(self, model: nn.Module, inner: nn.Module, plan: Plan, config: ParallelConfig) -> None:
        self._model, self._plan, self._config = model, plan, config
        self._pending = _pending(model, plan)
        self._steps = InitSteps(model, inner, {key: p for key, p in self._pending.items() if p.drawn})
        self._touched = set[int]().union(*self._steps.first)
        lacking = [p.name for key, p in self._pending.items() if p.source is None and key not in self._touched]
        if lacking:
            raise ConfigError(_uninitialised(model, lacking))

    def sync_parameters(self, mpu: MPU) -> None:
        """Broadcast the values that rank 0's constructors computed."""
        holder = nn.Module()
        for number, pending in enumerate(self._pending.values()):
            if isinstance(pending.source, InMemory):
                holder.register_buffer(str(number), pending.source.tensor)
        sync_parameters(holder, mpu)

    def _held(self, pending: DeferredParameter, full: LazyTensor, mpu: MPU) -> LazyTensor:
        """Return this rank's shard of a full tensor, with FSDP2 only its rows."""
        shard = lazy_shard(full, pending.layout, mpu.shards.rank)
        if not self._config.fully_sharded or not shard.shape:
            return shard
        axis = mpu.copies if self._plan.canonical(pending.name) in self._plan.experts else mpu.fsdp
        return narrowed(shard, 0, *replica_rows(shard.shape[0], axis.rank, axis.size))

    def _empty(self, held: LazyTensor, dtype: torch.dtype, mpu: MPU) -> torch.Tensor:
        return torch.empty(held.shape, dtype=dtype, device="cpu" if self._config.zero_cpu_offload else mpu.device)

    def draw(self, mpu: MPU, held_here: Callable[[str], bool]) -> None:
        """Run the random initialization; every rank draws rank 0's numbers and keeps its shards.

        ``held_here``: a function that returns whether this rank's stage holds the parameter of a name.

        Raises:
            ConfigError: A parameter was touched, but not filled. The model is still without memory.
        """
        if not self._steps.last:
            return
        unfilled: list[str] = []
        for pending in map(self._pending.__getitem__, self._touched):
            if held_here(pending.name):
                held = self._held(pending, InMemory(pending.parameter), mpu)
                pending.shard = self._empty(held, pending.dtype, mpu)

        def materialize(key: int) -> None:
            pending = self._pending[key]
            full = _mapped(pending.shape, pending.dtype).fill_(float("nan"))
            if pending.source is not None:
                pending.source.read_into(full, full_box(pending.shape))
            replace_storage(pending.parameter, full)

        def shard(key: int) -> None:
            pending = self._pending[key]
            full = pending.parameter.data
            if full.is_floating_point() and full.numel() and full.amax().isnan():
                unfilled.append(pending.name)
            if pending.shard is not None:
                held = self._held(pending, InMemory(full), mpu)
                held.read_into(pending.shard, full_box(held.shape))
            replace_storage(pending.parameter, torch.empty(pending.shape, dtype=full.dtype, device="meta"))

        with same_draws():
            self._steps.run(materialize, shard)
        if unfilled:
            raise ConfigError(_uninitialised(self._model, unfilled))

    def fill(self, mpu: MPU) -> None:
        """Fill the final storage of every parameter of the sharded model.

        Raises CheckpointError if a file cannot be read, or has changed.
        """
        names = self._plan.names
        here = {names.get(name): parameter for name, parameter in self._model.named_parameters()}  # on this stage
        stored = stored_weights(self._model).items()
        others = {f"{path}.weight": weight for path, weight in stored if weight.pending}
        of_here = ((p, here.get(self._plan.canonical(p.name))) for p in self._pending.values())
        every = [(pending, parameter) for pending, parameter in of_here if parameter is not None]
        left = [pair for pair in every if pair[0].name not in others]

        def shard_of(pending: DeferredParameter, parameter: nn.Parameter) -> torch.Tensor:
            if pending.shard is not None:
                return pending.shard
            assert pending.source is not None
            same = pending.source.dtype == pending.dtype
            held = self._held(pending, pending.source if same else Converted(pending.source, pending.dtype), mpu)
            if (local := local_part(parameter)).numel():  # a shard of FSDP2 without columns has no rows either
                held.check_shape(local)
            shard = self._empty(held, parameter.dtype, mpu)
            with torch.no_grad(), torch.device("cpu"):  # for temporary tensors
                held.read_into(shard, full_box(held.shape))
            return shard

        sources = [pending.source for pending, _ in every if pending.source is not None]
        with progress_bar("loading", sum(local_part(parameter).nbytes for _, parameter in every)) as bar:
            # The kernel copies and allocates memory without Python's lock.
            with ThreadPoolExecutor(reading_threads(mpu.world_size), "autopar-read") as pool:
                for (pending, parameter), shard in zip(left, pool.map(lambda pair: shard_of(*pair), left), strict=True):
                    vars(parameter).pop("_is_hf_initialized", None)
                    # precision may keep float32 for drawn values
                    data = shard.to(parameter.dtype).view(local_part(parameter).shape)
                    if isinstance(parameter, DTensor):
                        mesh, places, shape = parameter.device_mesh, parameter.placements, parameter.shape
                        stride = parameter.stride()
                        data = DTensor.from_local(data, mesh, places, run_check=False, shape=shape, stride=stride)
                    replace_storage(parameter, data)
                    pending.shard = pending.source = None
                    bar.update(data.nbytes)
            for pending, parameter in every:  # one at a time, so that few full weights are in memory
                if (weight := others.get(pending.name)) is not None:
                    weight.materialize(pending.source, pending.layout, mpu, partial(shard_of, pending, parameter))
                    bar.update(local_part(parameter).nbytes)
        if self._config.fully_sharded:
            take_new_shards(self._model)
        for module in self._model.modules():
            clear_sources(module)
        for file in {file: None for source in sources for file in source.files()}:
            file.check_unchanged()


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory that is released at once; malloc's fragmentation would add up to the size of the model."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


def _pending(model: nn.Module, plan: Plan) -> dict[int, DeferredParameter]:
    recorded = by_parameter(model.modules())
    adapters = adapter_parameters(model)
    found: dict[int, DeferredParameter] = {}
    written: list[str] = []
    foreign: list[str] = []
    for path, module in model.named_modules():
        sources = sources_of(module)
        for name, parameter in own_parameters(module).items():
            if parameter is None or not parameter.is_meta or id(parameter) in found or not recorded:
                continue
            full = f"{path}.{name}" if path else name
            own = sources.get(name)
            if id(parameter) not in recorded and own is None and id(parameter) not in adapters:
                foreign.append(full)
                continue
            # the parameter's source, also if it was moved to another module
            source, then = recorded.get(id(parameter), (None if own is None else own.lazy, version_of(parameter)))
            if id(parameter) in adapters:  # PEFT initializes it
                source, then = None, 0
            if version_of(parameter) != then:
                written.append(full)
            shape = tuple(parameter.shape)
            if source is not None and source.shape != shape:
                raise ConfigError(
                    f"{full} must have the shape of its file, {list(source.shape)}; got {list(shape)}\n"
                    "  Do not replace or resize parameters between lazy_init and initialize."
                )
            layout = plan.tensors[plan.canonical(full)].layout
            found[id(parameter)] = DeferredParameter(full, parameter, source, shape, parameter.dtype, layout)
    if written:
        raise ConfigError(
            f"{len(written)} weights of {type(model).__name__} were written into before initialize: {listed(written)}\n"
            "  They have no memory after lazy_init, so the values were lost. Write into them after initialize,\n"
            "  load the values with from_pretrained, or build the model without lazy_init."
        )
    if foreign:
        raise ConfigError(
            f"{len(foreign)} parameters of {type(model).__name__} have no memory and were added after lazy_init: "
            f"{listed(foreign)}\n  Add or resize parameters inside lazy_init, or build the model without it."
        )
    return found


def _uninitialised(model: nn.Module, names: list[str]) -> str:
    if getattr(model, OWN_ADAPTERS, False):
        return adapter_first(type(model).__name__)
    return (
        f"nothing gives {len(names)} parameters of {type(model).__name__} their values: {listed(names)}\n"
        "  Initialize them with torch.nn.init in the constructor, write a reset_parameters (in a Hugging Face model an "
        "_init_weights), compute them\n  (nn.Parameter(torch.zeros(3))), or build the model without lazy_init."
    )


def reading_threads(ranks: int) -> int:
    """Return the number of reading threads of a rank, from the number of cores per rank."""
    return min(_MOST_THREADS, cores_of_a_rank(ranks))


# -- random initialization, in steps -----------------------------------------------------------------------------------


@dataclass
class DeferredParameter:
    """A parameter without memory, with all its tied names."""

    name: str
    parameter: nn.Parameter
    source: LazyTensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    shard: torch.Tensor | None = None

    @property
    def drawn(self) -> bool:
        """Return whether random initialization may fill it, because its values do not come from a file."""
        return self.source is None or isinstance(self.source, InMemory)


class InitSteps:
    """The random initialization of a model, one step per module, in transformers' order: children first.

    All steps first run on the meta device, to find the parameters of ``drawn`` that each step touches. So a parameter
    is full only from the first step that touches it to the last one.
    """

    def __init__(self, model: nn.Module, inner: nn.Module, drawn: Mapping[int, DeferredParameter]) -> None:
        self._model, self._inner, self._drawn = model, inner, drawn
        self.first: list[set[int]] = []
        self.last: list[set[int]] = []
        self._calls: list[Init] = []
        if not any(pending.source is None for pending in drawn.values()):
            return  # transformers has initialized what it missed in the files
        self._calls = list(_own_inits(model, inner, None, adapter_inits(model)))
        try:
            touches = self._touches(self._calls)
            self._add_resets(touches)
        except Exception:  # a step reads values, so all parameters stay full until the end
            touches = [set(drawn) for _ in self._calls]
        seen: set[int] = set()
        for touched in touches:
            self.first.append(touched - seen)
            seen |= touched
        later: set[int] = set()
        for touched in reversed(touches):
            self.last.insert(0, touched - later)
            later |= touched

    def _add_resets(self, touches: list[set[int]]) -> None:
        """Add steps for parameters that no _init_weights touches, with the initialization of their constructor."""
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

    def _touches(self, calls: list[Init]) -> list[set[int]]:
        by_storage = {storage_key(p.parameter): key for key, p in self._drawn.items()}
        result = []
        try:
            with kept(), self._context():
                for module, call in calls:
                    with _Touched(by_storage) as touched, touched.init_functions():
                        call()
                    result.append(touched.keys)
                    module._is_hf_initialized = True  # type: ignore[assignment]  # some modules check this flag of their children
        finally:
            for module, _ in calls:
                vars(module).pop("_is_hf_initialized", None)
        return result

    def run(self, materialize: Callable[[int], None], shard: Callable[[int], None]) -> None:
        """Run all steps; ``materialize`` a parameter before its first step, ``shard`` it after its last step."""
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
        with torch.no_grad(), torch.device("cpu"), hf_init.guard_torch_init_functions(), _untied(self._inner):
            yield


def _own_inits(
    module: nn.Module, inner: nn.Module, owner: PreTrainedModel | None, adapters: Mapping[int, list[Init]]
) -> Iterator[Init]:
    """Yield the modules, children first, and their initialization (_init_weights or reset_parameters).

    ``adapters``: ``id(layer)`` -> the steps of its adapters.
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
    """Run ``reset_parameters``, then the later initialization by the constructor of an outer module."""
    reset()
    for name, source in sources_of(module).items():
        parameter = own_parameters(module).get(name)
        if parameter is not None and isinstance(source.lazy, InMemory):
            parameter.copy_(source.lazy.tensor)
        elif parameter is not None and len(source.inits) > 1:  # reset_parameters was the first call
            _repeat(module, [name])


def _repeat(module: nn.Module, names: list[str]) -> None:
    """Repeat the constructor's calls of ``torch.nn.init``."""
    for name in names:
        parameter = own_parameters(module)[name]
        source = sources_of(module).get(name)
        for function, args, kwargs in source.inits if source is not None else ():
            # by name, to call transformers' functions, which skip initialized tensors
            getattr(hf_init, function.__name__, function)(parameter, *args, **kwargs)


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Replace further uses of a tied weight by placeholders that are marked as initialized."""
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            try:
                parameter = model.get_parameter(target)
                if parameter is not model.get_parameter(source):
                    continue
            except AttributeError:  # the model has no such module
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
    """A dispatch mode that collects the ``keys`` of meta tensors in the arguments of operations."""

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
        """Record arguments of ``torch.nn.init`` too, because some of its functions do nothing on the meta device."""
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
