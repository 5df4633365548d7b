"""Give the parameters of a lazily built model their memory: this rank's shards, straight into final storage.

Values come from the files of a checkpoint (each rank reads its own byte ranges), from the constructor, or from the
model's own random initialization. That one works on whole modules, and draws the same numbers on every rank; a rank
holds a parameter whole from the first step that touches it to the last one, then keeps its shard. Which step touches
what is found by running all steps on the meta device first, where they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from autopar.checkpoint.state import listed
from autopar.deferred_init.random_init import DeferredParameter, Steps
from autopar.deferred_init.sources import by_parameter, forget, sources_of, swap, version
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.plan.plan import Plan
from autopar.storage.lazy_tensor import InMemory, read_shard
from autopar.tensor_parallel.parallelize import sync_parameters

__all__ = ["Materializer", "deferred_fingerprint"]


def deferred_fingerprint(model: nn.Module) -> list[list[str]]:
    """Which parameters come from where; must be the same on every rank."""
    return [
        [path, name, "draw" if source is None else "value" if isinstance(source, InMemory) else "file"]
        for path, module in model.named_modules()
        for name, source in sources_of(module).items()
    ]


class Materializer:
    """What is missing in a model, and how it will be filled in. Made before the model is touched.

    Args:
        model: the root model; whole shapes, partly or all on the meta device.
        inner: the Hugging Face model in it, or a plain module.
        plan: of the model.

    Raises:
        ConfigError: nothing gives a parameter its values, or it was written into while it had no memory.
    """

    def __init__(self, model: nn.Module, inner: nn.Module, plan: Plan) -> None:
        self._model = model
        self._pending = _pending(model, plan)
        self._steps = Steps(model, inner, {key: p for key, p in self._pending.items() if p.drawn})
        touched = self._steps.touched()
        lacking = [p.name for key, p in self._pending.items() if p.source is None and key not in touched]
        if lacking:
            raise ConfigError(_uninitialised(model, lacking))

    def sync_parameters(self, mpu: MPU) -> None:
        """Give every rank the values that the first rank's constructors computed."""
        holder = nn.Module()
        for number, pending in enumerate(self._pending.values()):
            if isinstance(pending.source, InMemory):
                holder.register_buffer(str(number), pending.source.tensor)
        sync_parameters(holder, mpu)

    def draw(self, mpu: MPU, held_here: Callable[[str], bool]) -> None:
        """Run the random initialization; every rank draws what the first one does and keeps its shards.

        Args:
            held_here: whether this rank's stage holds the parameter of a name.

        Raises:
            ConfigError: a parameter was touched, but not filled; the model is left without memory.
        """
        if not self._steps.last:
            return
        held: dict[int, DeferredParameter] = {}
        unfilled: list[str] = []

        def take(key: int) -> None:
            held[key] = pending = self._pending[key]
            whole = torch.full(pending.shape, float("nan"), dtype=pending.parameter.dtype, device="cpu")
            if pending.source is not None:
                pending.source.read_into(whole, tuple((0, size) for size in pending.shape))
            swap(pending.parameter, whole)

        def keep(key: int) -> None:
            pending = held.pop(key)
            whole = pending.parameter.data
            if whole.is_floating_point() and whole.isnan().any():
                unfilled.append(pending.name)
            if held_here(pending.name):
                shard = whole if pending.layout is None else pending.layout.shard(whole, mpu.tp.rank)
                pending.shard = shard.to(mpu.device)
            swap(pending.parameter, torch.empty(pending.shape, dtype=whole.dtype, device="meta"))

        with _same_numbers(mpu):
            self._steps.run(take, keep)
        if unfilled:
            raise ConfigError(_uninitialised(self._model, unfilled))

    def fill(self, mpu: MPU) -> None:
        """Give every parameter of the model, which the plan has been applied to, its final storage.

        Raises:
            CheckpointError: a file cannot be read.
        """
        left = {id(parameter) for parameter in self._model.parameters()}  # on this stage
        for pending in self._pending.values():
            parameter = pending.parameter
            if id(parameter) not in left:
                continue
            shard = pending.shard
            if shard is None:
                assert pending.source is not None
                shard = torch.empty(parameter.shape, dtype=parameter.dtype, device=mpu.device)
                with torch.device("cpu"):  # of what is needed in between
                    read_shard(pending.source, pending.layout, mpu.tp.rank, shard)
            vars(parameter).pop("_is_hf_initialized", None)
            swap(parameter, shard)
            pending.shard = pending.source = None
        for module in self._model.modules():
            forget(module)


def _pending(model: nn.Module, plan: Plan) -> dict[int, DeferredParameter]:
    noted = by_parameter(model.modules())
    found: dict[int, DeferredParameter] = {}
    written: list[str] = []
    foreign: list[str] = []
    for path, module in model.named_modules():
        sources = sources_of(module)
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or id(parameter) in found or not noted:
                continue
            full = f"{path}.{name}" if path else name
            if id(parameter) not in noted and name not in sources:
                foreign.append(full)
                continue
            # what the parameter was made for, also if it was moved to another module since
            source, then = noted.get(id(parameter), (sources.get(name), version(parameter)))
            if version(parameter) != then:
                written.append(full)
            shape = tuple(parameter.shape)
            if source is not None and source.shape != shape:
                raise ConfigError(
                    f"{full} has shape {list(shape)}, what was loaded for it has {list(source.shape)}: do not replace "
                    "or resize parameters between lazy_init and initialize"
                )
            layout = plan.tensors[plan.canonical(full)].layout
            found[id(parameter)] = DeferredParameter(full, parameter, source, shape, layout)
    if written:
        raise ConfigError(
            f"{len(written)} weights of {type(model).__name__} were written into before initialize: {listed(written)}\n"
            "  A model that was built in lazy_init has no memory for them yet, so that was lost. Write into them after "
            "initialize,\n  load such values with from_pretrained, or build the model without lazy_init."
        )
    if foreign:
        raise ConfigError(
            f"{len(foreign)} parameters of {type(model).__name__} have no memory, and were not there in lazy_init: "
            f"{listed(foreign)}\n  Add or resize parameters inside lazy_init, or build the model without it."
        )
    return found


def _uninitialised(model: nn.Module, names: list[str]) -> str:
    return (
        f"nothing gives {len(names)} parameters of {type(model).__name__} their values: {listed(names)}\n"
        "  Initialize them with torch.nn.init in the constructor, write a reset_parameters (in a Hugging Face model an "
        "_init_weights), compute them\n  (nn.Parameter(torch.zeros(3))), or build the model without lazy_init."
    )


@contextmanager
def _same_numbers(mpu: MPU) -> Iterator[None]:
    """Random numbers of the first rank on every rank; a rank that had another state goes back to it."""
    if mpu.world_size == 1:
        yield
        return
    own = torch.get_rng_state()
    staged = own.to(mpu.device, copy=True)
    dist.broadcast(staged, src=0)
    first = staged.cpu()
    torch.set_rng_state(first)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            torch.set_rng_state(own)
