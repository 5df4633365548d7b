"""Run a schedule: the forwards and backwards of this rank's stages, and the messages between them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.distributed.autograd_functions import record
from autopar.distributed.rng import base_seed
from autopar.errors import ConfigError
from autopar.pipeline_parallel.backward import (
    WeightGradients,
    add_gradients,
    stage_backward_input,
    stage_backward_weight,
)
from autopar.pipeline_parallel.batch_checks import BatchReport, StepCount, digest_of
from autopar.pipeline_parallel.outputs import complete, unavailable
from autopar.pipeline_parallel.p2p import P2P, Message, map_tensors
from autopar.pipeline_parallel.schedule import Action
from autopar.pipeline_parallel.stage_forward import StageContext, StageForward, StageOutput, Streams, run_stage
from autopar.pipeline_parallel.stage_weights import TiedWeights
from autopar.plan.stages import StagePlan

_FIRST, _EVERY = 3, 10  # passes before which copies of weights are compared
_NAMES = {"F": "forward", "B": "backward", "I": "backward to its input", "W": "backward to its weights"}


@dataclass
class Step:
    """The work and the results of one pass of a schedule.

    Attributes:
        microbatches: The arguments of the model, one dict for each micro-batch.
        weights: The factor of each micro-batch's loss in the backward.
        loss_of: A function ``(outputs, inputs) -> loss``; None without a loss.
        scale: A function of each weighted loss (fp16 loss scaling).
        shares: The factor of each micro-batch's loss in the loss of the replica's batch.
        call: The callable for a micro-batch; None for the model.
        defaults: The default arguments of each micro-batch.
        targets: The names in a batch that only the loss reads.
        together: True if replicas run collectives in a backward (ZeRO 2 and 3, experts), so that all must run it.
        required: True if at least one loss must require a gradient.
        penalty: A function of parameters, added to the loss of the batch.
        before_last_backward: A function of a stage, called before the last action that adds to its weight gradients.
        losses, outputs: The results per micro-batch, on the last stage.
        penalties: The penalty of this stage's parameters.
        unavailable: The names of entries that the outputs lack.
    """

    microbatches: list[dict[str, Any]]
    weights: list[float]
    loss_of: Callable[[Any, dict[str, Any]], Any] | None
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    keep_outputs: bool = False
    backward: bool = True
    shares: list[float] = field(default_factory=list)
    call: Callable[..., Any] | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    targets: Collection[str] = ()
    together: bool = False
    required: bool = False
    penalty: Callable[[dict[str, nn.Parameter]], Any] | None = None
    before_last_backward: Callable[[int], None] | None = None
    penalties: torch.Tensor | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    unavailable: tuple[str, ...] = ()


@dataclass
class _OpenForward:
    """A forward that waits for its backward: received tensors, sent or differentiated tensors, their gradients."""

    leaves: list[torch.Tensor]
    roots: list[torch.Tensor]
    gradients: list[torch.Tensor] | None = None
    rest: WeightGradients | None = None


class Engine:
    """Run the actions of this rank on one model.

    Args:
        tied: The weights that several stages hold.
        check: True to compare batches, optimizer steps and copies of weights between the stages.
        released: The ``id`` of each weight that only other stages hold.
    """

    def __init__(
        self,
        model: nn.Module,
        context: StageContext,
        plan: StagePlan,
        p2p: P2P,
        tied: TiedWeights,
        *,
        check: bool = True,
        released: Collection[int] = (),
    ) -> None:
        self.model, self.context, self.plan, self.p2p, self.tied = model, context, plan, p2p, tied
        self.rank = p2p.axis.rank
        self.steps = StepCount(model, released) if check and plan.ranks > 1 else None
        self._passes = Counter[bool]()  # number of passes with (True) and without a backward
        self._seed: int | None = None  # the seed of this pass
        self._recomputes = False  # True if this pass's backward recomputes activations
        self._open: dict[tuple[int, int], _OpenForward] = {}
        self._here: dict[tuple[str, int, int], Any] = {}  # messages between two stages of this rank
        self._turn: dict[Action, int] = {}  # every rank's actions -> their number in its list

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Begin a pass on every rank. The batch is compared, actions run and gradients are averaged in the block."""
        try:
            with self.p2p.one_pass():
                yield
        finally:
            if self.steps is not None:
                self.steps.end_pass()
            self._open, self._here = {}, {}

    def run(self, lists: Sequence[Sequence[Action]], step: Step) -> None:
        """Run all actions of this rank in order, inside :meth:`one_pass`; accumulate gradients in the parameters."""
        half = partial(self._backward, full=False)
        do: dict[str, Callable[..., None]]
        do = {"F": self._forward, "B": self._backward, "I": half, "W": self._backward_weight}
        self._recomputes = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        self._turn = {action: turn for row in lists for turn, action in enumerate(row)}
        with base_seed(self.plan.stages > 1 and self.model.training) as self._seed:
            failures, ready = self.p2p.failures, step.before_last_backward
            full = "BI" if self._recomputes else "BW"  # see :meth:`_backward`
            last = {action.stage: action for action in lists[self.rank] if action.kind in full}
            self.p2p.begin_actions()
            for action in lists[self.rank]:
                kind, stage, microbatch = action
                collective = f"a collective in stage {stage}'s {_NAMES[kind]} of micro-batch {microbatch}"
                if ready is not None and action == last[stage]:
                    ready(stage)
                with failures.blame(collective, failures.mpu.tp_cp.ranks), record(_described, action):
                    do[kind](stage, microbatch, step)
            if step.required and step.losses:
                raise ConfigError(
                    "the loss of the batch does not require a gradient; it must depend on a trained weight\n"
                    "  Train a weight that this batch uses (requires_grad_(True)), or evaluate with forward_only=True."
                )
            self.p2p.end_actions()

    def report(self, batch: Any, microbatches: int, *, backward: bool) -> BatchReport:
        """Return the facts that all stages compare before a pass; hash the first batch of each mode in full."""
        if self.steps is None:
            return BatchReport({})
        digests = digest_of(batch, full=not self._passes[backward])
        if digests:
            digests["number of micro-batches"] = str(microbatches)
        number = self._passes.total()
        self._passes[backward] += 1
        copies = self.tied.digests() if number < _FIRST or number % _EVERY == 0 else {}
        return BatchReport(digests, self.steps.begin_pass(microbatches * backward), copies)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int, step: Step) -> None:
        plan = self.plan
        leaves: list[torch.Tensor] = []
        received: StageOutput | None = None
        seed = self._seed  # the first stage's seed, because all stages draw the same numbers before the blocks
        if stage > 0:
            received, seed = self._receive("F", stage - 1, stage, microbatch)
            if step.backward:
                received = map_tensors(received, lambda tensor: _entering(tensor, leaves))
        last = stage == plan.stages - 1
        inputs = dict(step.microbatches[microbatch])
        streams = Streams(seed, plan.stages, microbatch)
        forward = StageForward(self.context, plan.bounds[stage : stage + 2], last, received, streams, stage)
        loss_of = step.loss_of
        finish = None if loss_of is None else (lambda outputs: loss_of(outputs, inputs))
        given = step.defaults | {name: value for name, value in inputs.items() if name not in step.targets}
        with torch.set_grad_enabled(step.backward):
            result = run_stage(forward, step.call or self.model, (), given, finish)
        roots: list[torch.Tensor] = []
        if last:
            roots = self._finish(result, forward.loss, microbatch, step)
        else:
            map_tensors(result, lambda tensor: roots.append(tensor) if tensor.requires_grad else None)
            self._send("F", stage, stage + 1, microbatch, (result, seed))
        if step.backward:
            self._open[stage, microbatch] = _OpenForward(leaves, roots)

    def _finish(self, result: Any, loss: Any, microbatch: int, step: Step) -> list[torch.Tensor]:
        """Return the loss to differentiate on the last stage; an empty list if the micro-batch has no labels."""
        roots: list[torch.Tensor] = []
        if loss is not None:
            step.losses[microbatch] = loss.detach()
            weight = step.weights[microbatch]
            if step.backward and step.together and not loss.requires_grad:
                raise ConfigError(
                    f"the loss of micro-batch {microbatch} does not require a gradient; every replica needs a backward "
                    "with zero.stage 2 and 3 or experts over replicas\n  Use zero.stage 1, or batches that all use a "
                    "trained weight."
                )
            step.required &= not loss.requires_grad
            if step.backward and loss.requires_grad and (weight or step.together):
                if not weight:  # a loss without labels is 0 / 0 and must not reach the gradients
                    map_tensors(result, lambda tensor: _stop_gradient(tensor) if tensor is not loss else None)
                counted = loss * weight
                roots.append(counted if step.scale is None else step.scale(counted))
        if step.keep_outputs:
            step.unavailable = unavailable(result)
            step.outputs[microbatch] = map_tensors(complete(result), torch.Tensor.detach)
        return roots

    # -- backward --------------------------------------------------------------------------------------------------

    def _backward(self, stage: int, microbatch: int, step: Step, *, full: bool = True) -> None:
        """Compute the gradients of the stage's inputs, and of its weights if ``full``.

        Otherwise the first stage leaves its full backward to ``W``. If activations are recomputed, the full backward
        runs here, because each half would recompute them.
        """
        opened = self._open[stage, microbatch]
        if stage < self.plan.stages - 1:
            gradients = self._receive("B", stage + 1, stage, microbatch)
            pairs = [(r, g) for r, g in zip(opened.roots, gradients, strict=True) if g is not None]
            opened.roots, opened.gradients = [root for root, _ in pairs], [gradient for _, gradient in pairs]
        if opened.roots and full and not (self._recomputes or step.together):
            add_gradients(opened.roots, opened.gradients)
            opened.roots = []
        elif opened.roots and (full or self._recomputes):
            torch.autograd.backward(opened.roots, opened.gradients)
            opened.roots = []
        elif opened.roots and opened.leaves:
            opened.rest = stage_backward_input(opened.roots, opened.gradients, opened.leaves)
            opened.roots = []
        if stage > 0:
            self._send("B", stage, stage - 1, microbatch, [leaf.grad for leaf in opened.leaves])
        if full:
            del self._open[stage, microbatch]

    def _backward_weight(self, stage: int, microbatch: int, step: Step) -> None:
        opened = self._open.pop((stage, microbatch))
        if opened.rest is not None:
            stage_backward_weight(opened.rest)
        elif opened.roots:
            torch.autograd.backward(opened.roots, opened.gradients)

    # -- between stages --------------------------------------------------------------------------------------------

    def _send(self, kind: str, stage: int, to: int, microbatch: int, value: Any) -> None:
        place = self.plan.rank_of[to]
        if place == self.rank:
            self._here[kind, to, microbatch] = map_tensors(value, lambda x: x.detach().requires_grad_(x.requires_grad))
        else:
            turn = self._turn_of(kind, to, microbatch)
            self.p2p.send(value, place, _message(kind, stage, to, microbatch), label=(place, turn))

    def _receive(self, kind: str, origin: int, stage: int, microbatch: int) -> Any:
        place = self.plan.rank_of[origin]
        if place == self.rank:
            return self._here.pop((kind, stage, microbatch))
        message = _message(kind, origin, stage, microbatch)
        with record("receive: {0.name}".format, message):
            value = self.p2p.receive(place, message)
        self.p2p.release(place, self._turn_of(kind, origin, microbatch))  # that rank has received all earlier messages
        return value

    def _turn_of(self, kind: str, stage: int, microbatch: int) -> int:
        """Return the index of an action in its rank's list; a backward may be split."""
        split = Action("I", stage, microbatch)
        return self._turn[split if kind == "B" and split in self._turn else Action(kind, stage, microbatch)]


def _described(action: Action) -> str:
    return f"stage {action.stage}: {_NAMES[action.kind]} of micro-batch {action.microbatch}"


def _message(kind: str, origin: int, to: int, microbatch: int) -> Message:
    value = "output" if kind == "F" else "gradient"
    name = f"stage {origin}'s {value} of micro-batch {microbatch} (for stage {to})"
    return Message(name, 2 * to + (kind == "B"), backward=kind == "B")


def _entering(tensor: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """Return a received tensor as a non-leaf, because the model may write into it. The leaf has no memory."""
    if not tensor.requires_grad:
        return tensor
    leaves.append(tensor)
    inside = tensor.clone()
    tensor.data = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return inside


def _stop_gradient(tensor: torch.Tensor) -> None:
    if type(tensor) is torch.Tensor and tensor.grad_fn is not None:
        tensor.register_hook(torch.zeros_like)
