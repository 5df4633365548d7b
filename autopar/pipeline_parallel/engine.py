"""The engine runs a schedule: forwards and backwards of this rank's stages, and the messages between them.

[Note: split backward] A split schedule computes first the gradients of what a stage received, later those of its
weights. The nodes of the graph from which something received can be reached are *on the way*. The first half runs along
them and notes the gradients that arrive at those with an edge to the side, to weights. The second half runs from there.
Edges that hang together by nodes beside the way (a weight that is used in several places, a table that all blocks add)
are one part of it, so that every gradient is counted once. A node with an edge to each side runs in both halves: a
function written in Python may use up what it saved, so with one of those the first half is the full backward, unless
that function says that it ``keeps_nothing``. Hooks of tensors on the way may run twice.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar.compat.tensors import forward_class
from autopar.distributed.autograd_functions import record
from autopar.distributed.rng import base_seed
from autopar.errors import ConfigError
from autopar.pipeline_parallel.batch_checks import Report, StepCount, digest_of
from autopar.pipeline_parallel.outputs import complete, unavailable
from autopar.pipeline_parallel.p2p import P2P, Message, map_tensors
from autopar.pipeline_parallel.schedule import Action
from autopar.pipeline_parallel.stage_forward import StageContext, StageForward, StageOutput, Streams, run_stage
from autopar.pipeline_parallel.stage_weights import TiedWeights
from autopar.plan.stages import StagePlan

_Gradients = tuple[torch.Tensor | None, ...]


@dataclass
class WeightGradients:
    """The second half of a backward pass, which is still to run.

    Attributes:
        parts: edges from which it starts, their gradients, and the weights that it reaches.
        arrived: gradients that arrived at nodes in the first half.
    """

    parts: list[tuple[list[GradientEdge], list[torch.Tensor], list[torch.Tensor]]]
    arrived: dict[Node, _Gradients]


def stage_backward_input(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None, leaves: Sequence[torch.Tensor]
) -> WeightGradients:
    """Add the gradients of ``leaves`` to their ``grad``; None stays where no root depends on one.

    Where the halves cannot be told apart also those of the weights, and nothing is left for the second half.

    Args:
        roots: what is differentiated.
        gradients: of the roots, each of its shape; None: the roots are scalars.
        leaves: tensors that require gradients and were not computed from others.
    """
    if gradients is None:
        gradients = [torch.ones_like(root) for root in roots]
    edges = [get_gradient_edge(root) for root in roots]
    graph, on_way, starts = way(edges, leaves)
    if any(runs_once(node) for node in starts):
        torch.autograd.backward(roots, gradients)
        return WeightGradients([], {})
    arrived: dict[Node, _Gradients] = {}

    def note(node: Node) -> Callable[..., None]:
        def hook(arriving: _Gradients) -> None:
            arrived[node] = arriving

        return hook

    handles = [node.register_prehook(note(node)) for node in starts]
    try:
        along = [place for place, edge in enumerate(edges) if edge.node in on_way]
        if along:
            found = torch.autograd.grad(
                [roots[place] for place in along],
                list(leaves),
                [gradients[place] for place in along],
                retain_graph=True,
                allow_unused=True,
            )
            for leaf, gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    finally:
        for handle in handles:
            handle.remove()

    sources = [
        (GradientEdge(node, number), gradient)
        for node, arriving in arrived.items()
        for number, gradient in enumerate(arriving)
        if gradient is not None
    ]
    sources += [(edge, g) for edge, g in zip(edges, gradients, strict=True) if edge.node not in on_way]
    return WeightGradients(_parts(graph, on_way, sources), arrived)


def stage_backward_weight(rest: WeightGradients) -> None:
    """Add the gradients of the weights to their ``grad``. Once for each :func:`stage_backward_input`."""
    while rest.parts:
        edges, gradients, weights = rest.parts.pop()
        # From one node of a part the way may lead to another one, where the gradients have arrived already.
        nodes = {edge.node for edge in edges} & rest.arrived.keys()
        handles = [node.register_prehook(partial(lambda arrived, _: arrived, rest.arrived[node])) for node in nodes]
        try:
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=weights)
        finally:
            for handle in handles:
                handle.remove()
    rest.arrived.clear()


def way(
    edges: Sequence[GradientEdge], leaves: Sequence[torch.Tensor]
) -> tuple[dict[Node, list[Node]], set[Node], list[Node]]:
    """Return the graph, its nodes on the way to ``leaves``, and those of them that have an edge to the side."""
    entries = {get_gradient_edge(leaf).node for leaf in leaves}
    graph = nodes(edge.node for edge in edges)
    on_way: set[Node] = set()
    for node, below in graph.items():
        if node in entries or not on_way.isdisjoint(below):
            on_way.add(node)
    return graph, on_way, [node for node in on_way if any(child not in on_way for child in graph[node])]


def runs_once(node: Node) -> bool:
    """Return whether a node may use up what its function saved."""
    return isinstance(node, BackwardCFunction) and not getattr(forward_class(node), "keeps_nothing", False)


def nodes(starts: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return every node that can be reached, with the next ones; these come before it."""
    found: dict[Node, list[Node]] = {}
    opened: dict[Node, list[Node]] = {}
    todo = list(starts)
    while todo:
        node = todo[-1]
        if node in found:
            todo.pop()
        elif node in opened:
            found[node] = opened[node]
            todo.pop()
        else:
            opened[node] = [child for child, _ in node.next_functions if child is not None]
            todo += [child for child in opened[node] if child not in opened]
    return found


def _parts(
    graph: dict[Node, list[Node]], on_way: set[Node], sources: list[tuple[GradientEdge, torch.Tensor]]
) -> list[tuple[list[GradientEdge], list[torch.Tensor], list[torch.Tensor]]]:
    """Sources that lead to the same weights together; all parts of several sources in one, which walks the way once."""
    heads: dict[Node, Node] = {}

    def head(node: Node) -> Node:
        while (above := heads.setdefault(node, node)) is not node:
            heads[node] = node = heads[above]
        return node

    for node, below in graph.items():
        for child in below:
            if child not in on_way:
                heads[head(child)] = head(node)
    weights: dict[Node, list[torch.Tensor]] = {}
    for node in graph:
        if node not in on_way and node.name() == "torch::autograd::AccumulateGrad":
            weights.setdefault(head(node), []).append(node.variable)  # type: ignore[attr-defined]
    parts: dict[Node, tuple[list[GradientEdge], list[torch.Tensor], list[torch.Tensor]]] = {}
    for edge, gradient in sources:
        if (at := head(edge.node)) in weights:
            part = parts.setdefault(at, ([], [], weights[at]))
            part[0].append(edge)
            part[1].append(gradient)
    several = [part for part in parts.values() if len({edge.node for edge in part[0]}) > 1]
    single = [part for part in parts.values() if len({edge.node for edge in part[0]}) == 1]
    joined = tuple(list(itertools.chain.from_iterable(each)) for each in zip(*several, strict=True))
    return [*single, joined] if several else single  # type: ignore[list-item]


_FIRST, _EVERY = 3, 10  # passes before which copies of weights are compared
_NAMES = {"F": "forward", "B": "backward", "I": "backward to its input", "W": "backward to its weights"}


@dataclass
class Step:
    """Work of one pass of a schedule, and its results.

    Attributes:
        microbatches: arguments of the model, one dict each.
        weights: how much the loss of each counts in what is differentiated.
        loss_of: ``(outputs, inputs) -> loss``; None where no loss is wanted.
        scale: applied to what is differentiated (fp16 loss scaling).
        shares: how much the loss of each counts in that of the replica's batch.
        call: what is called with a micro-batch; None: the model.
        together: whether the replicas run collectives in a backward (ZeRO 2 and 3, experts), so that each runs it.
        required: whether some loss must require a gradient.
        penalty: of parameters, added to the loss of the batch.
        before_last: called with a stage before its last backward of the pass.
        losses, outputs: per micro-batch, filled on the last stage.
        penalties: of this stage's parameters.
        unavailable: entries that the outputs lack there.
    """

    microbatches: list[dict[str, Any]]
    weights: list[float]
    loss_of: Callable[[Any, dict[str, Any]], Any] | None
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    keep_outputs: bool = False
    backward: bool = True
    shares: list[float] = field(default_factory=list)
    call: Callable[..., Any] | None = None
    together: bool = False
    required: bool = False
    penalty: Callable[[dict[str, nn.Parameter]], Any] | None = None
    before_last: Callable[[int | None], None] | None = None
    penalties: torch.Tensor | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    unavailable: tuple[str, ...] = ()


@dataclass
class _OpenForward:
    """A forward whose backward is still to come: tensors received, tensors sent or differentiated, their gradients."""

    leaves: list[torch.Tensor]
    roots: list[torch.Tensor]
    gradients: list[torch.Tensor | None] | None = None
    rest: WeightGradients | None = None


class Engine:
    """Runs the actions of this rank on one model.

    Args:
        model: what is called with a micro-batch.
        context: of its stage boundaries.
        plan: its stages.
        tied: weights that several stages hold.
        check: compare batches, optimizer steps and copies of weights over the stages.
        released: ``id`` of the weights of other stages.
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
        self._passes = 0
        self._seed: int | None = None  # of this pass
        self._recomputes = False  # activations, in this pass's backward
        self._open: dict[tuple[int, int], _OpenForward] = {}
        self._here: dict[tuple[str, int, int], Any] = {}  # from a stage of this rank to another one of it
        self._turn: dict[Action, int] = {}  # every rank's actions -> their number in its list

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Begin a pass, on every rank: the batch is read and compared inside, actions run, gradients are averaged."""
        try:
            with self.p2p.one_pass():
                yield
        finally:
            if self.steps is not None:
                self.steps.end_pass()
            self._open, self._here = {}, {}

    def run(self, lists: Sequence[Sequence[Action]], step: Step) -> None:
        """Do all actions of this rank in order, inside :meth:`one_pass`; gradients are accumulated in the parameters.

        Args:
            lists: every rank's actions.

        Raises:
            PipelineError: another stage did not deliver, or failed at any point of the pass.
        """
        do = {"F": self._forward, "B": self._backward, "I": self._backward_input, "W": self._backward_weight}
        self._turn = {action: turn for row in lists for turn, action in enumerate(row)}
        self._recomputes = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        with base_seed(self.plan.stages > 1 and self.model.training) as self._seed:
            last = {action.stage: action for action in lists[self.rank] if action.kind != "F"}
            for action in lists[self.rank]:
                if step.before_last is not None and action == last.get(action.stage):
                    step.before_last(action.stage)
                with self._blame(action), record(_described, action):
                    do[action.kind](action.stage, action.microbatch, step)
            if step.required and step.losses:
                raise ConfigError(
                    "the loss of the batch does not require a gradient, expected a trained weight that it depends on\n"
                    "  Train some weights (requires_grad_(True)) that this batch uses; forward_only=True evaluates."
                )
            self.p2p.end_actions()

    def report(self, batch: Any, microbatches: int, *, backward: bool, whole: bool) -> Report:
        """Return what all stages compare before a pass.

        Args:
            whole: hash the batch whole.
        """
        if self.steps is None:
            return Report({})
        digests = digest_of(batch, whole=whole)
        if digests:
            digests["number of micro-batches"] = str(microbatches)
        number, self._passes = self._passes, self._passes + 1
        copies = self.tied.digests() if number < _FIRST or number % _EVERY == 0 else {}
        return Report(digests, self.steps.begin_pass(microbatches * backward), copies)

    def _blame(self, action: Action) -> Any:
        kind, stage, microbatch = action
        failures = self.p2p.failures
        collective = f"a collective in stage {stage}'s {_NAMES[kind]} of micro-batch {microbatch}"
        return failures.blame(collective, failures.mpu.tp_cp.ranks)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int, step: Step) -> None:
        plan = self.plan
        leaves: list[torch.Tensor] = []
        received: StageOutput | None = None
        seed = self._seed  # the first stage's counts: all draw alike in front of the blocks
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
        with torch.set_grad_enabled(step.backward):
            result = run_stage(forward, step.call or self.model, (), dict(inputs), finish)
        roots: list[torch.Tensor] = []
        if last:
            roots = self._finish(result, forward.loss, microbatch, step)
        else:
            map_tensors(result, lambda tensor: roots.append(tensor) if tensor.requires_grad else None)
            self._send("F", stage, stage + 1, microbatch, (result, seed))
        if step.backward:
            self._open[stage, microbatch] = _OpenForward(leaves, roots)

    def _finish(self, result: Any, loss: Any, microbatch: int, step: Step) -> list[torch.Tensor]:
        """The last stage's loss, as what is differentiated; nothing if no label of the micro-batch counts."""
        roots: list[torch.Tensor] = []
        if loss is not None:
            step.losses[microbatch] = loss.detach()
            weight = step.weights[microbatch]
            if step.backward and step.together and not loss.requires_grad:
                raise ConfigError(
                    f"the loss of micro-batch {microbatch} does not require a gradient, expected one on every replica: "
                    "they gather weights or exchange tokens in the backward\n  (zero.stage 2 and 3, experts over "
                    "replicas). Use zero.stage 1, or batches that all use a trained weight."
                )
            step.required &= not loss.requires_grad
            if step.backward and loss.requires_grad and (weight or step.together):
                if not weight:  # 0 / 0 of a loss over no label stays out of the gradients
                    map_tensors(result, lambda tensor: _stop_gradient(tensor) if tensor is not loss else None)
                counted = loss * weight
                roots.append(counted if step.scale is None else step.scale(counted))
        if step.keep_outputs:
            step.unavailable = unavailable(result)
            step.outputs[microbatch] = map_tensors(complete(result), torch.Tensor.detach)
        return roots

    # -- backward --------------------------------------------------------------------------------------------------

    def _incoming(self, stage: int, microbatch: int) -> _OpenForward:
        """The open forward, with the gradients of its roots; roots without one are left out."""
        opened = self._open[stage, microbatch]
        if stage < self.plan.stages - 1:
            gradients = self._receive("B", stage + 1, stage, microbatch)
            pairs = [(r, g) for r, g in zip(opened.roots, gradients, strict=True) if g is not None]
            opened.roots = [root for root, _ in pairs]
            opened.gradients = [gradient for _, gradient in pairs]
        return opened

    def _outgoing(self, stage: int, microbatch: int, opened: _OpenForward) -> None:
        if stage > 0:
            self._send("B", stage, stage - 1, microbatch, [leaf.grad for leaf in opened.leaves])

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
            opened.rest = stage_backward_input(opened.roots, opened.gradients, opened.leaves)  # type: ignore[arg-type]
            opened.roots = []
        self._outgoing(stage, microbatch, opened)

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
        self.p2p.release(place, self._turn_of(kind, origin, microbatch))  # what that rank received before this
        return value

    def _turn_of(self, kind: str, stage: int, microbatch: int) -> int:
        """The number of an action in its rank's list; a backward may be split."""
        split = Action("I", stage, microbatch)
        return self._turn[split if kind == "B" and split in self._turn else Action(kind, stage, microbatch)]


def _described(action: Action) -> str:
    kind, stage, microbatch = action
    return f"stage {stage}: {_NAMES[kind]} of micro-batch {microbatch}"


def _message(kind: str, origin: int, to: int, microbatch: int) -> Message:
    value = "output" if kind == "F" else "gradient"
    name = f"stage {origin}'s {value} of micro-batch {microbatch} (for stage {to})"
    return Message(name, 2 * to + (kind == "B"), backward=kind == "B")


def _entering(tensor: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """A received tensor for the model's use, which may work in place on it: no leaf. The leaf keeps no memory."""
    if not tensor.requires_grad:
        return tensor
    leaf = tensor
    leaves.append(leaf)
    inside = leaf.clone()
    leaf.data = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return inside


def _stop_gradient(tensor: torch.Tensor) -> None:
    if type(tensor) is torch.Tensor and tensor.grad_fn is not None:
        tensor.register_hook(torch.zeros_like)
