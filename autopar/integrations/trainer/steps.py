"""The training step of a parallelized model: averaged over the replicas, through stages, clipped by the true norm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from autopar.adapters import is_peft_model
from autopar.data_parallel.gradients import average_gradients, clip_grad_norm_

__all__ = ["ParallelBase", "StepMixin", "base_of"]


class ParallelBase(Trainer):
    """transformers' trainer, whose model is parallelized when its ``__init__`` ends.

    Attributes:
        model: it has ``mpu`` and ``_autopar``.
        autopar_ready: whether it is parallelized already.
        autopar_counted: whether the last loss was given the number of items to divide by.
        autopar_alone: while a loss is computed: whether it is this replica's own, see ``get_tp_size``.
    """

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    data_collator: Any
    model_init: Any
    compute_loss_func: Any
    autopar_ready: bool = False
    autopar_alone: bool = False
    autopar_counted: bool = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as the trainer does; and remember whether it is divided by the items of all replicas."""
        given = args[1] if len(args) > 1 else kwargs.get("num_items_in_batch")
        self.autopar_counted = given is not None
        routers, replicas = self.model._autopar.dp.routers, self.model.mpu.dp.size
        takes_own = self.compute_loss_func is None and self.label_smoother is None and "labels" in inputs
        if replicas > 1 and takes_own and self.args.average_tokens_across_devices:
            self.model._autopar.own_loss(base_of(self.model)).refuse_user_function(
                f"{replicas} data-parallel replicas",
                "Give ParallelTrainer(compute_loss_func=...), a sum over labels divided by num_items_in_batch, or use "
                "tensor parallelism.",
            )
        if routers is None or self.autopar_alone or not self.autopar_counted:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with routers.share_of_sum(replicas):  # as the loss around it is
            return super().compute_loss(model, inputs, *args, **kwargs)

    def has_own_loss(self) -> bool:
        """Return whether ``compute_loss`` is not that of transformers' trainer, but of a class that derives from it."""
        return self.has_own("compute_loss")

    def has_own(self, method: str) -> bool:
        """Return whether a class between autopar's and transformers' trainer has a ``method`` of its own."""
        homes = [home for home in type(self).__mro__ if method in vars(home)]
        return next((home for home in homes if not home.__module__.startswith("autopar.")), Trainer) is not Trainer

    def _torch_optimizer(self) -> Any:
        """Return the optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _sums_over_replicas(self, inputs: Any) -> bool:
        """Return whether the loss of a batch is divided by the labels of all replicas, so that their losses add up."""
        if not (self.args.average_tokens_across_devices and "labels" in inputs):
            return False
        if self.compute_loss_func is not None:
            return True
        loss = self.model._autopar.own_loss(base_of(self.model))
        divides = self.label_smoother is not None or loss.divides_by_items({**inputs, "num_items_in_batch": 1})
        return bool(self.model_accepts_loss_kwargs) and divides


def base_of(model: Any) -> Any:
    """Return the model in a ``PeftModel``; any other is returned as it is."""
    return model.get_base_model() if is_peft_model(model) else model


class StepMixin(ParallelBase):
    """Batches, gradients and norms."""

    _norm: torch.Tensor | None = None

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        if isinstance(loader.worker_init_fn, partial):  # seeded by the process's rank; a replica reads one batch
            workers = self.args.dataloader_num_workers
            loader.worker_init_fn = partial(seed_worker, num_workers=workers, rank=self.model.mpu.dp.rank)
        return loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of one batch of this replica; after the last of a step average the gradients."""
        ours = self.model
        if ours.mpu.pp.size > 1:
            loss = self._staged_step(ours, inputs, num_items_in_batch)
        else:
            self.autopar_alone = not self._sums_over_replicas(inputs)
            try:
                loss = super().training_step(model, inputs, num_items_in_batch)
            finally:
                self.autopar_alone = False
        if self.accelerator.sync_gradients:
            average_gradients(ours)
        return loss

    def _staged_step(self, model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
        """Run a batch through the stages; the loss on all of them."""
        model.train()
        batch = dict(self._prepare_inputs(inputs))
        scale = float(model.mpu.dp.size) if self._sums_over_replicas(batch) else 1.0
        if self.model_accepts_loss_kwargs and num_items is not None:
            batch["num_items_in_batch"] = num_items
        else:
            scale /= self.current_gradient_accumulation_steps
        scaling = _Scaling(scale, getattr(self._torch_optimizer(), "scale_loss", None))
        with model.no_sync():
            out = model.execute_pipeline(batch, optimizer=scaling, broadcast_loss=True)
        return out.loss.to(self.args.device) * scale

    def get_tp_size(self) -> int:
        """Return 1: the processes that the accelerator counts are replicas.

        The trainer multiplies a loss by their number over this. Around a loss that is a mean over this replica's
        labels, and no share of a sum over all replicas, it is their number: their average is the mean already.
        """
        return int(self.accelerator.num_processes) if self.autopar_alone else 1

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        if self._norm is not None:
            return self._norm  # clipped inside of step, which fills it in
        return clip_grad_norm_(self.model, float(self.args.max_grad_norm or 0.0))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None or self._clips_inside():
            return grad_norm
        return clip_grad_norm_(self.model, float("inf"))

    def _clips_inside(self) -> bool:
        config = self.model._autopar.config
        return bool(config.precision == "fp16" or config.gradient_clipping)

    def _watch_norm(self) -> None:
        """Keep a number, where the optimizer clips, that its step fills in, and that is read when it is logged."""
        if not self._clips_inside() or not self.args.max_grad_norm:
            return
        norm = self._norm = torch.zeros((), device=self.args.device)

        def fill(optimizer: Any, *_: Any) -> None:
            if optimizer.gradient_norm is not None:
                norm.copy_(optimizer.gradient_norm)

        self._torch_optimizer().register_step_post_hook(fill)


class _Scaling:
    """An optimizer as ``execute_pipeline`` sees it: what multiplies a micro-batch's loss before its backward pass."""

    def __init__(self, factor: float, scale_loss: Any) -> None:
        self.factor, self._scale_loss = factor, scale_loss

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        loss = loss * self.factor
        return loss if self._scale_loss is None else self._scale_loss(loss)


def rows_of(inputs: Any) -> int:
    """Count the samples of a batch; one that is not collated lists them."""
    if isinstance(inputs, torch.Tensor):
        return inputs.shape[0] if inputs.ndim else 0
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], Mapping):
        return len(inputs)
    entries = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    return next((count for count in map(rows_of, entries) if count), 0)
