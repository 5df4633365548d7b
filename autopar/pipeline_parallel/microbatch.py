"""Split a batch into micro-batches, and weight their losses.

[Note: rows of samples] Most tensors of a batch have one row per sample. Targets may have several rows (channels of
sound: ``labels [samples * channels, seq]``). Images, videos and sounds of all samples are in one tensor, and a sample
may have none or several: ``pixel_values [images, ...]``, or concatenated patches, ``pixel_values [patches, width]``
with ``image_grid_thw [images, 3]``. Their tokens in ``input_ids`` assign them to samples; without such tokens they are
not split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.loss import loss_utils
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.utils.generic import ModelOutput

from autopar.call_site import warn_user
from autopar.compat.tensors import next_sequence_number, sequence_number
from autopar.compat.transformers import SET_LOSS
from autopar.errors import ConfigError
from autopar.pipeline_parallel.p2p import map_tensors
from autopar.policy.match import is_encoder_decoder, loss_kind
from autopar.policy.schema import Policy


def next_batch(data: Any) -> dict[str, Any]:
    """Return the batch ``data``, or the next batch of the iterator; raise ConfigError unless it is a mapping."""
    if isinstance(data, Mapping):
        return dict(data)
    if not isinstance(data, Iterator):
        raise ConfigError(
            f"execute_pipeline: data must be a batch (a dict of tensors) or an iterator over batches, got "
            f"{type(data).__name__}\n  For a DataLoader pass iter(loader)."
        )
    batch = next(data)
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"execute_pipeline: a batch must be a dict of the model's arguments, got {type(batch).__name__}"
        )
    return dict(batch)


def batch_size(batch: Mapping[str, Any], main_input: str) -> int:
    """Count the samples in a batch: dim 0 of the main input, or of the first tensor; raise ConfigError without one."""
    for name in (main_input, "input_ids", "inputs_embeds", "hidden_states", *batch):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.ndim:
            return value.shape[0]
    raise ConfigError(f"execute_pipeline: the batch must contain a tensor, got {', '.join(batch) or 'nothing'}")


def split(
    batch: Mapping[str, Any], samples: int, size: int | None, count: int | None, config: Any = None
) -> list[dict[str, Any]]:
    """Split a batch into micro-batches of ``size`` samples (the last may be smaller), or into ``count`` even ones.

    Tensors with ``samples`` rows are split, also inside tuples, lists and dicts, and so are lists and tuples with an
    entry per sample (:func:`_slice`). Other values are copied into each micro-batch. ``position_ids`` of several kinds,
    ``[kinds, batch, seq]``, are split in dim 1. With fewer samples than ``count`` each sample is a micro-batch. Images,
    and targets with several rows per sample, follow their samples (:func:`sample_rows`, which raises ConfigError if
    they cannot be assigned). A micro-batch without images lacks their arguments.
    """
    if count is not None:
        count = max(min(count, samples), 1)
        bounds = [samples * place // count for place in range(count + 1)]
    else:
        size = size or max(samples, 1)
        bounds = [*range(0, max(samples, 1), size), samples]

    library = isinstance(config, Mapping)  # not of transformers
    rows = sample_rows(batch, samples, None if library else config) if len(bounds) > 2 else {}

    def part(start: int, stop: int) -> dict[str, Any]:
        def narrow(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
            if tensor.ndim <= dim or tensor.shape[dim] != samples:
                return tensor
            return _apart(tensor.narrow(dim, start, stop - start))

        own = {name: (starts[start], starts[stop]) for name, starts in rows.items()}
        return {
            name: _apart(value[slice(*own[name])])
            if name in own
            else narrow(value, 1)
            if name == "position_ids" and isinstance(value, torch.Tensor) and value.ndim == 3  # time, height, width
            else map_tensors(value, narrow)
            if library and isinstance(value, tuple)  # such as cosines and sines; lists have an entry per sample
            else _slice(name, value, samples, slice(start, stop), narrow)
            for name, value in batch.items()
            if name not in own or own[name][0] < own[name][1]
        }

    return [part(start, stop) for start, stop in pairwise(bounds)]


def _apart(part: Any) -> Any:
    """Copy a slice, because some models write into their labels."""
    return part.clone() if isinstance(part, torch.Tensor) and not part.is_floating_point() else part


def _slice(name: str, value: Any, samples: int, part: slice, narrow: Callable[[torch.Tensor], Any]) -> Any:
    """Slice a list with an entry per sample, or the rows of the tensors in a list; raise if both are possible."""
    if len(range(samples)[part]) == samples or isinstance(value, ModelOutput):
        return map_tensors(value, narrow)
    if isinstance(value, dict):
        return {key: _slice(f"{name}[{key!r}]", entry, samples, part, narrow) for key, entry in value.items()}
    if not isinstance(value, list | tuple) or hasattr(value, "_fields"):
        return map_tensors(value, narrow)
    if len(value) != samples:
        return type(value)(_slice(f"{name}[{n}]", entry, samples, part, narrow) for n, entry in enumerate(value))
    rows = [
        not isinstance(entry, dict) and all(tensor.shape[:1] == (samples,) for tensor in tensors)
        for entry in value
        if (tensors := [tensor for tensor in _tensors_in(entry) if tensor.ndim])
    ]
    listed = isinstance(value, list)
    numbers = listed and _is_list_of(value, int | float)
    unclear = any(rows) and (all(rows) if listed else len(rows) == samples or not all(rows))
    if numbers or unclear:
        raise ConfigError(
            f"execute_pipeline: {name} is a {type(value).__name__} of {samples} "
            f"{'numbers' if numbers else f'entries with tensors of {samples} rows'}, and the batch has {samples} "
            "samples; it may have one entry per sample or not.\n"
            f"  Pass a tensor with one row per sample, or use one micro-batch (pipeline.microbatch_size: {samples})."
        )
    if any(rows) and not listed:  # tensors of all samples, and None
        return map_tensors(value, narrow)
    return value[part] if listed or _tensors_in(value) else value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def weights_of(
    microbatches: list[dict[str, Any]],
    main_input: str,
    reduction: str,
    shifted: bool,
    count: Callable[[dict[str, Any]], Any] | None = None,
) -> list[float]:
    """Return the weight of each micro-batch's loss in the loss of the batch; weights of means add up to 1.

    Args:
        reduction: ``tokens``: weights by the number of labels that are not -100 (without labels, of samples), so that
            the sum is the mean over the batch. ``microbatch``: equal weights. ``sum``: weights of 1, for losses that
            add up.
        shifted: True if the first label of each sequence does not count, as in causal language models.
        count: A function of a micro-batch that returns its weight, instead of the labels.
    """
    if reduction != "tokens":
        return [1.0 if reduction == "sum" else 1 / len(microbatches)] * len(microbatches)
    found = [label_count(m, main_input, shifted) if count is None else count(m) for m in microbatches]
    tensors = [count for count in found if isinstance(count, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())  # one synchronization of a GPU for all
    counts = [next(numbers) if isinstance(count, torch.Tensor) else count for count in found]
    total = sum(counts)
    return [count / total for count in counts] if total else [0.0] * len(counts)


def weights_over_replicas(weights: list[float], counts: list[float], replica: int) -> list[float]:
    """Correct the weights for replicas with these ``counts`` of labels, whose gradients are averaged equally."""
    total = sum(counts)
    factor = counts[replica] * len(counts) / total if total else 1.0
    return [weight * factor for weight in weights]


def label_count(microbatch: Mapping[str, Any], main_input: str, shifted: bool) -> torch.Tensor | int:
    """Count the labels in the loss of a batch, or its samples if it has no labels."""
    shifted_labels = microbatch.get("shift_labels")
    labels = microbatch.get("labels") if shifted_labels is None else shifted_labels
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim == 0:
        return batch_size(microbatch, main_input)
    if shifted and labels.ndim > 1 and shifted_labels is None:
        labels = labels[..., 1:]
    return (labels != -100).sum()


# -- rows of samples --------------------------------------------------------------------------------------------------

_TARGETS = re.compile(r"labels|decoder_.*")


class _Medium(NamedTuple):
    """A kind of input besides text: the names of its arguments, and of its placeholder token in the config."""

    name: str
    arguments: re.Pattern[str]
    tokens: tuple[str, ...]


_MEDIA = (
    _Medium("video", re.compile(r".*videos?(_.*)?|second_per_grid_ts"), ("video_token_id", "video_token_index")),
    _Medium(
        "image",
        re.compile(r"(.*_)?pixel_(values|mask|attention_mask)(_images)?|images?_.*"),
        ("image_token_id", "image_token_index"),
    ),
    _Medium(
        "audio",
        re.compile(r"(audio_)?input_features(_mask)?|feature_attention_mask|audio_.*|chunk_.*"),
        ("audio_token_id", "audio_token_index"),
    ),
)


def sample_rows(batch: Mapping[str, Any], samples: int, config: Any) -> dict[str, list[int]]:
    """Return, for arguments without exactly one row for each sample, the bounds of each sample's rows.

    Raises:
        ConfigError: Images (videos, sounds) cannot be assigned to samples. Decided by the batch and the config only, so
            identical on all ranks.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    found = {
        name: list(range(0, len(value) + 1, len(value) // samples))
        for name, value in tensors.items()
        if _TARGETS.fullmatch(name) and len(value) > samples and len(value) % samples == 0
    }
    left = {name: x for name, x in batch.items() if name in tensors or _is_list_of(x, int | float | torch.Tensor)}
    for medium in _MEDIA if config is not None else ():
        listed = {name: left.pop(name) for name in list(left) if medium.arguments.fullmatch(name)}
        grid = next((value for name, value in listed.items() if name.endswith("grid_thw")), None)
        listed_alike = all(len(x) == samples and not _is_list_of(x, int | float) for x in listed.values())
        if grid is not None or not listed_alike:
            found |= _of_medium(medium, listed, grid, tensors.get("input_ids"), samples, config)
    return found


def _of_medium(
    medium: _Medium,
    listed: Mapping[str, Any],
    grid: torch.Tensor | None,
    ids: torch.Tensor | None,
    samples: int,
    config: Any,
) -> dict[str, list[int]]:
    patches = None if grid is None else grid.prod(1).tolist()
    lengths = {name: len(value) for name, value in listed.items()}
    count = len(grid) if grid is not None else max(lengths.values())
    sizes = {count: [1] * count} | ({} if patches is None else {sum(patches): patches})
    tokens = (getattr(each, name, None) for each in _configs(config) for name in medium.tokens)
    token = next((token for token in tokens if type(token) is int), None)
    each: list[int] | None = None  # number of each sample
    if token is not None and ids is not None and ids.shape[:1] == (samples,) and set(lengths.values()) <= set(sizes):
        each = _of_each(ids == token, patches, count)
    if each is None:
        shown = ", ".join(f"{name} {list(getattr(value, 'shape', [len(value)]))}" for name, value in listed.items())
        raise ConfigError(
            f"execute_pipeline: {shown} cannot be split into the batch's {samples} samples: token {token} "
            f"({medium.tokens[0]} of the model's config) in input_ids does not assign the {medium.name}s to samples.\n"
            f"  Use one micro-batch (pipeline.microbatch_size: {samples}), or batches of one sample each."
        )
    starts = [0, *accumulate(each)]  # of the images of each sample
    ends = {length: [0, *accumulate(each_size)] for length, each_size in sizes.items()}
    return {name: [ends[length][start] for start in starts] for name, length in lengths.items()}


def _is_list_of(value: Any, kind: Any) -> bool:
    """Return whether a value is a list of data, such as the seconds of each video."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, kind) for entry in value)


def _configs(config: Any) -> list[Any]:
    return [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]


def _of_each(marked: torch.Tensor, patches: Sequence[int] | None, count: int) -> list[int] | None:
    """Return the number of images of each sample; None if the tokens do not determine it.

    Args:
        marked: The mask ``[samples, seq]`` of the tokens of images.
        patches: The number of patches of each image, to which its number of tokens is proportional; None if unknown.
    """
    tokens = marked.sum(1).tolist()
    if patches is None:
        begins = marked.clone()
        begins[:, 1:] &= ~marked[:, :-1]
        runs: list[int] = begins.sum(1).tolist()
        if sum(runs) == count:
            return runs
        patches = [1] * count
    total, all_patches = sum(tokens), sum(patches)
    ends = {end * total: place for place, end in enumerate(accumulate(patches), 1)} | {0: 0}
    places = [0, *(ends.get(end * all_patches, -1) for end in accumulate(tokens))]
    if not total or not all_patches or -1 in places:
        return None
    return [after - before for before, after in pairwise(places)]


# -- losses ------------------------------------------------------------------------------------------------------------

_MEANS = (
    *(ForCausalLMLoss, loss_utils.ForMaskedLMLoss),
    *(loss_utils.ForSequenceClassificationLoss, loss_utils.ForTokenClassification),
)
_LABELS = ("labels", "shift_labels")
_OTHER_TARGETS = ("label", "target", "_positions", "masked_pos", "mask_time_indices", "observed_mask")  # parts of names


@dataclass(frozen=True)
class OwnLoss:
    """Facts about the loss that a model computes.

    Attributes:
        kind: One of :data:`~autopar.policy.schema.LOSSES`; None if no policy names it.
    """

    model: Any
    kind: str | None

    @classmethod
    def of(cls, model: Any, given: Policy | None = None) -> OwnLoss:
        """Return the facts about ``model``; ``given`` is the user's policy."""
        return cls(model, loss_kind(model, given))

    @property
    def shifted(self) -> bool:
        """Return whether the loss skips the first label of each sequence, as in causal models."""
        if self.kind == "loss_function":  # encoder-decoders shift their labels before the loss
            encodes = isinstance(self.model, PreTrainedModel) and is_encoder_decoder(self.model)
            return not encodes and self._function is ForCausalLMLoss
        return self.kind in ("shifted_mean", "shifted_attended_mean")

    def counted(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the batch with -100 for labels that ``ignore_index`` or ``attention_mask`` excludes."""
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
        """Return the loss function that user code set on the model, or defined in its class; None without one."""
        if not isinstance(self.model, PreTrainedModel):
            return None
        models = [module for module in self.model.modules() if isinstance(module, PreTrainedModel)]
        found = [getattr(model, SET_LOSS, None) for model in models]
        if self.kind is None and type(self.model).loss_function is not PreTrainedModel.loss_function:
            found.append(type(self.model).loss_function)
        known = [None, *LOSS_MAPPING.values()]
        return next((function for function in found if function not in known), None)

    def refuse_user_function(self, over: str, advice: str) -> None:
        """Raise ConfigError if the loss function is user-defined; ``over`` describes the losses to combine."""
        if self.user_function is not None:
            name = getattr(self.user_function, "__name__", type(self.user_function).__name__)
            raise ConfigError(
                f"the losses of {over} cannot be combined: the loss_function of {type(self.model).__name__} must be "
                f"transformers' mean over the labels that are not -100, got the user-defined {name}.\n  {advice}"
            )

    def reduction(self, batch: Mapping[str, Any], microbatches: int, replicas: int = 1, *, counts: bool = False) -> str:
        """Return the ``reduction`` of :func:`weights_of` for losses of micro-batches.

        ``tokens`` for means over the labels that are not -100, or over the user's ``count`` (``counts``). ``sum`` if
        the model divides by ``num_items_in_batch``. ``microbatch`` for other losses, which cannot be combined, so there
        may be only one micro-batch.

        Raises:
            ConfigError: Losses of several micro-batches cannot be combined, or a user-defined loss function has several
                micro-batches or replicas. Decided by the model and the batch's names, so identical on all ranks.
        """
        if counts and batch.get("num_items_in_batch") is not None:
            raise ConfigError(
                "execute_pipeline: count= is not supported with num_items_in_batch in the batch: both divide the loss\n"
                "  Leave one of them out."
            )
        if not counts and microbatches * replicas > 1:
            over = [f"{microbatches} micro-batches"] * (microbatches > 1)
            self.refuse_user_function(
                " and ".join(over + [f"{replicas} data-parallel replicas"] * (replicas > 1)),
                "Use execute_pipeline(..., count=lambda inputs: ...), the divisor of a micro-batch's loss "
                '(len(inputs["labels"])\n  for a mean over sequences), with or without criterion=. Or use one '
                "micro-batch without replicas.\n  pipeline.loss_reduction: microbatch uses the unweighted mean.",
            )
        reason = self._no_mean_over_labels(batch)
        if counts and not adds_router_loss(self.model, batch):
            return "tokens"
        if reason is None and self.user_function is None:
            return "sum" if self.divides_by_items(batch) else "tokens"
        if microbatches > 1:
            raise ConfigError(
                f"execute_pipeline: the losses of {microbatches} micro-batches of {type(self.model).__name__} cannot "
                f"be combined: {reason}.\n"
                "  Use criterion=lambda outputs, inputs: ... (a mean over the labels of one micro-batch), or one "
                "micro-batch\n  (pipeline.microbatch_size = the batch's samples); pipeline.loss_reduction: microbatch "
                "uses the unweighted mean."
            )
        return "microbatch"

    def divides_by_items(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the model divides by ``num_items_in_batch``; its signature decides if no policy names it."""
        labels = batch.get("shift_labels", batch.get("labels"))
        by_number = isinstance(labels, torch.Tensor) and labels.is_floating_point()  # not a cross entropy
        given = batch.get("num_items_in_batch") is not None and not by_number
        return given and self.kind in ("loss_function", None)

    def warn_of_replicas(self, counts: list[float]) -> bool:
        """Warn if replicas with different numbers of labels get equal weights, because the kind of loss is unknown."""
        unknown = self.kind is None and isinstance(self.model, PreTrainedModel) and len(set(counts)) > 1
        if unknown:
            name = type(self.model).__name__
            warn_user(
                f"{name} has a custom forward with an unknown loss, so gradients of replicas with {counts[0]:g} and "
                f"{next(x for x in counts if x != counts[0]):g} labels are averaged\n  equally, as in "
                f"DistributedDataParallel. Name the loss in a policy: loss: {{{name}: mean}} "
                "(loss_function, mean, shifted_mean or other)."
            )
        return unknown

    @property
    def _function(self) -> Any:
        """Return the function that the model's forward calls as ``self.loss_function``."""
        return getattr(self.model, SET_LOSS, None) or LOSS_MAPPING.get(self.model.loss_type, ForCausalLMLoss)

    def _no_mean_over_labels(self, batch: Mapping[str, Any]) -> str | None:
        """Return the reason why the loss is not a mean over ``labels``; None if it is a mean."""
        name = type(self.model).__name__
        if self.kind is None:
            own = isinstance(self.model, PreTrainedModel)
            whose = "its forward is none of transformers'" if own else "it is a user-defined module"
            return f"{whose}, and its loss is unknown; name it in a policy: loss: {{{name}: mean}}"
        given = {name: value for name, value in batch.items() if value is not None}
        targets = [name for name in given if name not in _LABELS and any(part in name for part in _OTHER_TARGETS)]
        if targets:
            return f"the batch has further targets ({', '.join(targets)})"
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
    """Return whether a forward with these arguments adds the auxiliary loss of routers.

    It is not a mean over samples, so the mean over replicas differs from the loss of one process.
    """
    asked, config = given.get("output_router_logits"), getattr(model, "config", None)
    if asked is not None:
        return bool(asked)
    return any(getattr(each, "output_router_logits", False) for each in _configs(config))


def loss_in(outputs: Any) -> Any:
    """Return ``outputs.loss``, ``outputs["loss"]``, the only number in a custom module's outputs, or None."""
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
    """Return the loss of a micro-batch, computed by the model or by the user's ``criterion``.

    Raise ConfigError if it is ``required`` and missing, is not a tensor, or if the criterion reads weights of
    ``blocks``, a mapping from ``id`` to name.
    """
    begin = next_sequence_number() if blocks else 0
    loss = loss_in(outputs) if criterion is None else criterion(outputs, inputs)
    if criterion is not None and loss is not None and not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"execute_pipeline: criterion must return one tensor, the mean over a micro-batch; got "
            f"{type(loss).__name__}.\n  If it is not a mean over labels (but over class weights), pass "
            "execute_pipeline(..., count=lambda inputs: ...),\n  the divisor of the mean."
        )
    if loss is None and required:
        raise ConfigError(
            f"execute_pipeline: the outputs ({type(outputs).__name__}) must contain a loss\n  Put labels into the "
            "batch, or pass criterion=lambda outputs, inputs: ..."
        )
    if blocks and criterion is not None and loss is not None:
        _refuse_penalty(loss, begin, blocks)
    return loss


def _refuse_penalty(loss: torch.Tensor, begin: int, blocks: Mapping[int, str]) -> None:
    """Raise ConfigError if nodes from number ``begin`` on, made by the criterion, read weights of blocks."""
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
            f"execute_pipeline: criterion must not read weights of blocks, got {len(found)} (first {min(found)}): the "
            "last stage holds only some blocks\n  Use the optimizer's weight_decay, or execute_pipeline(..., "
            "penalty=...). Weights after the blocks (the head) may be read."
        )
