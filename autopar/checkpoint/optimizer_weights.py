"""The state of a parallelized model's optimizer next to torch's: master weights, a loss scale, ZeRO-1 owners.

``initialize`` leaves it in ``optimizer._autopar``. The fp32 weight of a half-precision parameter is saved among the
optimizer's tensors as ``{parameter}::master``, so a run of any precision continues from the same numbers.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from autopar.checkpoint.format import Manifest, reason
from autopar.errors import CheckpointError
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.safetensors_io import dtype_name, dtype_of

if TYPE_CHECKING:
    from autopar.data_parallel.optimizer import ParallelStep

LOSS_SCALE = "loss_scale"


def step_of(optimizer: torch.optim.Optimizer | None) -> ParallelStep | None:
    """Return the object that ``initialize`` leaves on an optimizer; None without it."""
    return getattr(optimizer, "_autopar", None)


def keeps_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether this rank keeps the optimizer's state of a parameter."""
    step = step_of(optimizer)
    return step is None or step.keeps_state(parameter)


def as_stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, due: TensorPlan) -> TensorPlan:
    """Return the plan of the tensor that the optimizer steps for a parameter: without layout, if it steps full ones."""
    step = step_of(optimizer)
    return due if step is None or parameter not in step.whole else replace(due, layout=None)


def parameters_by_name(model: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by their canonical names, those that the plan knows."""
    canonical = plan.names
    parameters = model.named_parameters(remove_duplicate=False)
    return {canonical[name]: parameter for name, parameter in parameters if name in canonical}


def master_name(parameter: str) -> str:
    """Return the name of a parameter's fp32 weight in a checkpoint."""
    return f"{parameter}::master"


def master_weights(optimizer: torch.optim.Optimizer, plan: Plan) -> dict[str, torch.Tensor]:
    """Return this rank's fp32 master weights, no copies, by the parameter's canonical name."""
    step = step_of(optimizer)
    if step is None or step.masters is None:
        return {}
    step.update()
    held = {name: step.master(p) for p, name in step.names.items() if p.requires_grad and step.owns(p)}
    return {plan.canonical(name): weight for name, weight in held.items() if weight is not None}


def has_master_weights(manifest: Manifest) -> bool:
    """Return whether a checkpoint holds fp32 weights of half-precision parameters."""
    optimizer = manifest.training.get("optimizer")
    return isinstance(optimizer, dict) and bool(optimizer.get("masters"))


class TrainingWeights:
    """The saved tensors that fill the weights of a model in training, whatever precision either has.

    Making it checks the checkpoint and changes nothing.

    Args:
        optimizer: The optimizer to load; None loads the model alone.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, manifest: Manifest) -> None:
        self._manifest, self._step = manifest, step_of(optimizer)
        try:
            masters = () if optimizer is None else manifest.training["optimizer"]["masters"]
            self._saved = {str(name): master_name(name) for name in masters}
            for parameter, name in self._saved.items():
                tensor, due = manifest.parts["optimizer"].tensors[name], manifest.tensors[parameter]
                if due.shape != tensor.shape or tensor.dtype != "float32":
                    raise ValueError(
                        f"{name} is {tensor.dtype} {list(tensor.shape)}, {parameter} has {list(due.shape)}"
                    )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the state of the optimizer in the checkpoint is damaged: {reason(error)}"
            ) from error
        scale = None if self._step is None else self._step.scale
        self._scale = None if scale is None else manifest.training.get(LOSS_SCALE)
        if scale is not None and self._scale is not None:
            try:
                copy.copy(scale).load_state_dict(self._scale)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise CheckpointError(f"the loss scale in the checkpoint is damaged: {error!r}") from error

    def source(self, name: str, dtype: torch.dtype) -> tuple[str, str]:
        """Return the tensor and the part from which a model's tensor of ``dtype`` is read: the most precise one.

        If the checkpoint has the model's tensor in that dtype, these are its own bits.
        """
        same = self._manifest.tensors[name].dtype == dtype_name(dtype)
        return (name, "model") if same or name not in self._saved else (self._saved[name], "optimizer")

    def keeps_all(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether training continues with every bit, though the model's tensor has another dtype."""
        return self._now(name, dtype) == self._then(name)

    def drops(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether training continues without the fp32 weight in the checkpoint."""
        return name in self._saved and self._now(name, dtype) != torch.float32

    def _now(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the tensor that the optimizer steps for a parameter of ``dtype``."""
        half = dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if half and self._step is not None and self._step.masters is not None else dtype

    def _then(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._saved else dtype_of(self._manifest.tensors[name].dtype)

    def state_dtype(self, name: str, parameter: torch.Tensor, saved: torch.dtype) -> torch.dtype:
        """Return the dtype of a state of its parameter's shape: the stepped weight's if it was saved in that."""
        return self._now(name, parameter.dtype) if saved == self._then(name) else saved

    def finish(self) -> None:
        """Restore the loss scale, if both runs have one."""
        if self._scale is not None and self._step is not None and self._step.scale is not None:
            self._step.scale.load_state_dict(self._scale)
            self._step.publish()
