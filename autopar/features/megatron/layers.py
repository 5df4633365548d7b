"""Megatron-LM's layers and loss for user-defined models, and its marks on the parameters of parallelized models.

A constructor draws the full weight on every rank from the same random state, and keeps the local shard. So a model has
the same full weights for any tensor-parallel size; without ``init_method`` they equal those of ``nn.Linear`` and
``nn.Embedding``. The forwards are in :mod:`autopar.tensor_parallel.layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from autopar.compat.patches import hold
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
    """The region of a single layer, which shares no copies with other layers.

    The user must manage its random draws (:func:`autopar.tensor_parallel.get_cuda_rng_tracker`).
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayerRegion:
        return _LayerRegion(self.axis)

    def enter(self, x: torch.Tensor, *, shared: bool = True) -> torch.Tensor:
        return collectives.copy(x, self.axis)


def seeded_axis(group: Group | None, layer: str) -> Axis:
    """Return the axis of ``group``. A collective of the axis.

    Raises:
        ConfigError: ``group`` is None.
        ConsistencyError: Random states differ, so ranks would draw different weights; on all ranks.
    """
    if group is None:
        raise ConfigError(f"{layer} requires group=, a torch ProcessGroup or an MPU; there is no global group")
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
            "  Seed all of them identically before building the model: torch.manual_seed(1234)."
        )
    return axis


def layout_of(layer: str, what: str, size: int, dim: int, axis: Axis, stride: int = 1, unit: int = 1) -> Layout:
    """Return the layout of ``size`` features: ``stride`` parts next to each other, in units of ``unit`` features.

    Raises:
        ConfigError: The features are not divisible into such units, or a rank would hold none (except of embeddings).
    """
    if stride < 1 or unit < 1 or size % (stride * unit):
        raise ConfigError(
            f"{layer}: {what}={size} must be divisible into {stride} x units of {unit} features (stride={stride}, "
            f"unit={unit})"
        )
    count = size // (stride * unit)
    if count < axis.size and what != "num_embeddings":
        raise ConfigError(
            f"{layer}: {what}={size} has {count} unit{'s' if count != 1 else ''} of {stride} x {unit} features, which "
            f"cannot be sharded over {axis.size} ranks"
        )
    return Layout.of(dim, [Block("feature", count, unit, even_shards(count, axis.size))] * stride)


def draw_full(
    layer: nn.Module, begin: Callable[..., None], init_method: InitMethod | None, device: Any, dtype: torch.dtype | None
) -> None:
    """Create the full parameters of a layer under construction, as torch does, or by ``init_method`` with bias 0.

    Args:
        begin: ``__init__`` of the layer's torch class, bound to its sizes.
    """
    if init_method is None:
        begin(device=device, dtype=dtype)
        return
    begin(device="meta", dtype=dtype)  # on the meta device torch draws no random numbers
    layer.to_empty(device=device or torch.get_default_device())
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            init_method(parameter.data) if name == "weight" else parameter.zero_()


def keep_shards(layer: Any, axis: Axis, plan: ModulePlan, stride: int = 1) -> None:
    """Replace the full parameters of a layer with local shards, and set the attributes of a parallel layer."""
    layer.tp, layer.region, layer.autopar, layer.autopar_layouts = axis, _LayerRegion(axis), plan, dict(plan.layouts)
    for name, layout in plan.layouts.items():
        shard = nn.Parameter(layout.shard(getattr(layer, name).data, axis.rank))
        setattr(layer, name, shard)
        mark_shard(shard, layout.dim, stride)
        if axis.size > 1:  # patched clippers of torch reject such parameters
            hold(layer)
            setattr(shard, LAYER, type(layer).__name__)


def make_linear(
    layer: Any,
    rule: Literal["column", "row"],
    shape: tuple[int, int],
    bias: bool,
    stride: int,
    unit: int,
    group: Group | None,
    draws: tuple[InitMethod | None, Any, torch.dtype | None],
    **options: Any,
) -> torch.Tensor:
    """Construct a column- or row-parallel linear layer.

    Args:
        shape: Shape of the full weight, ``[out, in]``.
        draws: Initialization, device and dtype of :func:`draw_full`.
        options: Attributes of the layer's :class:`~autopar.plan.plan.ModulePlan`.

    Returns:
        The full weight.
    """
    name, dim = type(layer).__name__, 0 if rule == "column" else 1
    axis = seeded_axis(group, name)
    layout = layout_of(name, ("output_size", "input_size")[dim], shape[dim], dim, axis, stride, unit)
    draw_full(layer, functools.partial(nn.Linear.__init__, layer, shape[1], shape[0], bias), *draws)
    full = layer.weight.data
    layouts = {"weight": layout, **({"bias": layout} if bias and rule == "column" else {})}
    keep_shards(layer, axis, ModulePlan("", rule, "", layout, layouts, **options), stride)
    layer.output_size, layer.input_size = shape
    local = shape if options.get("gather_output") else layout.local_shape(shape, axis.rank)
    layer.out_features, layer.in_features = local
    return full


class _Swapped(type):
    """Metaclass that makes layers swapped by ``initialize`` instances of Megatron-LM's classes."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, vars(cls).get("swapped", ()))


class VocabParallelEmbedding(layers.VocabParallelEmbedding, metaclass=_Swapped):
    """An embedding with sharded rows: mask, look up, sum. ``[...] -> [..., hidden]``, weight Shard(0).

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: Arguments of ``nn.Embedding`` for the full table.
        init_method: Function ``init_method(weight)`` that fills the full table in place. Default: as ``nn.Embedding``.
        group: A process group or an MPU.

    Raises:
        IndexError: An id is outside the full table; on every rank. On CUDA a device-side assertion, as in torch.
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
            raise ConfigError(f"padding_idx must be in [-{num_embeddings}, {num_embeddings}), got {padding_idx}")
        axis = seeded_axis(group, type(self).__name__)
        layout = layout_of(type(self).__name__, "num_embeddings", num_embeddings, 0, axis)
        begin = functools.partial(nn.Embedding.__init__, self, num_embeddings, embedding_dim, padding_idx)
        draw_full(self, begin, init_method, device, dtype)
        keep_shards(self, axis, ModulePlan("", "embedding", "", layout, {"weight": layout}))


class ColumnParallelLinear(layers.ColumnParallelLinear, metaclass=_Swapped):
    """``nn.Linear`` with sharded output features: ``[..., in] -> [..., out/tp]``.

    ``weight`` is ``[out/tp, in]``, the local shard of the full weight that every rank draws.

    Args:
        input_size: Number of input features of the full layer.
        output_size: Number of output features of the full layer; need not be divisible by the number of ranks.
        bias: True for a bias, ``[out/tp]``.
        gather_output: True to return the full ``[..., out]``.
        init_method: Function that fills the full weight in place; the bias is then 0. Default: as ``nn.Linear``.
        stride: Number of parts next to each other, each sharded separately (``q | k | v``: 3, ``gate | up``: 2).
        unit: Number of features that stay together on one rank (the width of a head).
        keep_master_weight_for_test: True to keep the full weight as ``master_weight``.
        skip_bias_add: True to return ``(output, bias)`` without adding the bias, for a fused kernel.
        group: A process group or an MPU.
        device, dtype: Arguments of ``nn.Linear``.

    Raises:
        ConfigError: ``group`` is missing, or there are more ranks than units.
        ConsistencyError: The ranks would draw different weights.
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
        shape, draws = (output_size, input_size), (init_method, device, dtype)
        weight = make_linear(self, "column", shape, bias, stride, unit, group, draws, gather_output=gather_output)
        self.master_weight = weight if keep_master_weight_for_test else None
        self.skip_bias_add = skip_bias_add
        self.output_size_per_partition, self.gather_output = len(self.weight), gather_output


class RowParallelLinear(layers.RowParallelLinear, metaclass=_Swapped):
    """``nn.Linear`` with sharded input features: ``[..., in/tp] -> [..., out]``, summed over the ranks.

    ``weight`` is ``[out, in/tp]``, the local shard of the full weight. The bias is replicated and added once.

    Args:
        input_is_parallel: True for an input ``[..., in/tp]`` from a ``ColumnParallelLinear``; False scatters an input
            ``[..., in]``.

    The other arguments are the same as in :class:`ColumnParallelLinear`; ``stride`` and ``unit`` describe the column
    layer that computes the input.

    Raises:
        ConfigError: ``group`` is missing, or there are more ranks than units.
        ConsistencyError: The ranks would draw different weights.
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
        shape, draws = (output_size, input_size), (init_method, device, dtype)
        weight = make_linear(self, "row", shape, bias, stride, unit, group, draws, split_input=not input_is_parallel)
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
    """Compute ``torch.nn.functional.cross_entropy`` from sharded logits, with the same values and gradients.

    Args:
        logits: Local columns, ``[..., vocab/tp]`` Shard(-1). Ranks may have different numbers of columns, including
            zero. The vocabulary is the last dim, not dim 1 as in torch.
        target: Class indices in the full vocabulary, ``[...]`` Replicate.
        label_smoothing: Fraction of the target probability that is spread evenly over the full vocabulary.
        ignore_index: Target value with loss 0 and no gradient, which does not count in the mean.
        reduction: ``"none"`` (Megatron's), ``"mean"`` over the tokens that are not ignored (nan without such tokens,
            as in torch), or ``"sum"``.
        vocab_size: Number of columns of all ranks, sharded by :func:`autopar.layout.even_shards`. None exchanges the
            widths first: one more small all-gather, for which the host waits on a GPU.
        group: A process group or an MPU; required.

    Returns:
        The loss, Replicate; ``[...]`` for ``"none"``, else a scalar; float32, or float64 for float64 logits.

    Raises:
        ConfigError: The shapes do not match, a target is outside the vocabulary, ``label_smoothing`` or ``reduction``
            is not supported, or the widths are not the shards of ``vocab_size``; on every rank. On GPUs targets and
            widths are asserted on the device, as in torch.
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
        return loss.ShardedCrossEntropy.apply(None, targets, label_smoothing, widths, axis, rows)

    return loss.reduced(losses, target, ignore_index, reduction, widths, logits.shape[-1], axis)


def _check_arguments(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduction: str) -> None:
    if not logits.is_floating_point() or logits.dim() == 0:
        raise ConfigError(
            f"logits must be floating point of shape [..., vocab/tp], got {logits.dtype} {list(logits.shape)}"
        )
    if target.shape != logits.shape[:-1]:
        raise ConfigError(f"target of shape {list(target.shape)} does not fit logits of shape {list(logits.shape)}")
    if target.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"target must hold class indices (int64 or int32), got {target.dtype}")
    loss.check_options(label_smoothing, reduction)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of ``model`` with full weights, on every rank. A collective of the group."""
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
    """Load the local shards from a state dict with full weights. No communication.

    Raises:
        CheckpointError: Names or full shapes differ; nothing is loaded.
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
            raise CheckpointError(f"{name}: expected the full shape {due}, got {list(state[name].shape)}")
    for name, tensor in own.items():
        axis, layout = sharded.get(name, (None, None))
        tensor.data.copy_(state[name] if layout is None or axis is None else layout.shard(state[name], axis.rank))


def _sharded(model: nn.Module) -> Iterator[tuple[str, tuple[Axis, Layout]]]:
    for path, module in model.named_modules(remove_duplicate=False):
        found: Mapping[str, Any] = getattr(module, "autopar_layouts", {})
        for name, layout in found.items():
            yield f"{path}.{name}".lstrip("."), (module.tp, layout)


# -- marks of parameters -----------------------------------------------------------------------------------------------
# ``tensor_model_parallel``: True if a norm counts the parameter on every rank, otherwise only the first rank counts.
# ``partition_dim``: sharded dim. ``partition_stride``: number of parts next to each other (two for ``gate | up``).
# ``shared`` and ``ds_pipe_replicated``: True if an earlier pipeline stage also holds and counts the parameter.
#
# The first of the ranks that hold a KV head counts it. A single flag cannot describe a weight with some repeated heads
# (a fused ``q | k | v`` with fewer KV heads than ranks). It counts on every rank, so a custom norm counts these heads
# several times. DeepSpeed's norm is corrected (:mod:`autopar.integrations.deepspeed`); ``autopar.clip_grad_norm_`` is
# exact.

_NAMES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared", "ds_pipe_replicated")


def mark_parameters(model: nn.Module, state: Any, given: Any) -> None:
    """Set attributes so that the norms of Megatron-LM and DeepSpeed count each parameter once.

    ``copy.deepcopy`` drops them; ``.to`` keeps them.
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
    state.undo.append(_unmark)


def mark_shard(parameter: torch.Tensor, dim: int, stride: int = 1, counts: bool = True) -> None:
    """Set the attributes of one parameter; ``dim`` is -1 for a replicated parameter."""
    marked: Any = parameter
    marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = counts, dim, stride


def _unmark(model: nn.Module, state: Any) -> None:
    for parameter in model.parameters():
        for name in _NAMES:
            vars(parameter).pop(name, None)
