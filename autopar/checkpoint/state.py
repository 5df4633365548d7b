"""The plan and mesh of a model for saving and loading, its local tensors, and its save in the background.

A save in the background runs in a thread with separate connections between the ranks. The next call raises its error.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from autopar.compat.c10d import in_fake_world
from autopar.distributed.agree import Ranks
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.distributed.digest import number_groups_alike
from autopar.distributed.mesh import MPU, owned_groups
from autopar.errors import CheckpointError, listed
from autopar.layout import Block, Layout, replica_rows
from autopar.plan.plan import Plan, TensorPlan
from autopar.policy.match import library_of
from autopar.stored import stored_weights

_log = logging.getLogger(__name__)
_PATIENCE = timedelta(hours=2)

Copy = TypeVar("Copy")


class Background:
    """At most one save of a model that is written during training.

    It has a separate process group of all ranks, so that messages of the thread never mix with messages of training.
    The thread calls methods of the group: the functions of ``torch.distributed`` raise after ``destroy_process_group``,
    while the last checkpoint of a script may still be written.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.rank, self.world_size = 0, 1
        self.control: dist.ProcessGroup | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Background:
        return Background()

    def start(self, mpu: MPU, copied: Copy, work: Callable[[Ranks, Copy], None]) -> None:
        """Start ``work(self, copied)`` in a thread and return. Collective, after :meth:`wait`."""
        self.rank, self.world_size = mpu.rank, mpu.world_size
        if self.control is None and mpu.world_size > 1:
            number_groups_alike(dist.group.WORLD)
            self.control = dist.new_group(backend="gloo", timeout=_PATIENCE, group_desc="autopar/background")
            owned_groups(self).append(self.control)

        def run() -> None:
            try:
                work(self, copied)
            except BaseException as error:
                self._error = error
                if mpu.rank == 0:
                    _log.error("a save in the background failed: %s", error)

        # Not a daemon: the end of a script waits for its last checkpoint.
        self._thread = threading.Thread(target=run, name="autopar save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current save, if there is one.

        Raises:
            CheckpointError: The save failed. Raised once, identical on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            kind = f"{type(error).__name__}: " * (not isinstance(error, CheckpointError))
            raise CheckpointError(f"the save in the background failed: {kind}{error}") from error


STATE = "_autopar_checkpoint"


@dataclass(frozen=True)
class State:
    """Plan and mesh of a parallelized model, for saving and loading; an attribute of the root model.

    Attributes:
        plan: The plan without quantized weights.
        hf_path: The path of the Hugging Face model in the root model; ``""`` if it is the root.
        holders: Tensor name -> the stages that hold it; empty without a pipeline.
        quantized: The plans of quantized weights, which are saved in quantized form or left out (:attr:`adapted`).
        save_adapters: The function ``save(model, directory, timeout, options)`` for ``adapter_only=True``, called on
            every rank; None without adapters.
        before_merge: Functions that check the model on this rank before a merge, and raise CheckpointError.
    """

    plan: Plan
    mpu: MPU
    hf_path: str
    holders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    quantized: Mapping[str, TensorPlan] = field(default_factory=dict)
    background: Background = field(default_factory=Background, compare=False)
    save_adapters: Callable[..., None] | None = field(default=None, compare=False)
    before_merge: tuple[Callable[[nn.Module], None], ...] = field(default=(), compare=False)

    @property
    def hf_prefix(self) -> str:
        """Return the prefix of the Hugging Face model's names in the root model's state dict."""
        return f"{self.hf_path}." if self.hf_path else ""

    def rows_of(self, name: str) -> Axis:
        """Return the axis over which FSDP2 shards a tensor."""
        return self.mpu.copies if name in self.plan.experts else self.mpu.fsdp

    def gather_rows(self, name: str, held: DTensor) -> torch.Tensor:
        """Gather a DTensor over this mesh. Its own mesh may be an equal one of an earlier model."""
        axis, count = self.rows_of(name), held.shape[0]
        rows = tuple(replica_rows(count, replica, axis.size) for replica in range(axis.size))
        local = held.to_local()
        local = local.contiguous() if local.is_meta else local.to(self.mpu.device).contiguous()
        raw = local.unsqueeze(-1).view(torch.uint8)  # not every backend supports every dtype
        full = all_gather(raw, axis, Layout.of(0, [Block("rows", count, 1, rows)]))
        return full.view(local.dtype).squeeze(-1)

    @property
    def adapted(self) -> bool:
        """Return whether adapters wrap quantized weights, which then never change and are not saved."""
        return any(".base_layer." in name for name in self.quantized)

    def check_whole(self, call: str, *, quantized: bool = False) -> None:
        """Raise CheckpointError if ``call``, which writes the full model, would leave out quantized weights.

        ``quantized``: True if it can write them in their quantized form.
        """
        if self.adapted or (self.quantized and not quantized):
            name, tensor = next(iter(self.quantized.items()))
            raise CheckpointError(
                f"{call} would leave out {len(self.quantized)} quantized weights, such as {name} "
                f"({tensor.quantized}).\n"
                "  With adapters use adapter_only=True, or save_parallelized without merge_checkpoints, which "
                "from_parallelized loads\n  into the same base model. Without adapters use merge_checkpoints=True."
            )


def state_of(model: nn.Module) -> State:
    """Return the model's :class:`State`. Raises CheckpointError if it is not parallelized."""
    state = model.__dict__.get(STATE)
    if not isinstance(state, State):
        raise CheckpointError(f"{type(model).__name__} is not parallelized\n  Call autopar.initialize first.")
    return state


def parameters_elsewhere(model: nn.Module) -> Sequence[tuple[nn.Module, Mapping[str, nn.Parameter | None]]]:
    """Return the modules whose parameters are on other stages, each with its original parameters."""
    pipeline: Any = vars(model).get("_autopar_pipeline")
    return () if pipeline is None else pipeline.released.orders


def local_tensors(model: nn.Module, *, fsdp: bool = False) -> dict[str, torch.Tensor]:
    """Return this rank's tensors, not copied, by canonical name in the plan's order.

    Args:
        fsdp: True to include DTensors, which are sharded over the replicas; otherwise they raise.

    Raises:
        CheckpointError: Names, shapes or ties differ from the plan.
    """
    state = state_of(model)
    plan, tp = state.plan, state.mpu.shards.rank
    canonical = plan.names
    found: dict[str, torch.Tensor] = {}
    foreign = []
    quantized = tuple(f"{path}." for path in stored_weights(model))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in canonical and name.startswith(quantized):
            continue
        if name not in canonical:
            foreign.append(name)
            continue
        other = found.setdefault(canonical[name], tensor)
        if other is not tensor and other.data_ptr() != tensor.data_ptr():
            raise CheckpointError(
                f"{name} and {canonical[name]} must be tied, as they were when the model was parallelized"
            )
    missing = [name for name in plan.tensors if name not in found] if state.mpu.sizes.pp == 1 else []
    if foreign or missing:
        raise CheckpointError(
            "the model has changed since it was parallelized"
            + (f"; new: {listed(foreign)}" if foreign else "")
            + (f"; gone: {listed(missing)}" if missing else "")
        )
    for name, tensor in found.items():
        due = plan.tensors[name].local_shape(tp)
        if isinstance(tensor, DTensor):
            if not fsdp:
                raise CheckpointError(f"{name} is a DTensor (fully_shard?); its full shard is needed here")
            check_fsdp_shard(name, tensor, state.rows_of(name).size)
        if tensor.device.type == "meta" and not in_fake_world():
            raise CheckpointError(f"{name} is on the meta device and has no values")
        if tuple(tensor.shape) != due:
            raise CheckpointError(
                f"{name} must have shape {list(due)} on tensor-parallel rank {tp}, got {list(tensor.shape)}\n"
                "  Do not resize or replace it after autopar.initialize."
            )
    return {name: found[name] for name in plan.tensors if name in found}


def check_fsdp_shard(name: str, tensor: DTensor, ranks: int) -> None:
    """Raise CheckpointError unless ``tensor`` is sharded as ``zero.stage`` 2 and 3 do it."""
    mesh = tensor.device_mesh
    last = mesh.ndim - 1  # the tensor is replicated over the dims before
    if mesh.size(last) != ranks or tuple(tensor.placements) != (*[Replicate()] * last, Shard(0)):
        raise CheckpointError(
            f"{name} is a DTensor with placements {tuple(tensor.placements)} over a mesh of {tuple(mesh.shape)}; "
            f"expected Shard(0) over {ranks} data-parallel replicas, as zero.stage 2 and 3 make it"
        )


def config_writer(model: nn.Module) -> Callable[[Path], None]:
    """Return a function that writes ``config.json`` (and ``generation_config.json``) as ``save_pretrained`` would."""
    inner = model.get_submodule(state_of(model).hf_path)
    if not isinstance(inner, PreTrainedModel):
        library = library_of(inner)
        return (lambda folder: None) if library is None else library.config_writer(inner)
    hf_model: Any = inner
    plain = next(c for c in type(hf_model).__mro__ if c.__module__.partition(".")[0] != "autopar")
    config = copy.deepcopy(hf_model.config)  # the user's object keeps its dtype and architectures
    config.dtype = str(hf_model.dtype).removeprefix("torch.")
    config.architectures = [plain.__name__]
    generation = copy.deepcopy(hf_model.generation_config) if hf_model.can_generate() else None

    def write(folder: Path) -> None:
        if hf_model.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(hf_model, folder, config=config)
        config.save_pretrained(folder)
        try:
            if generation is not None:
                generation.save_pretrained(folder)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(f"generation_config.json is not saved: transformers raises: {reason}", stacklevel=2)

    return write
