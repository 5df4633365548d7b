"""Steps of a trainer with a parallelized model: averaged over replicas, through stages, clipped by the full norm.

An evaluation uses every sample once, in the order of the dataset, and has the loss of the single-process model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import has_length, seed_worker

from autopar.call_site import warn_user
from autopar.compat.peft import is_peft_model
from autopar.data_parallel.gradients import average_gradients, average_in_backward, clip_grad_norm_
from autopar.distributed.collectives import broadcast
from autopar.distributed.failures import waiting
from autopar.distributed.gloo_collectives import all_gather_into_tensor, all_reduce
from autopar.distributed.process import device_of_numbers
from autopar.errors import ConfigError
from autopar.pipeline_parallel.microbatch import adds_router_loss, batch_size, label_count, weights_over_replicas
from autopar.swap import swap

_UNKNOWN = (
    "because it is unknown over which labels the loss is a mean. Gradients may differ from single-process training.\n"
    "  Pass compute_loss_func=, which divides the sum of the losses by num_items_in_batch."
)
_OF_USER = (
    "which is correct only if each is divided by num_items_in_batch and multiplied by accelerator.num_processes.\n"
    "  If so, set loss_is_scaled_for_ga = True in the class to disable this warning."
)


class ParallelBase(Trainer):
    """transformers' trainer, which parallelizes its model at the end of ``__init__``.

    Attributes:
        model: Model with ``mpu`` and ``_autopar``.
        autopar_ready: True after the model was parallelized.
        autopar_alone: True while the trainer must not multiply the loss by the replicas (``get_tp_size``).
        autopar_evaluates: True while a loss is evaluated.
        autopar_weight: Weight of this replica's loss in a training step, or None.
        autopar_reached: True if ``compute_loss`` of this class computed and weighted the last loss.
        autopar_counts: Numbers of labels of the replicas' last batches, if they differ.
        autopar_warned: True after the warning about equally averaged losses.
    """

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    data_collator: Any
    compute_loss_func: Any
    autopar_ready: bool = False
    autopar_alone: bool = False
    autopar_evaluates: bool = False
    autopar_weight: float | None = None
    autopar_reached: bool = False
    autopar_counts: Sequence[int] = ()
    autopar_warned: bool = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the trainer's loss, weighted so that the mean over replicas is the loss of the global batch.

        A loss that is a mean is multiplied by the weight. A loss that is divided by the number of items stays
        unchanged, since this number is multiplied by the weight too.
        """
        self._refuse_user_function(inputs)
        routers, weight = self.model._autopar.features.get("router_loss"), self.autopar_weight
        items = num_items_in_batch
        # With the number of items, the trainer multiplies the loss by the number of replicas.
        replicas = self.model.mpu.dp.size if items is not None and self.args.average_tokens_across_devices else 1
        weighted = self._is_weighted(inputs)
        self.autopar_reached, self.autopar_alone = True, weighted or not self._sums_over_replicas(inputs)
        if weighted and items is not None:
            items = items * (weight or 1.0) / replicas
        shares = 1 if self.autopar_alone else replicas
        together = routers is not None and (self.autopar_evaluates or shares > 1)
        try:
            with routers.share_of_sum(shares) if together else nullcontext():
                found: Any = super().compute_loss(
                    model, inputs, return_outputs=return_outputs, num_items_in_batch=items
                )
        finally:
            self.autopar_alone = False
        if weight is None:
            return found
        return (_times(found[0], weight), *found[1:]) if return_outputs else _times(found, weight)

    def _refuse_user_function(self, inputs: Any) -> None:
        takes_own = self.compute_loss_func is None and self.label_smoother is None and "labels" in inputs
        if self.model.mpu.dp.size > 1 and takes_own and self.args.average_tokens_across_devices:
            self.model._autopar.own_loss(base_of(self.model)).refuse_user_function(
                f"{self.model.mpu.dp.size} data-parallel replicas",
                "Pass ParallelTrainer(compute_loss_func=...), a sum over labels divided by num_items_in_batch, or use "
                "tensor parallelism.",
            )

    def _is_weighted(self, inputs: Any) -> bool:
        """Return whether ``compute_loss`` of this class weights the losses of replicas.

        It does not if a subclass of transformers' trainer computes the loss, or if a router loss covers all replicas.
        """
        of_transformers = getattr(super().compute_loss, "__func__", None) is Trainer.compute_loss
        routed = "router_loss" in self.model._autopar.features and adds_router_loss(base_of(self.model), inputs)
        return of_transformers and self.model.mpu.dp.size > 1 and not routed

    def has_own(self, method: str) -> bool:
        """Return whether a class between autopar's and transformers' trainer overrides ``method``."""
        homes = [home for home in type(self).__mro__ if method in vars(home)]
        return next((home for home in homes if not home.__module__.startswith("autopar.")), Trainer) is not Trainer

    def _weight_of(self, inputs: Any, samples: int | None = None) -> float:
        """Return the weight of this replica's loss in the mean over replicas. A collective of dp.

        Args:
            samples: Number of real samples in the batch, 0 for a batch of repetitions; None in training.
        """
        counts, kind = self._counts(inputs) if samples != 0 else ([], "mean")
        dp = self.model.mpu.dp
        own = torch.zeros(max(len(self.label_names), 1), dtype=torch.float64, device=device_of_numbers(dp.group))
        own[: len(counts)] = torch.tensor(counts)
        every = own.new_empty(dp.size * len(own))
        with waiting(self.model.mpu, "the labels of the replicas' batches", dp.ranks):
            all_gather_into_tensor(every, own, dp.group)
        found: list[list[float]] = every.view(dp.size, -1).tolist()
        self.autopar_counts = [int(sum(one)) for one in found] if any(one != found[0] for one in found) else []
        if kind == "sum":
            return float(dp.size)
        if kind == "unknown" and samples is None:
            self._warn_of_replicas(type(base_of(self.model)).__name__, _UNKNOWN)
            return 1.0
        return weights_over_replicas([1.0], [first for first, *_ in found], dp.rank)[0]

    def _counts(self, inputs: Any) -> tuple[list[float], str]:
        """Count the labels or samples of a batch over which its loss is a mean.

        Returns:
            The count and ``mean``, or ``sum`` for a sum; the count of each target and ``unknown`` for any other loss,
            also for a combination of several means.
        """
        model, main_input = base_of(self.model), getattr(base_of(self.model), "main_input_name", "")
        if not isinstance(inputs, Mapping) or not any(isinstance(value, torch.Tensor) for value in inputs.values()):
            return [float(rows_of(inputs))], "mean"
        loss = self.model._autopar.own_loss(model)
        made_here = (
            self.label_smoother is not None or self.compute_loss_func is not None or self.has_own("compute_loss")
        )
        if made_here or (loss.kind is None and self.model_accepts_loss_kwargs):  # the trainer counts its labels
            return [float(label_count(inputs, main_input, getattr(self, "_loss_shifts_labels", False)))], "mean"
        if loss.reduction(inputs, 1) != "microbatch":
            return [float(label_count(inputs, main_input, loss.shifted))], "mean"
        if type(model).__name__.endswith("ForCTC") and "labels" in inputs:  # its loss is a mean over sequences
            return [float(batch_size(inputs, main_input))], model.config.ctc_loss_reduction
        width = inputs[main_input].shape[-1] if isinstance(inputs.get(main_input), torch.Tensor) else math.inf
        given = {name: inputs[name] for name in self.label_names if isinstance(inputs.get(name), torch.Tensor)}
        ends = {name: width if name.endswith("_positions") else math.inf for name in given}  # larger ones are ignored
        counts = [float((each.ne(-100) & each.lt(ends[name])).sum()) for name, each in given.items()]
        return counts or [float(rows_of(inputs))], "unknown"

    def _warn_of_replicas(self, name: str, advice: str) -> None:
        """Warn once about equally averaged losses of batches with different numbers of labels."""
        if self.autopar_counts and not self.autopar_warned:
            self.autopar_warned = True
            counts = " and ".join(map(str, self.autopar_counts))
            warn_user(f"{name}: the losses of replicas with {counts} labels are averaged equally, {advice}")

    def _torch_optimizer(self) -> Any:
        """Return the optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _sums_over_replicas(self, inputs: Any) -> bool:
        """Return whether the losses of replicas add up, because each is divided by the labels of all replicas."""
        if not (self.args.average_tokens_across_devices and "labels" in inputs):
            return False
        if self.compute_loss_func is not None:
            return True
        loss = self.model._autopar.own_loss(base_of(self.model))
        divides = self.label_smoother is not None or loss.divides_by_items({**inputs, "num_items_in_batch": 1})
        return bool(self.model_accepts_loss_kwargs) and divides


def base_of(model: Any) -> Any:
    """Return the model in a ``PeftModel``, or ``model`` itself."""
    return model.get_base_model() if is_peft_model(model) else model


class StepMixin(ParallelBase):
    """Batches, gradients and norms; loops without gradients."""

    _norm: torch.Tensor | None = None
    _items_weight: float | None = None  # weight of the number of items in an evaluation

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader, mpu = super()._get_dataloader(*args, **kwargs), self.model.mpu
        base = getattr(loader, "base_dataloader", loader)  # without accelerate's wrapper
        if isinstance(base.worker_init_fn, partial):  # seed by replica instead of rank
            workers = self.args.dataloader_num_workers
            base.worker_init_fn = partial(seed_worker, num_workers=workers, rank=mpu.dp.rank)
        if base.num_workers and mpu.model.size > 1:
            swap(base, _SharedSeeds, autopar_mpu=mpu)
        return loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of one batch; after the last batch of a step average the gradients."""
        ours, last = self.model, self.accelerator.sync_gradients
        if ours.mpu.pp.size == 1:
            # Average inside backward, unless user code may read the gradients before the average.
            early = last and not (self.has_own("training_step") or self.has_own("compute_loss"))
            with average_in_backward(ours) if early else nullcontext():
                loss = self._weighted_step(model, inputs, num_items_in_batch)
            last = last and not early
        else:
            loss = self._staged_step(ours, inputs, num_items_in_batch)
        if last:
            average_gradients(ours)
        return loss

    def _weighted_step(self, model: nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
        """Run the trainer's step with the weight of this replica's loss."""
        weighted = self._is_weighted(inputs)
        self.autopar_weight, self.autopar_reached = self._weight_of(inputs) if weighted else None, False
        try:
            loss = super().training_step(model, inputs, num_items)
        finally:
            self.autopar_weight = None
        if weighted and not self.autopar_reached and not getattr(self, "loss_is_scaled_for_ga", None):
            self._warn_of_replicas(f"{type(self).__name__}.compute_loss", _OF_USER)
        return loss

    def _staged_step(self, model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
        """Run a batch through the stages; return the loss on all stages."""
        model.train()
        batch = dict(self._prepare_inputs(inputs))
        scale = float(model.mpu.dp.size) if self._sums_over_replicas(batch) else 1.0
        if self.model_accepts_loss_kwargs and num_items is not None:
            batch["num_items_in_batch"] = num_items
        else:
            scale /= self.current_gradient_accumulation_steps
        reduction, weight = model._autopar.own_loss(base_of(model)).reduction(batch, 1), 1.0
        if reduction != "sum" and model.mpu.dp.size > 1 and model._autopar.config.pipeline.loss_reduction == "tokens":
            weight = self._weight_of(batch)
        if reduction == "microbatch":
            scale, weight = scale * weight, 1.0  # the gradients of a mean are then weighted
        own = getattr(self._torch_optimizer(), "scale_loss", None)

        def scale_loss(loss: torch.Tensor) -> torch.Tensor:
            return loss * scale if own is None else own(loss * scale)

        with model.no_sync():
            scaling = SimpleNamespace(scale_loss=scale_loss)
            out = model.execute_pipeline(batch, optimizer=scaling, broadcast_loss=True)
        return _times(out.loss.to(self.args.device), weight) * scale

    def get_tp_size(self) -> int:
        """Return 1, or the number of replicas while a loss that is a mean over local labels is computed.

        The trainer multiplies losses by the number of replicas divided by this value; a mean needs no factor.
        """
        return int(self.accelerator.num_processes) if self.autopar_alone else 1

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        if self._norm is not None:
            return self._norm  # optimizer.step() clips and fills in the norm
        return clip_grad_norm_(self.model, float(self.args.max_grad_norm or 0.0))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None or self._clips_inside():
            return grad_norm
        return clip_grad_norm_(self.model, float("inf"))

    def _clips_inside(self) -> bool:
        config = self.model._autopar.config
        return bool(config.precision == "fp16" or config.gradient_clipping)

    def _watch_norm(self) -> None:
        """Log the norm from a tensor that the step of a clipping optimizer fills in."""
        if not self._clips_inside() or not self.args.max_grad_norm:
            return
        norm = self._norm = torch.zeros((), device=self.args.device)

        def fill(optimizer: Any, *_: Any) -> None:
            if optimizer.gradient_norm is not None:
                norm.copy_(optimizer.gradient_norm)

        self._torch_optimizer().register_step_post_hook(fill)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on all ranks; gathered results omit the samples that fill up the last batch."""
        replicas = self.model.mpu.dp.size
        if replicas > 1 and not has_length(getattr(dataloader, "dataset", None)):
            raise ConfigError(
                f"evaluation over {replicas} replicas requires a dataset with a length; otherwise its last samples "
                "would count twice\n  Pass a dataset that has __len__."
            )
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **others: Any
    ) -> Any:
        """Evaluate a batch of this replica, with the loss of the global batch; repeated samples do not count."""
        if self.model.mpu.dp.size == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **others)
        own, rows = self._own_rows(inputs), rows_of(inputs)
        batch = self._own_samples(inputs, own, rows)
        counted = inputs
        if 0 < own < rows:
            counted = inputs[:own] if isinstance(inputs, list) else _first_rows(inputs, own, rows)
        self._items_weight, self.autopar_evaluates = self._weight_of(counted, own), True
        try:
            loss, logits, labels = super().prediction_step(model, batch, prediction_loss_only, ignore_keys, **others)
        finally:
            weight, self._items_weight, self.autopar_evaluates = self._items_weight, None, False
        if loss is not None:
            loss = self._mean_over_replicas(loss, weight)
        if rows_of(batch) < rows:
            logits, labels = _refill(logits, own, rows), _refill(labels, own, rows)
        return loss, logits, labels

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Return the number of items to divide by; in evaluation so that the loss is a mean over local labels."""
        items = super()._get_num_items_in_batch(*args, **kwargs)
        if items is None or not self._items_weight or not self.args.average_tokens_across_devices:
            return items
        return items * self._items_weight

    def _own_samples(self, inputs: Any, own: int, rows: int) -> Any:
        """Return the first ``own`` of ``rows`` samples, or all samples with only their labels."""
        if own == rows:
            return inputs
        gathers = self.has_own("compute_loss")  # it may gather over the replicas
        if own and not gathers:
            return _first_rows(inputs, own, rows)
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or (gathers and labels.ndim < 2):
            return inputs
        return {**inputs, "labels": labels.index_fill(0, torch.arange(own, rows, device=labels.device), -100)}

    def _own_rows(self, inputs: Any) -> int:
        """Return the number of samples in this replica's batch that are not repetitions."""
        state, rows = self.accelerator.gradient_state, rows_of(inputs)
        if not state.end_of_dataloader or state.remainder <= 0:
            return rows
        return int(max(0, min(rows, state.remainder - self.model.mpu.dp.rank * rows)))

    def _mean_over_replicas(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        dp = self.model.mpu.dp
        share = loss.double() * weight if weight else torch.zeros_like(loss, dtype=torch.float64)
        with waiting(self.model.mpu, "the loss of an evaluation", dp.ranks):
            all_reduce(share, group=dp.group)
        return (share / dp.size).to(loss.dtype)


class _SharedSeeds(DataLoader[Any]):
    """A ``DataLoader`` whose workers draw identical random numbers on all ranks of a replica."""

    autopar_mpu: Any

    def __iter__(self) -> Any:
        if self._iterator is not None:  # persistent workers keep their seeds
            return super().__iter__()
        mpu, own = self.autopar_mpu, torch.get_rng_state()
        shared = own.to(device_of_numbers(mpu.model.group), copy=True)
        with waiting(mpu, "the seeds of a loader's workers", mpu.model.ranks):
            broadcast(shared, mpu.model)
        torch.set_rng_state(shared.cpu())
        try:
            return super().__iter__()
        finally:
            if not torch.equal(own, shared.cpu()):
                torch.set_rng_state(own)


def _times(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Multiply a loss by its weight; with weight 0, a mean over no labels (nan) becomes 0."""
    return (loss if weight else loss.nan_to_num()) * weight


def rows_of(inputs: Any) -> int:
    """Count the samples of a batch, which may not be collated."""
    collated = not (isinstance(inputs, list) and inputs and isinstance(inputs[0], Mapping))
    return (find_batch_size(inputs) or 0) if collated else len(inputs)


def _first_rows(value: Any, count: int, rows: int) -> Any:
    """Keep the first ``count`` of ``rows`` samples of every tensor."""
    return recursively_apply(lambda x: x[:count] if x.shape[:1] == (rows,) else x, value)


def _refill(value: Any, count: int, rows: int) -> Any:
    """Repeat the last sample so that every replica has equally many; gathered results omit the repetitions."""
    return recursively_apply(
        lambda x: torch.cat([x, x[-1:].expand(rows - count, *x.shape[1:])]) if x.shape[:1] == (count,) else x, value
    )
