"""The attributes that the parts of a parallel trainer share."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from autopar.adapters.wrappers import is_peft_model

__all__ = ["ParallelBase", "base_of"]


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
        return super().compute_loss(model, inputs, *args, **kwargs)

    def has_own_loss(self) -> bool:
        """Return whether ``compute_loss`` is not that of transformers' trainer, but of a class that derives from it."""
        homes = [home for home in type(self).__mro__ if "compute_loss" in vars(home)]
        return next(home for home in homes if home is not ParallelBase) is not Trainer

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
