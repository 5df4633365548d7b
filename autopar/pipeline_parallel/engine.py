"""Running a schedule: the forwards and backwards of this rank's stages, and what travels between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.errors import PipelineError
from autopar.pipeline_parallel.backward import Rest, backward_input, backward_weights
from autopar.pipeline_parallel.batch_checks import DONE, END, ENDED, check_digest, data_ended, digest_of, end_pass
from autopar.pipeline_parallel.outputs import complete
from autopar.pipeline_parallel.p2p import Post, map_tensors
from autopar.pipeline_parallel.rng import draws_of, seed_of_pass
from autopar.pipeline_parallel.schedule import Action
from autopar.pipeline_parallel.stage import run_stage
from autopar.pipeline_parallel.stage_forward import Conductor, Course, Handed
from autopar.plan.stages import StagePlan

__all__ = ["Engine", "Step"]

_NAMES = {"F": "forward", "B": "backward", "I": "backward to its input", "W": "backward to its weights"}


@dataclass
class Step:
    """What one pass of a schedule works on.

    Attributes:
        microbatches: arguments of the model, one dict each.
        weights: how much the loss of each counts.
        loss_of: ``(outputs, inputs) -> loss``; None where no loss is wanted.
        scale: applied to what is differentiated (fp16 loss scaling).
        call: what is called with a micro-batch; None: the model.
        read: what the stages must have read alike, per micro-batch; None: the micro-batches.
        losses, outputs: per micro-batch, filled on the last stage.
        withheld: entries that the outputs lack there.
    """

    microbatches: list[dict[str, Any]]
    weights: list[float]
    loss_of: Callable[[Any, dict[str, Any]], Any] | None
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    keep_outputs: bool = False
    backward: bool = True
    call: Callable[..., Any] | None = None
    read: list[Any] | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()


@dataclass
class _Open:
    """A forward whose backward is still to come."""

    leaves: list[torch.Tensor]
    roots: list[torch.Tensor]
    gradients: list[torch.Tensor | None] | None = None
    rest: Rest | None = None


class Engine:
    """Runs lists of actions on one model.

    Args:
        model: what is called with a micro-batch.
        conductor: of its elements.
        plan: its stages.
        rank: this rank's place on the pipeline-parallel axis.
        post: to the other places.
        check: compare micro-batches with what the sender of an activation has.
        steps: its ``made`` counts the optimizer steps of this rank, which are compared with the micro-batches.
    """

    def __init__(
        self,
        model: nn.Module,
        conductor: Conductor,
        plan: StagePlan,
        rank: int,
        post: Post,
        *,
        check: bool = True,
        steps: Any = None,
    ) -> None:
        self.model, self.conductor, self.plan, self.rank, self.post = model, conductor, plan, rank, post
        self._check = check and plan.ranks > 1
        self._steps = steps
        self._digests: list[dict[str, str]] = []
        self._seed: int | None = None  # of this pass
        self._recomputes = False  # activations, in this pass's backward
        self._open: dict[tuple[int, int], _Open] = {}
        self._here: dict[tuple[str, int, int], Any] = {}  # from a stage of this rank to another one of it
        self._turn: dict[Action, int] = {}  # every rank's actions -> their number in its list

    def run(self, lists: Sequence[Sequence[Action]], step: Step) -> None:
        """Do all actions of this rank in order; gradients are accumulated in the parameters.

        Args:
            lists: every rank's actions.

        Raises:
            PipelineError: another stage did not deliver, or failed at any point of the pass.
            ConsistencyError: another stage has another batch, or none.
        """
        do = {"F": self._forward, "B": self._backward, "I": self._backward_input, "W": self._backward_weights}
        self._open, self._here = {}, {}
        self._turn = {action: turn for row in lists for turn, action in enumerate(row)}
        self._recomputes = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        self.post.begin()
        try:
            read = step.microbatches if step.read is None else step.read
            self._digests = [self._digest(batch, len(read)) for batch in read] if self._check else [{}] * len(read)
            with seed_of_pass(self.plan.stages, self.model.training) as self._seed:
                for kind, stage, microbatch in lists[self.rank]:
                    what = f"a collective in stage {stage}'s {_NAMES[kind]} of micro-batch {microbatch}"
                    with self.post.failures.blame(what, self.post.failures.mpu.tp.ranks):
                        do[kind](stage, microbatch, step)
                ended = end_pass(self.post, DONE)  # so that nobody waits in a collective for a stage that failed
                if ended:
                    raise data_ended(ended)
        except Exception as error:
            self._tell(error)
            raise
        finally:
            self._open, self._here = {}, {}

    def _digest(self, batch: Any, count: int) -> dict[str, str]:
        steps = {} if self._steps is None else {"optimizer steps so far": str(self._steps.made)}
        return {**digest_of(batch, count), **steps}

    def cannot_begin(self, error: Exception) -> None:
        """Instead of :meth:`run`, on a rank that fails before it: the others learn it in the pass that they begin."""
        self.post.begin()
        self._tell(error)

    def data_ended(self) -> None:
        """Instead of :meth:`run`, on a rank that has no more batch; returns if no other rank has one.

        Raises:
            ConsistencyError: another one has.
            PipelineError: another one did not answer.
        """
        self.post.begin()
        mine = data_ended([self.post.axis.ranks[self.rank]])
        self.post.send_failure(mine, self._waiting(), pause=False)
        try:
            ended = end_pass(self.post, ENDED)
        except PipelineError as error:
            self._tell(mine)
            raise mine from error
        if len(ended) < self.plan.ranks:
            raise data_ended(ended)
        self.post.failures.clear()

    def _tell(self, error: Exception) -> None:
        """The neighbours, who may wait for this rank, and all who have finished."""
        others = [(place, END["tag"]) for place in range(self.plan.ranks) if place != self.rank]
        self.post.send_failure(error, [*self._waiting(), *others])

    def _waiting(self) -> list[tuple[int, int]]:
        """(place, tag) of what the neighbours wait for."""
        receivers = []
        for stage in self.plan.stages_on(self.rank):
            for kind, to in (("F", stage + 1), ("B", stage - 1)):
                if 0 <= to < self.plan.stages and self.plan.rank_of[to] != self.rank:
                    receivers.append((self.plan.rank_of[to], self._how(kind, stage, to, 0)["tag"]))
        return receivers

    # -- forward ---------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int, step: Step) -> None:
        plan = self.plan
        leaves: list[torch.Tensor] = []
        received = None
        if stage > 0:
            *taken, digest = self._take("F", stage - 1, stage, microbatch)
            sender = self.post.axis.ranks[self.plan.rank_of[stage - 1]]
            check_digest(self._digests[microbatch], digest, (self.post.axis.ranks[self.rank], sender), microbatch)
            received = Handed(*map_tensors(taken, lambda x: _entering(x, leaves) if step.backward else x))
        last = stage == plan.stages - 1
        inputs = dict(step.microbatches[microbatch])
        course = Course(plan.bounds[stage], plan.bounds[stage + 1], last, received)
        loss_of = step.loss_of
        finish = None if loss_of is None else (lambda outputs: loss_of(outputs, inputs))
        with torch.set_grad_enabled(step.backward), draws_of(self._seed, stage + plan.stages * microbatch):
            result = run_stage(step.call or self.model, self.conductor, course, (), dict(inputs), finish)
        if last:
            roots = self._finish(result, course.loss, microbatch, step)
        else:
            roots = []
            map_tensors((result.output, result.encoder), lambda x: roots.append(x) if x.requires_grad else None)
            self._give("F", stage, stage + 1, microbatch, (result.output, result.encoder, self._digests[microbatch]))
        if step.backward:
            self._open[stage, microbatch] = _Open(leaves, roots)

    def _finish(self, result: Any, loss: Any, microbatch: int, step: Step) -> list[torch.Tensor]:
        """The last stage's loss, as what is differentiated; nothing if no label of the micro-batch counts."""
        roots: list[torch.Tensor] = []
        if loss is not None:
            step.losses[microbatch] = loss.detach()
            weight = step.weights[microbatch]
            if step.backward and weight:
                counted = loss * weight
                roots.append(counted if step.scale is None else step.scale(counted))
        if step.keep_outputs:
            step.withheld = getattr(result, "_withheld", ())
            step.outputs[microbatch] = map_tensors(complete(result), torch.Tensor.detach)
        return roots

    # -- backward --------------------------------------------------------------------------------------------------

    def _incoming(self, stage: int, microbatch: int) -> _Open:
        """The open forward, with the gradients of its roots; roots without one are left out."""
        opened = self._open[stage, microbatch]
        if stage < self.plan.stages - 1:
            gradients = self._take("B", stage + 1, stage, microbatch)
            pairs = [(r, g) for r, g in zip(opened.roots, gradients, strict=True) if g is not None]
            opened.roots = [root for root, _ in pairs]
            opened.gradients = [gradient for _, gradient in pairs]
        return opened

    def _outgoing(self, stage: int, microbatch: int, opened: _Open) -> None:
        if stage > 0:
            self._give("B", stage, stage - 1, microbatch, [leaf.grad for leaf in opened.leaves])

    def _backward(self, stage: int, microbatch: int, step: Step) -> None:
        opened = self._incoming(stage, microbatch)
        if opened.roots:
            torch.autograd.backward(opened.roots, opened.gradients)
        self._outgoing(stage, microbatch, opened)
        del self._open[stage, microbatch]

    def _backward_input(self, stage: int, microbatch: int, step: Step) -> None:
        """Only the gradient of what the stage received; the first stage has none, its whole backward is ``W``.

        Where activations are recomputed it is the whole backward: its halves would recompute them once more each.
        """
        opened = self._incoming(stage, microbatch)
        if opened.roots and self._recomputes:
            torch.autograd.backward(opened.roots, opened.gradients)
            opened.roots = []
        elif opened.roots and opened.leaves:
            opened.rest = backward_input(opened.roots, opened.gradients, opened.leaves)  # type: ignore[arg-type]
            opened.roots = []
        self._outgoing(stage, microbatch, opened)

    def _backward_weights(self, stage: int, microbatch: int, step: Step) -> None:
        opened = self._open.pop((stage, microbatch))
        if opened.rest is not None:
            backward_weights(opened.rest)
        elif opened.roots:
            torch.autograd.backward(opened.roots, opened.gradients)

    # -- between stages --------------------------------------------------------------------------------------------

    def _give(self, kind: str, stage: int, to: int, microbatch: int, value: Any) -> None:
        place = self.plan.rank_of[to]
        if place == self.rank:
            self._here[kind, to, microbatch] = map_tensors(value, _cut_graph)
        else:
            taker = Action("I" if kind == "B" and Action("I", to, microbatch) in self._turn else kind, to, microbatch)
            self.post.send(value, place, **self._how(kind, stage, to, microbatch), label=(place, self._turn[taker]))

    def _take(self, kind: str, origin: int, stage: int, microbatch: int) -> Any:
        place = self.plan.rank_of[origin]
        if place == self.rank:
            return self._here.pop((kind, stage, microbatch))
        value = self.post.receive(place, **self._how(kind, origin, stage, microbatch))
        giver = Action(
            "I" if kind == "B" and Action("I", origin, microbatch) in self._turn else kind, origin, microbatch
        )
        turn = self._turn[giver]  # what that rank took before is there
        self.post.forget(lambda label: label[0] == place and label[1] < turn)
        return value

    def _how(self, kind: str, origin: int, to: int, microbatch: int) -> dict[str, Any]:
        what = "output" if kind == "F" else "gradient"
        return {
            "way": "forward" if kind == "F" else "backward",
            "tag": 2 * to + (kind == "B"),
            "what": f"stage {origin}'s {what} of micro-batch {microbatch} (for stage {to})",
        }


def _entering(tensor: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """A received tensor for the model's use, which may work in place on it: no leaf. The leaf keeps no memory."""
    if not tensor.requires_grad:
        return tensor
    leaf = tensor
    leaves.append(leaf)
    inside = leaf.clone()
    leaf.data = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return inside


def _cut_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
