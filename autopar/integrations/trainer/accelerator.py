"""accelerate's ``Accelerator``, for which the data-parallel replicas are the world.

It counts, deals out, gathers and adds up over the replicas (:mod:`autopar.integrations.accelerate`). This module has
what a trainer needs in addition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autopar.data_parallel.gradients import clip_grad_norm_
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.swap import swap


def show_replicas(accelerator: Any, model: nn.Module, mpu: MPU) -> None:
    """Let ``accelerator`` count, shard and gather over the data-parallel axis of ``mpu``; changed in place.

    Args:
        accelerator: an ``accelerate.Accelerator`` without mixed precision that has prepared nothing yet.
        model: the parallelized model, which it leaves as it is.
    """
    accelerator.dataloader_config.dispatch_batches = False  # every rank reads its replica's samples
    swap(accelerator, _Replicas, autopar_model=model, autopar_mpu=mpu)


class _Replicas:
    """Class before that of an ``Accelerator``."""

    autopar_model: nn.Module
    autopar_mpu: MPU
    _models: list[Any]
    _optimizers: list[Any]

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave the parallelized model as it is: nothing is wrapped around it."""
        if model is not self.autopar_model:
            return super().prepare_model(model, *args, **kwargs)  # type: ignore[misc]
        if not any(known is model for known in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer without moving its state, which lies where the parameters lie."""
        return super().prepare_optimizer(optimizer, device_placement=False)  # type: ignore[misc]

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether gradients overflowed in fp16 on some rank, so that no rank stepped."""
        return any(getattr(wrapper.optimizer, "step_was_skipped", False) for wrapper in self._optimizers)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass of the loss, scaled in fp16."""
        scaled = [w.optimizer.scale_loss for w in self._optimizers if hasattr(w.optimizer, "scale_loss")]
        for scale in scaled[:1]:
            loss = scale(loss)
        super().backward(loss, **kwargs)  # type: ignore[misc]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of the whole model's gradients, the same on every rank.

        Raises:
            ConfigError: ``parameters`` are not those of the model, all of them.
        """
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        _check_all(listed, self.autopar_model)
        return clip_grad_norm_(self.autopar_model, max_norm, norm_type)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather over the replicas; of the last batch only the samples that the dataset has."""
        if use_gather_object or not _only_tensors(input_data):
            raise ConfigError(
                "gather_for_metrics of objects (eval_use_gather_object) is not supported for a parallelized model: "
                "give tensors, which are padded to the longest sequence of all replicas"
            )
        return super().gather_for_metrics(input_data)  # type: ignore[misc]


def _only_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_only_tensors, value.values()))
    return all(map(_only_tensors, value)) if isinstance(value, tuple | list) else isinstance(value, torch.Tensor)


def _check_all(parameters: Iterable[Any], model: nn.Module) -> None:
    given = {id(parameter) for parameter in parameters}
    missing = [name for name, p in model.named_parameters() if p.grad is not None and id(p) not in given]
    if missing:
        raise ConfigError(
            f"clip_grad_norm_ got {len(given)} parameters, without {missing[0]}: a parallelized model is clipped by "
            "the norm of all its gradients.\n  Give model.parameters(), or autopar.clip_grad_norm_(model, max_norm)."
        )
