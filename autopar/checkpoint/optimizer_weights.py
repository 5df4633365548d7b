"""The state of a parallelized model's optimizer beside torch's: master weights, a loss scale, ZeRO-1 owners.

``initialize`` leaves it in ``optimizer._autopar``. The fp32 weight of a half-precision parameter is saved among the
optimizer's tensors as ``{parameter}::master``, in the parameter's layout. So the numbers that training goes on with
are in the checkpoint whatever the precision, and a run of another precision takes them from there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.checkpoint.format import Manifest
from autopar.checkpoint.optimizer_metadata import OptimizerMetadata
from autopar.errors import CheckpointError
from autopar.plan.plan import Plan, TensorPlan
from autopar.quantized.layers import stored_weights
from autopar.storage.safetensors_io import dtype_name, dtype_of

if TYPE_CHECKING:
    from autopar.data_parallel.optimizer import ParallelStep

LOSS_SCALE = "loss_scale"
_MASTER = "master"


def step_of(optimizer: torch.optim.Optimizer) -> ParallelStep | None:
    """Return what ``initialize`` left on the optimizer, if it was given to it."""
    step: ParallelStep | None = getattr(optimizer, "_autopar", None)
    return step


def owns(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Tell whether this replica keeps the optimizer's state of a parameter; with ZeRO-1 one does."""
    step = step_of(optimizer)
    return step is None or step.owns(parameter)


def keeps_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Tell whether this rank keeps the optimizer's state of a parameter."""
    step = step_of(optimizer)
    return step is None or step.keeps_state(parameter)


def as_stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, due: TensorPlan) -> TensorPlan:
    """Return the plan of what the optimizer steps for a parameter: without layout, if it steps whole ones."""
    step = step_of(optimizer)
    return due if step is None or parameter not in step.whole else replace(due, layout=None)


def state_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.device:
    """Return where the state of a parameter lies: beside it, or in the CPU's memory."""
    step = step_of(optimizer)
    return parameter.device if step is None or step.host is None else step.host


def writer_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, due: TensorPlan) -> int:
    """Return the rank that writes the state of a parameter, if that is not a shard: among those that hold some of it.

    It is one of the tensor-parallel ranks, or of those over which experts are sharded.
    """
    step = step_of(optimizer)
    if (step is not None and parameter in step.whole) or due.layout is None:
        return 0 if step is None else step.whole.writer(parameter)
    sizes = [due.layout.local_size(rank) for rank in range(due.layout.axis_size)]
    return next((rank for rank, size in enumerate(sizes) if size), 0)


def parameters_by_name(model: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by their canonical names, without quantized ones."""
    quantized = {f"{path}.weight" for path in stored_weights(model)}
    return {plan.canonical(name): one for name, one in model.named_parameters() if name not in quantized}


def _master_weights(step: ParallelStep | None, plan: Plan) -> dict[str, torch.Tensor]:
    """Return this rank's fp32 master weights, by the parameter's canonical name."""
    if step is None or step.masters is None:
        return {}
    step.update()
    held = {name: step.master(p) for p, name in step.names.items() if p.requires_grad and step.owns(p)}
    return {plan.canonical(name): weight for name, weight in held.items() if weight is not None}


def saved_master_weights(optimizer: torch.optim.Optimizer, plan: Plan) -> dict[str, tuple[torch.Tensor, TensorPlan]]:
    """Return saved name -> this rank's fp32 master weight, the optimizer's own and no copy, and its plan."""
    result = {}
    for name, weight in _master_weights(step_of(optimizer), plan).items():
        due, saved = plan.tensors[name], f"{name}::{_MASTER}"
        result[saved] = weight, TensorPlan(saved, due.shape, dtype_name(weight.dtype), due.layout)
    return result


def has_master_weights(manifest: Manifest) -> bool:
    """Tell whether a checkpoint holds fp32 weights of half-precision parameters."""
    if "optimizer" not in manifest.parts:
        return False
    tensors = manifest.parts["optimizer"].tensors
    return len(states_only(tensors, OptimizerMetadata.parse(manifest.training["optimizer"]))) < len(tensors)


def states_only(tensors: Mapping[str, TensorPlan], metadata: OptimizerMetadata) -> dict[str, TensorPlan]:
    """Return the optimizer's tensors without the master weights; a state of its own may be called ``master`` too."""
    result = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.partition("::")
        if key != _MASTER or _MASTER in metadata.state.get(parameter, {}):
            result[name] = tensor
    return result


class TrainingWeights:
    """Which saved tensors fill the weights of a model that goes on training, whatever precision either has.

    Making it checks the checkpoint and changes nothing.

    Args:
        optimizer: which is going to be loaded.
        plan: of the whole model.
        manifest: of the checkpoint, which has an optimizer.

    Attributes:
        states: the checkpoint's optimizer tensors without the fp32 weights.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plan: Plan, manifest: Manifest) -> None:
        self._plan, self._manifest = plan, manifest
        self._step = step_of(optimizer)
        metadata = OptimizerMetadata.parse(manifest.training["optimizer"])
        self._saved: dict[str, str] = {}
        tensors = manifest.parts["optimizer"].tensors
        self.states = states_only(tensors, metadata)
        for name, tensor in tensors.items():
            parameter = name.partition("::")[0]
            if name in self.states:
                continue
            due = manifest.tensors.get(parameter)
            if due is None or due.shape != tensor.shape or tensor.dtype != "float32":
                raise CheckpointError(
                    f"the state of the optimizer in the checkpoint is damaged: {name} is {tensor.dtype} "
                    f"{list(tensor.shape)}, {parameter} has {'no shape' if due is None else list(due.shape)}"
                )
            self._saved[parameter] = name
        self._scale = self._checked(manifest.training.get(LOSS_SCALE))

    def _checked(self, saved: Any) -> Any:
        """Check the saved state of the loss scale; None if there is none, or no use for it."""
        if saved is None or self._step is None or self._step.scale is None:
            return None
        try:
            copy.copy(self._step.scale).load_state_dict(saved)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the loss scale in the checkpoint is damaged: {error!r}") from error
        return saved

    def source(self, name: str, dtype: torch.dtype) -> tuple[str, str]:
        """Return the tensor and the part from which a model's tensor of ``dtype`` is read.

        Its own bits where the checkpoint has it in that dtype, else the most precise number there is.
        """
        same = self._manifest.tensors[name].dtype == dtype_name(dtype)
        return (name, "model") if same or name not in self._saved else (self._saved[name], "optimizer")

    def keeps_all(self, name: str, dtype: torch.dtype) -> bool:
        """Tell whether training goes on with every bit, though the model's tensor has another dtype."""
        return self._now(name, dtype) == self._then(name)

    def drops(self, name: str, dtype: torch.dtype) -> bool:
        """Tell whether training goes on without the fp32 weight that the checkpoint has."""
        return name in self._saved and self._now(name, dtype) != torch.float32

    def _now(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of what the optimizer steps for a parameter of ``dtype``."""
        half = dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if half and self._step is not None and self._step.masters is not None else dtype

    def _then(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._saved else dtype_of(self._manifest.tensors[name].dtype)

    def state_dtype(self, name: str, parameter: torch.Tensor, saved: torch.dtype) -> torch.dtype:
        """Return the dtype of a state of its parameter's shape: what had the stepped weight's dtype has it again."""
        return self._now(name, parameter.dtype) if saved == self._then(name) else saved

    def wanted(self) -> dict[str, torch.Tensor]:
        """Return this rank's master weights, to be filled, by the parameter's name."""
        return _master_weights(self._step, self._plan)

    def finish(self) -> None:
        """Restore the loss scale, if both runs have one."""
        if self._scale is not None and self._step is not None and self._step.scale is not None:
            self._step.scale.load_state_dict(self._scale)
            self._step.publish()
