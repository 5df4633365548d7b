"""Sharded regions of a model: one copy per input that enters, and random draws that differ over tp inside.

[Note: regions and random draws] A region runs from a column-parallel layer to the next row-parallel layer. Activations
are sharded over tp inside it and replicated outside. So dropout must draw identical masks on all tp ranks outside a
region, and different masks inside. Outside, torch's default generators are used; ``initialize`` seeds them identically.
At its start a region draws one number from the default CPU generator, identical on all ranks, and seeds the generators
with this number plus the tp rank. At its end it restores their states. The masks therefore depend only on the state at
the start: recomputation restores that state and draws the same masks, and a checkpoint needs only the default
generators. Megatron-LM keeps a second stream in a tracker (core/tensor_parallel/random.py). Nothing is drawn or
restored unless the model is in training mode and has dropout above zero.

[Note: order of the backward pass] The gradient at the entry of a region is all-reduced while the weight gradient of
its first layer is computed. The autograd engine runs the newest ready node first. So the nodes are created in this
order and run in reverse:

    wait          the gradient of x; waits for the all-reduce
    weight        the gradient of the first layer's weight, [out/tp, in]
    launch        the gradient of the copy, to which all layers have added; starts the all-reduce
    y = x W^T     the first layer with a detached weight; its input gradient
    attach        passes the gradient of y to the layer and to ``weight``

A backward pass with ``create_graph=True`` overlaps nothing, and ``wait`` sums. There the gradient of x must depend on
W, and the gradient of W on x, but both are detached above. ``attach`` adds the difference: zero, with derivatives.
Megatron-LM has one function per layer instead, so q, k and v need one all-reduce each
(core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.compat.c10d import in_fake_world
from autopar.compat.tensors import version_of
from autopar.distributed.autograd_functions import any_order, is_watched, keep_none, named_collective, record
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import copy, reduce, start_all_reduce
from autopar.distributed.rng import TorchGenerators, followers, seed_torch

_DRAWS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    *("bernoulli", "bernoulli_", "rand", "rand_like", "randn", "randn_like"),
}

_AT_ONCE = 1 << 26  # largest logits, in bytes, that a forward without training gathers at once
_OFFSET = 2718  # Megatron-LM's offset between the replicated and the tensor-parallel seed


def _marked(kind: str) -> Callable[..., torch.Tensor]:
    def mark(self: Any, x: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
        return x if self.tracking is None else getattr(self.tracking, kind)(x, *of)

    return mark


class Region:
    """The state of the parallel layers of one model during a forward.

    Attributes:
        axis: The tp axis.
        sequence: Object that shards sequences between regions, or None. ``begin()`` is called when the outermost model
            starts a forward; ``after_forward(model, output)`` after the forward of each model, and returns the output.
        rows: Sequence shards of the running computation, or None. ``sum(y)`` reduces the output of a region to the
            local sequence; ``training`` is the mode of the module around it.
        entered: Full sequence that entered the region, or None. ``is_full(x)`` compares ``x`` with it, ``enter()``
            gives the input of layers, ``late_weight(weight, gradient)`` what a layer attaches to its output.
        beginning: Functions of the model, called when a forward starts, before rank checks; each returns named values
            that must be identical on all ranks.
        ending: Functions called after the outermost forward.
        check_thread: Function called before a forward, or None; raises ConfigError if another thread runs a forward
            whose collectives would interleave with this one.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.sequence: Any = None
        self.rows: Any = None
        self.entered: Any = None
        self.beginning: list[Callable[[nn.Module], Mapping[str, str]]] = []
        self.ending: list[Callable[[], None]] = []
        self.check_thread: Callable[[], None] | None = None
        self.may_draw = False
        self._in_evaluation = False
        self._source: torch.Tensor | None = None
        self._copied: torch.Tensor | None = None
        self._version = 0
        self._outside: TorchGenerators | None = None
        self._dropouts: list[tuple[Any, str, Mapping[str, Any]]] = []  # object, name of its probability, its entries
        self.running = 0  # nesting depth of running Hugging Face models
        self.depth = 0  # nesting depth of running region modules
        self.model = ""  # number of the model, identical on all ranks
        self.forwards = 0
        self._has_labels, self._logits_made = False, 0  # in the forward that runs
        self.tracking: Any = None  # of a dry run: an ActivationTracking

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        copied = Region(self.axis)
        memo[id(self)] = copied
        copied.model = f"{self.model}, copied"
        copied.sequence = deepcopy(self.sequence, memo)
        copied.beginning, copied.ending = deepcopy((self.beginning, self.ending), memo)
        owners = [(deepcopy(owner, memo), name) for owner, name, _ in self._dropouts]
        copied._dropouts = [(owner, name, _entries(owner)) for owner, name in owners]
        return copied

    def find_dropout(self, model: nn.Module) -> None:
        """Find dropout: ``p`` of dropout modules, attributes named ``*drop*``, and the config's attention dropout.

        Other dropout fields of a config (for a classifier or a summary) act through the modules made from them.
        """
        configs: dict[int, Any] = {}
        found: list[tuple[Any, str]] = []
        for module in model.modules():
            for name, value in vars(module).items():
                if type(value) in (float, int) and ("drop" in name or name == "p"):
                    found.append((module, name))
            config = getattr(module, "config", None)
            if hasattr(config, "__dict__"):  # Idefics has a layer whose "config" is a number
                configs[id(config)] = config
        if not isinstance(model, PreTrainedModel):
            found += [source for module in model.modules() for source in _of_own(module)]
        for config in configs.values():
            for name, value in vars(config).items():
                if type(value) in (float, int) and "drop" in name and ("att" in name or name == "dropout"):
                    found.append((config, name))
        self._dropouts = [(owner, name, _entries(owner)) for owner, name in found]

    def start(self) -> None:
        """Start a forward: clear the state of an interrupted forward, and find active dropout.

        The result does not depend on the mode, which may have changed when activation checkpointing recomputes.
        """
        self.draw_alike()
        self.release()
        if self.running == 0:
            self.depth, self.rows = 0, None
            if self.sequence is not None:
                self.sequence.begin()
        self.running += 1
        on = [owner for owner, name, entries in self._dropouts if float(entries.get(name) or 0) > 0]
        self.may_draw = bool(on)
        self._in_evaluation = any(isinstance(owner, nn.Module) and owner.training for owner in on)

    def finish(self) -> None:
        """End a forward, including a failed one."""
        self.draw_alike()
        self.release()
        self.running = max(self.running - 1, 0)

    def release(self) -> None:
        """Release the references to activations."""
        self._source = self._copied = self.entered = None

    def expect_logits(self, has_labels: bool) -> None:
        """Count a forward, and note whether it gets labels."""
        self.forwards += 1
        self._has_labels, self._logits_made = has_labels, 0

    def keeps_logits_sharded(self, training: bool, nbytes: int) -> bool:
        """Return whether the head keeps its logits sharded, because probably only a loss reads them."""
        wanted = (self._has_labels or torch.is_grad_enabled()) and not self.is_evaluated(training, nbytes)
        return wanted and self.tracking is None and not torch.compiler.is_compiling()

    def is_evaluated(self, training: bool, nbytes: int) -> bool:
        """Return whether the forward gathers full logits of ``nbytes`` bytes before they are read.

        User code is likely to read logits, maybe on one rank only, without gradients and in evaluation mode without
        labels. Logits above 64 MiB stay sharded, because they take memory and maybe only the loss is read.
        """
        trains = torch.is_grad_enabled() and (training or self._has_labels)
        return nbytes <= _AT_ONCE and not trains

    def name_logits(self) -> str:
        """Return the name of the next logits, identical on all ranks."""
        self._logits_made += 1
        again = f", logits {self._logits_made}" if self._logits_made > 1 else ""
        return f"forward {self.forwards} of model {self.model}{again}"

    def enter(self, x: torch.Tensor, *, shared: bool = True) -> torch.Tensor:
        """Copy ``x`` for a column-parallel layer. Readers of one tensor get the same copy, for one all-reduce.

        Args:
            shared: True if other layers may read the copy; False makes a new copy and keeps the shared one.
        """
        if self.tracking is not None:
            return self.alias(x)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x  # no gradient to sum; includes inference tensors, which have no version
        if not shared:
            return copy(x, self.axis)
        if self.entered is not None and self.rows is not None and self.entered.is_full(x):
            return self.entered.enter()
        # A graph of torch.compile has no versions; there torch itself rejects a copy of a changed tensor.
        version = 0 if torch.compiler.is_compiling() else version_of(x)
        if self._source is not x or self._version != version or self._copied is None:
            self._source, self._version, self._copied = x, version, copy(x, self.axis)
        return self._copied

    def enter_first(
        self, x: torch.Tensor, weight: torch.Tensor, gradient: WeightGradient
    ) -> tuple[torch.Tensor, Late | None]:
        """Copy ``x``, ``[..., in]``, for a layer whose weight gradient overlaps the all-reduce of ``x``'s gradient.

        Returns:
            The copy, and the object that the layer attaches to its output. The object is None if the layer is not the
            first reader of ``x`` or nothing would overlap; in sequence parallelism every layer attaches one.
        """
        if self.entered is not None and self.entered.is_full(x) and can_compute_late(x, weight):
            return self.enter(x), self.entered.late_weight(weight, gradient)
        small = x.numel() < _LEAST
        if self.tracking is not None or small or not can_overlap(x, weight, self.axis):
            return self.enter(x), None
        if self._source is x and self._version == version_of(x) and self._copied is not None:
            return self._copied, None
        entered, late = enter_overlapped(x, weight, gradient, self.axis)
        self._source, self._version, self._copied = x, version_of(x), entered
        return entered, late

    def leave(self) -> None:
        """Leave the region, so that random draws are replicated; release activations in a compiled graph."""
        if self.rows is None:
            self.draw_alike()
        else:
            self.draw_per_rank(self.rows.training)
        if torch.compiler.is_compiling():
            self.release()

    # Marks for a dry run. Outside a dry run these return the tensor itself.
    alias = _marked("alias")  # another tensor object, for use inside the region
    mark_sharded = _marked("mark_sharded")
    mark_replicated = _marked("mark_replicated")
    mark_rows = _marked("mark_rows")  # a sequence shard
    mark_summed = _marked("mark_summed")  # a parameter with a summed gradient; second argument: the Parameter itself

    def draws(self, training: bool) -> bool:
        """Return whether dropout may follow a layer in this mode; some dropout is active in evaluation too."""
        return self.may_draw and (training or self._in_evaluation)

    def only_computes(self, training: bool) -> bool:
        """Return whether entering and leaving the region has no effect without gradients: no draws, no tracking."""
        return self.tracking is None and self._outside is None and not (self.may_draw and self.draws(training))

    def draw_per_rank(self, training: bool) -> None:
        """Seed the default generators per tp rank, until :meth:`draw_alike`."""
        if self._outside is None and self.draws(training):
            self._seed()

    def draw_alike(self) -> None:
        """Restore the default generators to their state before :meth:`draw_per_rank`, identical over tp."""
        if self._outside is not None:
            self._restore()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Draw identical values on all tp ranks, even inside a region; afterwards draws continue as before."""
        inside = None if self._outside is None else TorchGenerators.now()
        self.draw_alike()
        try:
            yield
        finally:
            if inside is not None:
                self._outside = TorchGenerators.now()
                inside.restore()

    # torch.compile cannot capture generator states: with dropout the graph breaks here.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _seed(self) -> None:
        seed = int(torch.randint(2**62, ()).item()) + _OFFSET + self.axis.rank
        self._outside = TorchGenerators.now()
        seed_torch(seed)
        followers.append(self._follow)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _restore(self) -> None:
        if self._follow in followers:
            followers.remove(self._follow)
        outside, self._outside = self._outside, None
        if outside is not None:
            outside.restore()

    def _follow(self) -> None:
        """Seed by rank again after a pipeline stage has started its random stream inside the region."""
        followers.remove(self._follow)
        self._seed()


def _of_own(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield where a user-defined module keeps dropout probabilities: a config of any name, or its forward."""
    if type(module).__module__.partition(".")[0] in ("torch", "transformers"):
        return
    for value in vars(module).values():
        if isinstance(value, Mapping | SimpleNamespace) or (is_dataclass(value) and hasattr(value, "__dict__")):
            yield from (
                (value, key) for key, p in _entries(value).items() if type(p) in (float, int) and "drop" in str(key)
            )
    names = getattr(getattr(type(module).forward, "__code__", None), "co_names", ())
    if any(name in _DRAWS and not hasattr(module, name) for name in names):
        yield module, "training"  # its forward draws in training mode


def _entries(owner: Any) -> Mapping[str, Any]:
    return owner if isinstance(owner, Mapping) else vars(owner)


_LEAST = 1 << 16
"""Least number of input elements for an overlap, whose nodes cost about 50 us. Inputs have one size on all ranks."""


def can_overlap(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> bool:
    """Return whether the all-reduce of the gradient of ``x`` can overlap the gradient of ``weight``."""
    return (
        can_compute_late(x, weight)
        and x.requires_grad
        and axis.size > 1
        and (axis.transport is None or not x.is_cpu)  # over shared memory this process computes the sum
        and (not x.is_meta or in_fake_world())
        and not torch.is_anomaly_enabled()  # it would read the gradient before the sum is complete
    )


class WeightGradient(NamedTuple):
    """The weight gradient of a layer as a function of its input, ``[tokens, in]``, and its output gradient.

    Attributes:
        out_dim: Dim of the output features in the weight.
        of: Function ``(x, grad) -> weight gradient``; ``grad`` is ``[tokens, out/tp]``.
        layer: Function ``(x, weight) -> [tokens, out/tp]`` of the layer.
    """

    out_dim: int
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


LINEAR = WeightGradient(0, lambda x, grad: grad.t() @ x, lambda x, weight: x @ weight.t())  # [out/tp, in]
CONV1D = WeightGradient(1, lambda x, grad: x.t() @ grad, lambda x, weight: x @ weight)  # [in, out/tp]


class Late(NamedTuple):
    """A weight gradient that is computed outside its layer.

    Attributes:
        gradient: Gradient function of the layer.
        entered: Differentiable function of ``x`` that returns the layer's input ``[tokens, in]``.
        tensor: Output of :class:`LateWeight`, ``[tokens, out/tp]`` without memory.
        weight, x: Weight and input of the layer, with their graphs.
    """

    gradient: WeightGradient
    entered: Callable[[torch.Tensor], torch.Tensor]
    tensor: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    x: torch.Tensor | None = None


def can_compute_late(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the gradient of ``weight`` can be computed from ``x``, or a sequence shard, outside the layer."""
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and type(x) is torch.Tensor
        and x.dtype == weight.dtype
        and not torch.compiler.is_compiling()
        and (x.is_meta or not torch.is_autocast_enabled(x.device.type))
        and not is_watched(x)  # a dispatch mode may keep the output, which must not be changed in place then
    )


def enter_overlapped(
    x: torch.Tensor, weight: torch.Tensor, gradient: WeightGradient, axis: Axis
) -> tuple[torch.Tensor, Late]:
    """Copy ``x``, ``[..., in]``, into a region; the all-reduce of its gradient overlaps the gradient of ``weight``."""
    pending = _Pending()
    waiting = _Wait.apply(x, axis, pending)
    tokens = x.detach().flatten(0, -2)
    made = LateWeight.apply(weight, tokens, len(tokens), gradient, lambda x: x)
    late = Late(gradient, lambda x: copy(x, axis).flatten(0, -2), made, weight, x)
    return _Launch.apply(waiting, axis, pending), late


def attach(y: torch.Tensor, late: Late) -> torch.Tensor:
    """Attach ``late`` in place to the layer's output ``y``, ``[tokens, out/tp]``, computed with a detached weight."""
    return _Attach.apply(y, late.tensor, late.weight, late.x, late)


class _Pending:
    """An all-reduce that has started and not finished."""

    wait: Callable[[], None] | None = None


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, pending: _Pending) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.pending = axis, pending
        return x.view_as(x)


class _Wait(_Identity):
    @staticmethod
    @any_order(lambda ctx, grad: (reduce(grad, ctx.axis), None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        wait, ctx.pending.wait = ctx.pending.wait, None
        if wait is not None:
            with record(lambda: "wait: gradient at the entry of a sharded region"):
                wait()
        return grad, None, None


class _Launch(_Identity):
    @staticmethod
    @named_collective("all-reduce: gradient at the entry of a sharded region")
    @any_order(lambda ctx, grad: (grad, None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may pass one tensor to two branches
        ctx.pending.wait = start_all_reduce(grad, ctx.axis)
        return grad, None, None


def _weight_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of a weight, differentiable in ``grad``."""
    (x,) = ctx.saved_tensors
    return ctx.gradient.of(ctx.full(x), grad), None, None, None, None


class LateWeight(torch.autograd.Function):
    """Compute a weight gradient from the output gradient of a layer; the output ``[tokens, out/tp]`` has no memory.

    It saves ``x``, from which ``full`` makes the layer's input ``[tokens, in]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        x: torch.Tensor,
        tokens: int,
        gradient: WeightGradient,
        full: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        keep_none(ctx)
        ctx.gradient, ctx.full = gradient, full
        ctx.save_for_backward(x)
        return weight.new_empty(()).expand(tokens, weight.shape[gradient.out_dim])

    @staticmethod
    @any_order(_weight_gradient)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _weight_gradient(ctx, grad)


def _owed(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return zero gradients of weight and input that depend on both, as the gradients of the layer would."""

    def of(weight: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor]:
        y = ctx.late.gradient.layer(ctx.late.entered(x), weight)  # [tokens, out/tp]
        return torch.autograd.grad(y, (weight, x) if x.requires_grad else weight, grad, create_graph=True)

    if not torch.is_grad_enabled():
        return None, None
    saved = ctx.saved_tensors
    full = of(*(each.view_as(each) for each in saved))  # views exclude the other uses of a tied weight
    seen = of(*(each.detach().requires_grad_(each.requires_grad) for each in saved))
    owed = [one - other for one, other in zip(full, seen, strict=True)]
    return owed[0], owed[1] if len(owed) > 1 else None


class _Attach(torch.autograd.Function):
    keeps_nothing = True  # so its backward can run in both halves of a split backward

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, late: Late
    ) -> torch.Tensor:
        keep_none(ctx)
        ctx.late = Late(late.gradient, late.entered)
        ctx.save_for_backward(weight, x)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @any_order(lambda ctx, grad: (grad, grad, *_owed(ctx, grad), None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, grad, None, None, None
