"""The loss of a micro-batch: the model's own, or the user's; over what it is a mean, and how losses add up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import (
    LOSS_MAPPING,
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)

from autopar.call_site import warn_user
from autopar.compat.tensors import next_sequence_number, sequence_number
from autopar.compat.transformers import set_loss_function
from autopar.errors import ConfigError
from autopar.policy.match import is_encoder_decoder, loss_kind
from autopar.policy.schema import Policy

_MEANS = (ForCausalLMLoss, ForMaskedLMLoss, ForSequenceClassificationLoss, ForTokenClassification)
_LABELS = ("labels", "shift_labels")
_OTHER_TARGETS = ("label", "target", "_positions", "masked_pos", "mask_time_indices", "observed_mask")  # parts of names


@dataclass(frozen=True)
class OwnLoss:
    """Facts about the own loss of a model.

    Attributes:
        model: a Hugging Face model, or a plain module.
        kind: one of :data:`~autopar.policy.schema.LOSSES`; None if no policy says it.
    """

    model: Any
    kind: str | None

    @classmethod
    def of(cls, model: Any, given: Policy | None = None) -> OwnLoss:
        """Find the facts; ``given`` is the user's policy."""
        return cls(model, loss_kind(model, given))

    @property
    def shifted(self) -> bool:
        """Whether the loss leaves out the first label of each sequence, as those of causal models do."""
        if self.kind == "loss_function":  # encoder-decoders give their labels as those of a shift that has been done
            return not self._has_encoder and self._function is ForCausalLMLoss
        return self.kind in ("shifted_mean", "shifted_attended_mean")

    @functools.cached_property
    def _has_encoder(self) -> bool:
        return isinstance(self.model, PreTrainedModel) and is_encoder_decoder(self.model)

    def counted(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the batch with -100 in place of labels that ``ignore_index`` or ``attention_mask`` leaves out."""
        name = "labels" if batch.get("shift_labels") is None else "shift_labels"
        labels, mask, ignored = batch.get(name), batch.get("attention_mask"), batch.get("ignore_index")
        if not isinstance(labels, torch.Tensor):
            return batch
        if ignored is not None and self.kind in ("loss_function", None):
            labels = labels.masked_fill(labels == ignored, -100)
        if self.kind in ("attended_mean", "shifted_attended_mean") and isinstance(mask, torch.Tensor):
            labels = labels.masked_fill(mask[..., -labels.shape[-1] :] == 0, -100)
        return {**batch, name: labels}

    @property
    def user_function(self) -> Any:
        """A loss function that user code has set on the model, or defined in its class; None if there is none."""
        if not isinstance(self.model, PreTrainedModel):
            return None
        models = [module for module in self.model.modules() if isinstance(module, PreTrainedModel)]
        found = [set_loss_function(model) for model in models]
        if self.kind is None and type(self.model).loss_function is not PreTrainedModel.loss_function:
            found.append(type(self.model).loss_function)
        known = [None, *LOSS_MAPPING.values()]
        return next((function for function in found if function not in known), None)

    def refuse_user_function(self, over: str, advice: str) -> None:
        """Raise ConfigError if the loss function is the user's; ``over`` names what has losses of its own."""
        if self.user_function is not None:
            name = getattr(self.user_function, "__name__", type(self.user_function).__name__)
            raise ConfigError(
                f"the losses of {over} cannot be combined: the loss_function of {type(self.model).__name__} is "
                f"user-defined ({name}), expected transformers' mean over the labels that are not -100.\n  {advice}"
            )

    def reduction(self, batch: Mapping[str, Any], microbatches: int, replicas: int = 1, *, counts: bool = False) -> str:
        """Return how the losses of micro-batches make up that of the batch: see ``microbatch.weights_of``.

        ``tokens`` where they are means over the labels that are not -100; ``sum`` where the model divides them by
        ``num_items_in_batch``. Any other value cannot be put together, and is one micro-batch's mean.

        Args:
            replicas: the number of replicas that average gradients.
            counts: whether the user's ``count`` gives what the loss of a micro-batch is a mean over.

        Raises:
            ConfigError: it is neither, and there are several micro-batches; or the user has set the loss function, and
                there are several micro-batches or replicas. From the model and the batch's names only, so the same on
                every rank.
        """
        if counts and batch.get("num_items_in_batch") is not None:
            raise ConfigError(
                "execute_pipeline: count= and num_items_in_batch in the batch both give the divisor of the loss\n"
                "  Leave one of them out."
            )
        if not counts and microbatches * replicas > 1:
            over = [f"{microbatches} micro-batches"] * (microbatches > 1)
            self.refuse_user_function(
                " and ".join(over + [f"{replicas} data-parallel replicas"] * (replicas > 1)),
                "Give execute_pipeline(..., count=lambda inputs: ...), the number that the loss of a micro-batch is a "
                'mean over\n  (len(inputs["labels"]) for a mean over sequences), with or without criterion=. Or give '
                "one micro-batch without replicas.\n  pipeline.loss_reduction: microbatch takes the plain mean.",
            )
        reason = self._no_mean_over_labels(batch)
        if counts and not adds_router_loss(self.model, batch):
            return "tokens"
        if reason is None and self.user_function is None:
            return "sum" if self.divides_by_items(batch) else "tokens"
        if microbatches > 1:
            raise ConfigError(
                f"execute_pipeline: the loss of {type(self.model).__name__} over {microbatches} micro-batches is not "
                f"the mean of theirs by labels: {reason}.\n"
                "  Give criterion=lambda outputs, inputs: ... (a mean over the labels of one micro-batch), or one "
                "micro-batch\n  (pipeline.microbatch_size = the batch's samples); pipeline.loss_reduction: microbatch "
                "takes the mean of their losses."
            )
        return "microbatch"

    def divides_by_items(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the model takes a sum over labels and divides it by the batch's ``num_items_in_batch``.

        A class that no policy names does what its signature says, as transformers' trainer takes it.
        """
        labels = batch.get("shift_labels", batch.get("labels"))
        by_number = isinstance(labels, torch.Tensor) and labels.is_floating_point()  # then it is no cross entropy
        given = batch.get("num_items_in_batch") is not None and not by_number
        return given and self.kind in ("loss_function", None)

    def warn_of_replicas(self, counts: list[float]) -> bool:
        """Warn if replicas with other numbers of labels are averaged alike since nothing says what is right."""
        unknown = self.kind is None and isinstance(self.model, PreTrainedModel) and len(set(counts)) > 1
        if unknown:
            name = type(self.model).__name__
            warn_user(
                f"{name} has a forward of its own, so it is not known over what its loss is a mean: the gradients of "
                f"replicas with {counts[0]:g} and {next(x for x in counts if x != counts[0]):g}\n  labels are averaged "
                f"alike, as DistributedDataParallel does. A policy says it: loss: {{{name}: mean}} "
                "(loss_function, mean, shifted_mean or other)."
            )
        return unknown

    @property
    def _function(self) -> Any:
        """The function that the model's forward calls as ``self.loss_function``."""
        return set_loss_function(self.model) or LOSS_MAPPING.get(self.model.loss_type, ForCausalLMLoss)

    def _no_mean_over_labels(self, batch: Mapping[str, Any]) -> str | None:
        """Say why the loss is not a mean over ``labels``; None if it is one."""
        name = type(self.model).__name__
        if self.kind is None:
            own = isinstance(self.model, PreTrainedModel)
            whose = "its forward is none of transformers'" if own else "it is a module of your own"
            return f"{whose}, which does not say over what its loss is a mean; a policy can: loss: {{{name}: mean}}"
        given = {name: value for name, value in batch.items() if value is not None}
        others = [name for name in given if name not in _LABELS and any(part in name for part in _OTHER_TARGETS)]
        if others:
            return f"the batch has targets besides labels ({', '.join(others)})"
        if not isinstance(given.get("labels", torch.empty(0)), torch.Tensor):
            return f"labels is a {type(given['labels']).__name__}, not a tensor"
        if self.kind == "other":
            of_ctc = getattr(getattr(self.model, "config", None), "ctc_loss_reduction", None)
            return f"it is a CTC loss (config.ctc_loss_reduction: {of_ctc})" if of_ctc else "its policy says so"
        if self.kind == "loss_function" and self._function in LOSS_MAPPING.values() and self._function not in _MEANS:
            return f"it is transformers' {getattr(self._function, '__name__', self._function)}"
        if adds_router_loss(self.model, given):
            return "it has the routers' auxiliary loss (output_router_logits)"
        return None


def adds_router_loss(model: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a forward with these arguments adds the auxiliary loss of a mixture's routers to its own.

    It is not a mean over samples, so the mean over replicas differs from the loss of one process.
    """
    asked, config = given.get("output_router_logits"), getattr(model, "config", None)
    if asked is not None:
        return bool(asked)
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    return any(getattr(each, "output_router_logits", False) for each in configs)


def loss_in(outputs: Any) -> Any:
    """Return the loss of a model's outputs: ``outputs.loss``, ``outputs["loss"]``, or the only number; or None.

    A plain module often returns ``(logits, loss)``, or its loss alone.
    """
    if hasattr(outputs, "loss"):
        return outputs.loss
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    entries = outputs if isinstance(outputs, list | tuple) else [outputs]
    numbers = [x for x in entries if isinstance(x, torch.Tensor) and x.ndim == 0 and x.is_floating_point()]
    return numbers[0] if len(numbers) == 1 else None


def loss_of(
    criterion: Callable[..., Any] | None,
    outputs: Any,
    inputs: dict[str, Any],
    *,
    required: bool,
    blocks: Mapping[int, str] | None = None,
) -> Any:
    """Return the loss of a micro-batch: the model's own, or that of the user's ``criterion``.

    Args:
        required: it is going to be differentiated.
        blocks: weights of this stage's blocks, by ``id``, which the criterion may not be made of.

    Raises:
        ConfigError: there is none, it is not a number, or it is made of weights of blocks.
    """
    begin = next_sequence_number() if blocks else 0
    loss = loss_in(outputs) if criterion is None else criterion(outputs, inputs)
    if criterion is not None and loss is not None and not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"execute_pipeline: criterion returned a {type(loss).__name__}: it returns one tensor, the mean over a "
            "micro-batch.\n  If that is no mean over labels, such as one with class weights, "
            "execute_pipeline(..., count=lambda inputs: ...)\n  says by how much: the sum of the weights that the "
            "mean is divided by."
        )
    if loss is None and required:
        raise ConfigError(
            f"execute_pipeline: the outputs ({type(outputs).__name__}) hold no loss: put labels into the batch, or "
            "give criterion=lambda outputs, inputs: ..."
        )
    if blocks and criterion is not None and loss is not None:
        _refuse_penalty(loss, begin, blocks)
    return loss


def _refuse_penalty(loss: torch.Tensor, begin: int, blocks: Mapping[int, str]) -> None:
    """Refuse a loss whose nodes from number ``begin`` on, which the criterion made, take in weights of blocks.

    Raises:
        ConfigError: names the first of these weights.
    """
    left, seen, found = [loss.grad_fn], set(), set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions:  # a leaf: AccumulateGrad has the weight
            found |= {blocks[key] for key in [id(getattr(node, "variable", None))] if key in blocks}
        elif sequence_number(node) >= begin:  # else a node of the model's forward
            left += [other for other, _ in node.next_functions]
    if found:
        raise ConfigError(
            f"execute_pipeline: criterion reads {len(found)} weights of blocks, {min(found)} first: it runs on the "
            "last stage, which holds\n  its own blocks only, so a penalty would leave out those of other stages.\n"
            "  Use the optimizer's weight_decay; or add the penalty's gradient to p.grad on every stage when "
            "execute_pipeline has returned.\n  Weights behind the blocks (the head) may be read."
        )
