"""Megatron-LM's layers and loss, for a model of one's own, and its marks on the parameters of any parallelized model.

A constructor draws the full weight on every rank from the same random state and keeps this rank's shard. So a model has
the same full weights for any tensor-parallel size, and without ``init_method`` those that ``nn.Linear`` and
``nn.Embedding`` draw. The forwards are those of :mod:`autopar.tensor_parallel.layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from autopar.compat.patches import hold
from autopar.compat.tensors import own_parameters
from autopar.data_parallel.gradients import LAYER
from autopar.distributed import collectives
from autopar.distributed.axis import Axis, Group, axis_of, device_of
from autopar.distributed.digest import extremes, of_text
from autopar.distributed.rng import TorchGenerators
from autopar.errors import CheckpointError, ConfigError, ConsistencyError
from autopar.layout import Block, Layout, even_shards
from autopar.plan.plan import ModulePlan, TensorPlan
from autopar.tensor_parallel import layers, loss
from autopar.tensor_parallel.regions import Region

InitMethod = Callable[[torch.Tensor], Any]
Reduction = Literal["none", "mean", "sum"]


class _LayerRegion(Region):
    """The region of a layer without a parallelized model around it: nothing is kept from one layer to the next.

    Its random draws are the user's affair (:func:`autopar.tensor_parallel.get_cuda_rng_tracker`).
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayerRegion:
        return _LayerRegion(self.axis)

    def enter(self, x: torch.Tensor, *, shared: bool = True) -> torch.Tensor:
        return collectives.copy(x, self.axis)


def seeded_axis(group: Group | None, layer: str) -> Axis:
    """Return the axis of ``group``, whose ranks are about to draw the same weights. A collective of the axis.

    Raises:
        ConfigError: there is no group.
        ConsistencyError: on all ranks, if their random states differ.
    """
    if group is None:
        raise ConfigError(f"{layer} needs group=, a torch ProcessGroup or an MPU: there is no global one")
    axis = axis_of(group)
    if axis.size == 1:
        return axis
    device = device_of(axis)
    states = TorchGenerators.now(cuda=device.type != "cpu")
    state = b"".join(each.numpy().tobytes() for each in states if each is not None)
    largest, smallest = extremes([of_text(state)], axis.group)
    if largest != smallest:
        raise ConsistencyError(
            f"{layer}: the random states of the ranks {list(axis.ranks)} differ: they would draw different weights.\n"
            "  Seed all of them alike before the model is built: torch.manual_seed(1234)."
        )
    return axis


def layout_of(layer: str, what: str, size: int, dim: int, axis: Axis, stride: int = 1, unit: int = 1) -> Layout:
    """Return the layout of ``size`` features: ``stride`` parts side by side, units of ``unit`` features each.

    Raises:
        ConfigError: they do not divide into such units, or a rank would hold none (rows of an embedding may be few).
    """
    if stride < 1 or unit < 1 or size % (stride * unit):
        raise ConfigError(
            f"{layer}: {what}={size} does not divide into {stride} x units of {unit} features (stride={stride}, "
            f"unit={unit})"
        )
    count = size // (stride * unit)
    if count < axis.size and what != "num_embeddings":
        raise ConfigError(
            f"{layer}: {what}={size} has {count} unit{'s' if count != 1 else ''} of {stride} x {unit} features, which "
            f"cannot be sharded over {axis.size} ranks"
        )
    return Layout.of(dim, [Block("feature", count, unit, even_shards(count, axis.size))] * stride)


class FullWeight(NamedTuple):
    """How the full weight of a constructed layer is made.

    Attributes:
        init_method: fills it, and a bias is 0 then; None: as torch does.
        stride: parts side by side, each sharded by itself.
        unit: features that stay together on one rank.
    """

    init_method: InitMethod | None
    stride: int = 1
    unit: int = 1
    device: Any = None
    dtype: torch.dtype | None = None


def make_layer(
    layer: Any, axis: Axis, plan: ModulePlan, plain: Callable[..., nn.Module], how: FullWeight
) -> torch.Tensor:
    """Give a layer under construction what every parallel layer has, and its shards of the full parameters.

    Args:
        plain: makes the layer with full parameters.

    Returns:
        The full weight.
    """
    if how.init_method is None:
        full = plain(device=how.device, dtype=how.dtype)
    else:  # without torch's own draws
        full = plain(device="meta", dtype=how.dtype).to_empty(device=how.device or torch.get_default_device())
        with torch.no_grad():
            for name, parameter in full.named_parameters():
                how.init_method(parameter.data) if name == "weight" else parameter.zero_()
    layer.tp, layer.region, layer.autopar, layer.autopar_layouts = axis, _LayerRegion(axis), plan, dict(plan.layouts)
    for name, tensor in own_parameters(full).items():
        layout = plan.layouts.get(name)
        if tensor is None:
            layer.register_parameter(name, None)
        elif layout is None:
            setattr(layer, name, nn.Parameter(tensor.data))
        else:
            shard = nn.Parameter(layout.shard(tensor.data, axis.rank))
            setattr(layer, name, shard)
            mark_shard(shard, layout.dim, how.stride)
            if axis.size > 1:  # torch's clippers refuse it
                hold(layer)
                setattr(shard, LAYER, type(layer).__name__)
    return full.get_parameter("weight").data


def make_linear(
    layer: Any,
    rule: Literal["column", "row"],
    shape: tuple[int, int],
    bias: bool,
    how: FullWeight,
    group: Group | None,
    **options: Any,
) -> torch.Tensor:
    """Construct a linear layer, column- or row-parallel.

    Args:
        shape: of the full weight, ``[out, in]``.
        options: of its :class:`~autopar.plan.plan.ModulePlan`.

    Returns:
        The full weight.
    """
    name, dim = type(layer).__name__, 0 if rule == "column" else 1
    axis = seeded_axis(group, name)
    layout = layout_of(name, ("output_size", "input_size")[dim], shape[dim], dim, axis, how.stride, how.unit)
    layouts = {"weight": layout, **({"bias": layout} if bias and rule == "column" else {})}
    nn.Module.__init__(layer)
    layer.output_size, layer.input_size = shape
    layer.out_features, layer.in_features = (
        shape if options.get("gather_output") else layout.local_shape(shape, axis.rank)
    )
    plan = ModulePlan("", rule, "", layout, layouts, **options)
    return make_layer(layer, axis, plan, functools.partial(nn.Linear, shape[1], shape[0], bias), how)


class _Swapped(type):
    """Makes layers that ``initialize`` swapped instances of Megatron-LM's classes, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, vars(cls).get("swapped", ()))


class VocabParallelEmbedding(layers.VocabParallelEmbedding, metaclass=_Swapped):
    """An embedding with its rows sharded: mask, look up, sum. ``[...] -> [..., hidden]``, weight Shard(0).

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: of the full table, as for ``nn.Embedding``.
        init_method: what fills the full table, ``init_method(weight)``; None: as ``nn.Embedding`` does.
        group: a process group or an MPU.

    Raises:
        IndexError: an id outside the full table, on every rank (on CUDA a device-side assertion, as in torch).
    """

    swapped = layers.VocabParallelEmbedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod | None = None,
        group: Group | None = None,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ConfigError(f"padding_idx={padding_idx} lies outside of num_embeddings={num_embeddings}")
        axis = seeded_axis(group, type(self).__name__)
        layout = layout_of(type(self).__name__, "num_embeddings", num_embeddings, 0, axis)
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        plan = ModulePlan("", "embedding", "", layout, {"weight": layout})
        plain = functools.partial(nn.Embedding, num_embeddings, embedding_dim, padding_idx)
        make_layer(self, axis, plan, plain, FullWeight(init_method, device=device, dtype=dtype))


class ColumnParallelLinear(layers.ColumnParallelLinear, metaclass=_Swapped):
    """``nn.Linear`` with its output features sharded: ``[..., in] -> [..., out/tp]``.

    ``weight`` is ``[out/tp, in]``, this rank's shard of the full one that every rank draws.

    Args:
        input_size, output_size: features of the full layer; ``output_size`` need not divide.
        bias: ``[out/tp]``, or none.
        gather_output: return the full ``[..., out]``.
        init_method: what fills the full weight, ``init_method(weight)``; the bias is 0 then. None: as ``nn.Linear``.
        stride: parts side by side that are sharded each by itself (``q | k | v``: 3, ``gate | up``: 2).
        unit: features that stay together on one rank (the width of a head).
        keep_master_weight_for_test: keep the full weight as ``master_weight``.
        skip_bias_add: return ``(output, bias)`` without adding the bias, for a fused kernel to add. Otherwise the
            output alone, as every ``nn.Module`` of a ``Sequential`` does.
        group: a process group or an MPU.
        device, dtype: as for ``nn.Linear``.

    Raises:
        ConfigError: no group, or more ranks than units.
        ConsistencyError: the ranks would draw different weights.
    """

    swapped = layers.ColumnParallelLinear

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        init_method: InitMethod | None = None,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        unit: int = 1,
        group: Group | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        how = FullWeight(init_method, stride, unit, device, dtype)
        weight = make_linear(self, "column", (output_size, input_size), bias, how, group, gather_output=gather_output)
        self.master_weight = weight if keep_master_weight_for_test else None
        self.skip_bias_add = skip_bias_add
        self.output_size_per_partition, self.gather_output = len(self.weight), gather_output


class RowParallelLinear(layers.RowParallelLinear, metaclass=_Swapped):
    """``nn.Linear`` with its input features sharded: ``[..., in/tp] -> [..., out]``, the sum over the ranks.

    ``weight`` is ``[out, in/tp]``, this rank's shard of the full one. The bias is replicated and added once.

    Args:
        input_is_parallel: the input is ``[..., in/tp]`` already, as a ``ColumnParallelLinear`` made it; else it is
            ``[..., in]`` and is scattered here.

    The other arguments are those of :class:`ColumnParallelLinear`; ``stride`` and ``unit`` are those of the column
    layer that makes the input.

    Raises:
        ConfigError: no group, or more ranks than units.
        ConsistencyError: the ranks would draw different weights.
    """

    swapped = layers.RowParallelLinear

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod | None = None,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        unit: int = 1,
        group: Group | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        how = FullWeight(init_method, stride, unit, device, dtype)
        weight = make_linear(
            self, "row", (output_size, input_size), bias, how, group, split_input=not input_is_parallel
        )
        self.master_weight = weight if keep_master_weight_for_test else None
        self.skip_bias_add = skip_bias_add
        self.input_size_per_partition, self.input_is_parallel = self.in_features, input_is_parallel


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    vocab_size: int | None = None,
    group: Group | None = None,
) -> torch.Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` from sharded logits: the same values and gradients.

    Args:
        logits: ``[..., vocab/tp]`` Shard(-1), this rank's columns; not changed. Ranks may hold different numbers of
            columns, some none at all. The vocabulary is the last dim, not dim 1 as in torch.
        target: ``[...]`` Replicate: class indices in the whole vocabulary.
        label_smoothing: share of the target probability that is spread evenly over the whole vocabulary.
        ignore_index: targets of this value have loss 0 and no gradient, and do not count in the mean.
        reduction: ``"none"`` (Megatron's), ``"mean"`` over the tokens that are not ignored (nan if all are, as in
            torch), or ``"sum"``.
        vocab_size: columns of all ranks together, sharded by :func:`autopar.layout.even_shards`. If None, ranks
            exchange their widths first: one more, tiny, all-gather (and, on a GPU, a wait for it).
        group: a process group or an MPU; required.

    Returns:
        Replicate; ``[...]`` for ``"none"``, else a scalar. float32, or float64 for float64 logits: half-precision
        logits are computed in float32.

    Raises:
        ConfigError: on every rank, if the shapes do not match, a target is outside the vocabulary, ``label_smoothing``
            or ``reduction`` is none of torch's, or the ranks' widths are not the shares of ``vocab_size``. On GPUs
            targets and widths are asserted on the device, as in torch, to spare a wait.
    """
    axis = axis_of(group)
    _check_arguments(logits, target, label_smoothing, reduction)
    if vocab_size is None:
        width = torch.tensor([logits.shape[-1]], device=logits.device)
        widths = collectives.gather(width, axis, axis.one_each, 0).tolist()
    else:
        widths = [stop - start for start, stop in even_shards(vocab_size, axis.size)]

    rows = logits.reshape(target.numel(), logits.shape[-1])  # [tokens, vocab/tp]

    def losses(targets: loss.Targets) -> torch.Tensor:
        return loss.VocabParallelCrossEntropy.apply(rows, targets, label_smoothing, widths, axis)

    return loss.reduced(losses, target, ignore_index, reduction, widths, logits.shape[-1], axis)


def _check_arguments(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduction: str) -> None:
    if not logits.is_floating_point() or logits.dim() == 0:
        raise ConfigError(
            f"logits must be floating point of shape [..., vocab/tp], not {logits.dtype} {list(logits.shape)}"
        )
    if target.shape != logits.shape[:-1]:
        raise ConfigError(f"target of shape {list(target.shape)} does not fit logits of shape {list(logits.shape)}")
    if target.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"target must hold class indices (int64 or int32), not {target.dtype}")
    loss.check_options(label_smoothing, reduction)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of the plain model, with full weights, on every rank. A collective of the group.

    Its names are the model's own, so that a plain model with the same names loads it, on any number of ranks.
    """
    sharded = dict(_sharded(model))
    full: dict[str, torch.Tensor] = {}
    done: dict[int, torch.Tensor] = {}  # tied weights are gathered once
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            value = tensor.detach()
            if name in sharded:
                axis, layout = sharded[name]
                value = collectives.all_gather(value, axis, layout)
            done[id(tensor)] = value
        full[name] = done[id(tensor)]
    return full


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load the state dict of the plain model: every rank keeps its shards. No communication.

    Raises:
        CheckpointError: names or full shapes differ; nothing is loaded.
    """
    sharded = dict(_sharded(model))
    own = model.state_dict(keep_vars=True)
    missing, unexpected = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or unexpected:
        raise CheckpointError(
            f"the state dict does not fit {type(model).__name__}: missing {', '.join(missing[:3]) or 'none'}; "
            f"unexpected {', '.join(unexpected[:3]) or 'none'}"
        )
    for name, tensor in own.items():
        due = list(tensor.shape)
        if name in sharded:
            due[sharded[name][1].dim] = sharded[name][1].size
        if list(state[name].shape) != due:
            raise CheckpointError(f"{name} has shape {list(state[name].shape)}, the full one of the model has {due}")
    for name, tensor in own.items():
        axis, layout = sharded.get(name, (None, None))
        tensor.data.copy_(state[name] if layout is None or axis is None else layout.shard(state[name], axis.rank))


def _sharded(model: nn.Module) -> Iterator[tuple[str, tuple[Axis, Layout]]]:
    for path, module in model.named_modules(remove_duplicate=False):
        found: Mapping[str, Any] = getattr(module, "autopar_layouts", {})
        for name, layout in found.items():
            yield f"{path}.{name}".lstrip("."), (module.tp, layout)


# -- marks of parameters -----------------------------------------------------------------------------------------------
# ``tensor_model_parallel`` (counts on every rank; otherwise on the first one only), ``partition_dim``, and
# ``partition_stride``, the number of blocks that lie side by side (two for ``gate | up``). ``shared`` and
# ``ds_pipe_replicated``: an earlier pipeline stage holds and counts it, too.
#
# The first of the ranks that hold a KV head counts it. One flag cannot describe a weight that is held twice only in
# part (a fused ``q | k | v`` with fewer KV heads than ranks): it counts on every rank. DeepSpeed's norms are given what
# counts (:mod:`autopar.integrations.deepspeed`), one of your own is too large by the repeated heads;
# ``autopar.clip_grad_norm_`` is exact there, too.

_NAMES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared", "ds_pipe_replicated")


def mark_parameters(model: nn.Module, state: Any, given: Any) -> None:
    """On parameters that stay: the attributes by which Megatron-LM's and DeepSpeed's norms count each once.

    ``copy.deepcopy`` drops them, ``.to`` keeps them.
    """
    plan, stages, mpu = state.plan, state.stages, state.mpu
    due: dict[str, TensorPlan] = {name: one for one in plan.tensors.values() for name in (one.name, *one.aliases)}
    for name, parameter in model.named_parameters():
        if name in due and plan.tp > 1:
            rank, layout = (mpu.shards if name in plan.experts else mpu.tp).rank, due[name].layout
            counts = layout is not None and (bool(layout.owned(rank)) or not layout.ranges(rank))
            mark_shard(parameter, -1 if layout is None else layout.dim, len(layout.blocks) if layout else 1, counts)
        if name in due and name in stages.tensors and min(stages.holders(name), default=mpu.pp.rank) < mpu.pp.rank:
            parameter.shared = parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
    state.undo.append(lambda model, own: unmark(model))


def mark_shard(parameter: torch.Tensor, dim: int, stride: int = 1, counts: bool = True) -> None:
    """Set the attributes of one parameter; ``dim`` is -1 if it is replicated, ``counts``: whether it counts here."""
    marked: Any = parameter
    marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = counts, dim, stride


def unmark(model: nn.Module) -> None:
    """Remove the attributes that :func:`mark_parameters` set."""
    for parameter in model.parameters():
        for name in _NAMES:
            vars(parameter).pop(name, None)
