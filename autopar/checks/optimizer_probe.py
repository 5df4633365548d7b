"""Ask an optimizer how it works, not for its name: a copy of it steps a small matrix, whole and in parts.

A tensor-parallel rank holds parts of matrices. An optimizer that works element by element steps them as one process
steps the whole ones; one that looks at a whole matrix (Muon, Shampoo, LAMB, Adafactor, 8-bit blocks) does not. One that
takes statistics over several parameters (Prodigy, D-Adaptation) needs all of them on one rank.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.errors import ConfigError
from autopar.plan.plan import Plan

__all__ = ["Behaviour", "probe", "refuse_unlike", "refuse_whole_state", "warn_of_fp16"]

_SHAPE = (128, 80)  # halves are large enough for optimizers that keep small tensors in fp32
_STEPS = 4
_SAME = 1e-3  # of the largest update: what the order of sums may change
_LR = 1e-2  # where a warm-up begins with 0
_Part = tuple[int, int, int, int]  # first row, last one, first column, last one


@dataclass(frozen=True)
class Behaviour:
    """How far the updates of a matrix are others, as a share of the largest, ``0.0`` for not at all.

    Attributes:
        in_parts: where its halves are stepped by themselves.
        beside: where another parameter is stepped, too.
    """

    in_parts: float
    beside: float


_log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, tuple, type(None))
_OF_TORCH = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "step", "_opt_called"}
_known: dict[tuple[type, str], Behaviour | None] = {}


def refuse_unlike(optimizer: Optimizer, held: Iterable[nn.Parameter], *, tp: int, stages: int, zero: int) -> None:
    """Raise where steps would be others than those of one process.

    Args:
        held: parameters of the model; param groups without any are not looked at.
        tp, stages: sizes of the axes.
        zero: stage.

    Raises:
        ConfigError: a param group's settings make steps that are not element by element, with ``tp`` above 1, or that
            depend on other parameters, with ``tp`` or ``stages`` above 1 or ZeRO-1.
    """
    ids = {id(parameter) for parameter in held}
    for group in optimizer.param_groups:
        if not any(id(parameter) in ids for parameter in group["params"]):
            continue
        found = probe(optimizer, group)
        if found is None:
            continue
        name = type(optimizer).__name__
        if tp > 1 and found.in_parts > 0:
            raise ConfigError(
                f"{name} looks at whole matrices: the update of a matrix in two parts differs by "
                f"{100 * found.in_parts:.2g} % from that of the whole one.\n"
                f"  With tensor_parallel_size={tp} a rank has parts, and its steps would be others than on one "
                "process.\n  Use an optimizer that works element by element (AdamW, SGD, Adagrad ...), or "
                "tensor_parallel_size 1: pipeline stages and replicas hold whole matrices."
            )
        spread = (
            [f"tensor_parallel_size={tp}"] * (tp > 1)
            + [f"pipeline_parallel_size={stages}"] * (stages > 1)
            + ["zero.stage=1"] * (zero == 1)
        )
        if spread and found.beside > 0:
            raise ConfigError(
                f"{name} takes statistics over all parameters: the update of one differs by {100 * found.beside:.2g} % "
                f"beside another one.\n  With {', '.join(spread)} a rank steps some of them, or parts, and its steps "
                "would be others than on one process.\n  Use an optimizer that steps each parameter by itself (AdamW, "
                "SGD, Adagrad ...), or replicas without ZeRO."
            )


def warn_of_fp16(optimizer: Optimizer, held: Iterable[nn.Parameter]) -> None:
    """Warn where an optimizer steps fp16 weights themselves: small updates are lost, and Adam's eps is 0."""
    if any(parameter.dtype == torch.float16 for parameter in held):
        name = type(optimizer).__name__
        _log.warning(
            "%s steps weights in float16, where updates below 1/2048 of a weight are lost and an eps of 1e-8 is 0: "
            "expect NaN.\n  Load the model in float32 and write precision: {dtype: fp16} in the configuration, with "
            "optimizer= of autopar.initialize: the optimizer then steps fp32 weights.",
            name,
        )


def probe(optimizer: Optimizer, group: dict[str, Any]) -> Behaviour | None:
    """Return how an optimizer steps with the settings of a group; None if a copy of it cannot be made to tell.

    Nothing of the optimizer changes, nor the random generator. The answer is kept for a class and its settings.
    """
    settings = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
    if not all(isinstance(value, _PLAIN) for value in (*settings.values(), *own.values())):
        return _tried(optimizer, group)  # a function of the user's, say: the next one may be another
    key = (type(optimizer), repr((settings, own)))
    if key not in _known:
        _known[key] = _tried(optimizer, group)
    return _known[key]


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> Behaviour | None:
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return _compared(lambda parts, seed=0: _trajectory(optimizer, group, parts, seed))
    except Exception:  # attributes that a copy has not, or whatever else a step stumbles over
        return None


def _compared(run: Callable[..., list[torch.Tensor] | None]) -> Behaviour | None:
    rows, columns = _SHAPE
    whole, again = run([(0, rows, 0, columns)]), run([(0, rows, 0, columns)], 1)
    if whole is None or again is None or not torch.equal(whole[0], again[0]):
        return None  # it does not step such a matrix, or draws: noise is another one for each shape
    halves = (
        [(0, rows // 2, 0, columns), (rows // 2, rows, 0, columns)],
        [(0, rows, 0, columns // 2), (0, rows, columns // 2, columns)],
    )
    in_parts = 0.0
    for dim, parts in enumerate(halves):
        stepped = [run([part]) for part in parts]
        if any(part is None for part in stepped):
            return None
        in_parts = max(in_parts, _difference(torch.cat([part[0] for part in stepped if part], dim), whole[0]))
    beside = run([(0, rows, 0, columns)] * 2)
    return None if beside is None else Behaviour(in_parts, _difference(beside[0], whole[0]))


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    share = float((one - other).abs().max() / other.abs().max())
    return share if not share <= _SAME else 0.0  # also where it is no number


def _trajectory(
    optimizer: Optimizer, group: dict[str, Any], parts: Sequence[_Part], seed: int
) -> list[torch.Tensor] | None:
    """Return the updates of parts of the matrix that one copy steps; None if the first does not move."""
    torch.default_generator.manual_seed(seed)  # that of the CPU, which is put back; a GPU's stays as it is
    weight, gradients = _drawn()
    parameters = [nn.Parameter(weight[a:b, c:d].clone()) for a, b, c, d in parts]
    fresh = _fresh(optimizer, group, parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    closures = _wants_closure(optimizer)  # each of whose steps is many
    for gradient in gradients[: 1 if closures else _STEPS]:
        for parameter, (a, b, c, d) in zip(parameters, parts, strict=True):
            parameter.grad = gradient[a:b, c:d].clone()
        step: Callable[..., Any] = type(optimizer).step
        step(fresh, *[_bowl(parameters)] * closures)
    updates = [p.detach() - was for p, was in zip(parameters, before, strict=True)]
    return updates if updates[0].abs().max() > 0 else None


def _wants_closure(optimizer: Optimizer) -> bool:
    """Return whether a step has to be given what computes the loss and the gradients, as in LBFGS."""
    taken = inspect.signature(type(optimizer).step).parameters.get("closure")
    return taken is not None and taken.default is inspect.Parameter.empty


def _bowl(parameters: Sequence[nn.Parameter]) -> Callable[[], torch.Tensor]:
    """Return a closure: a loss that begins with the gradients of these parameters, and bends unlike in each element."""
    begin = [(p.detach().clone(), torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters]

    def closure() -> torch.Tensor:
        losses = []
        for parameter, (place, slope) in zip(parameters, begin, strict=True):
            moved, bend = parameter.detach() - place, 1 + slope.square()
            parameter.grad = slope + bend * moved
            losses.append((slope * moved + bend * moved.square() / 2).sum())
        return torch.stack(losses).sum()

    return closure


def _drawn() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a matrix, and gradients, whose halves are of other sizes: where one is large the other is small."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (
        torch.where(torch.arange(size) < size // 2, 0.1, 3.0).view(shape)
        for size, shape in zip(_SHAPE, ((-1, 1), (1, -1)), strict=True)
    )
    weight = torch.randn(_SHAPE, generator=generator) * rows * columns
    return weight, [torch.randn(_SHAPE, generator=generator) / (rows * columns) for _ in range(_STEPS)]


def _fresh(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy that has not stepped, with these parameters in one group; lists of its own hold the first."""
    settings = {name: value for name, value in group.items() if name != "params"}
    if isinstance(settings.get("lr"), int | float) and not settings["lr"]:
        settings["lr"] = settings.get("initial_lr") or _LR
    made: Optimizer
    by_class = _wants_closure(optimizer)  # it keeps one flat list
    if by_class or (optimizer.state and type(optimizer)(parameters[:1], **optimizer.defaults).state):
        made = type(optimizer)(parameters, **optimizer.defaults)  # its state is made with it
        made.param_groups[0].update(settings)
        return made
    made = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(p): parameters[0] for each in optimizer.param_groups for p in each["params"]}
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):  # one inside, which it wraps
            memo[id(value.state)] = defaultdict(dict)
    attributes = {
        name: OrderedDict() if name.startswith("_optimizer_") else copy.deepcopy(value, memo)
        for name, value in vars(optimizer).items()
        if name not in ("step", "state", "param_groups")  # a scheduler's wrapper of the real one's step
    }
    copied = {**copy.deepcopy(settings, memo), "params": parameters}
    vars(made).update(attributes, state=defaultdict(dict), param_groups=[copied])
    return made


def refuse_whole_state(optimizer: torch.optim.Optimizer, held: Iterable[tuple[str, nn.Parameter]], plan: Plan) -> None:
    """Raise ConfigError if an optimizer that ``initialize`` was not given has state from before the model was sharded.

    Args:
        held: names and shards of what it steps.
    """
    for name, parameter in held:
        state = optimizer.state.get(parameter)
        due = plan.tensors.get(plan.canonical(name))
        whole = parameter.shape if due is None or isinstance(parameter, DTensor) else due.shape
        for key, value in state.items() if isinstance(state, dict) and tuple(parameter.shape) != tuple(whole) else ():
            if isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(whole):
                raise ConfigError(
                    f"{type(optimizer).__name__} has state of whole weights, and this rank has shards: {key} of {name} "
                    f"is {list(whole)}, the shard {list(parameter.shape)}.\n  It stepped before initialize: "
                    "model, optimizer = autopar.initialize(model, config, optimizer=optimizer) shards its state, too."
                )
