"""Ask an optimizer how it works, not for its name: a copy of it steps a small matrix, whole and in parts.

A tensor-parallel rank holds parts of matrices. An optimizer that works element by element steps them as one process
steps the whole ones; one that looks at a whole matrix (Muon, Shampoo, LAMB, Adafactor, 8-bit blocks) does not, and has
to get whole ones (:mod:`autopar.data_parallel.whole_parameters`). One that takes statistics over several parameters
(Prodigy, D-Adaptation), or draws random numbers, needs all of them on one rank.
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

_SHAPE = (128, 80)  # halves are large enough for optimizers that keep small tensors in fp32
_STEPS = (4, 32)  # the second run sees what begins later: preconditioners after a warm-up, say
_LAST_BITS = 128  # in which two equal runs may differ: four in each of 32 steps
_SAME = 1e-3  # of the largest update: what the order of sums may change
_LR = 1e-2  # where a warm-up begins with 0
_Part = tuple[int, int, int, int]  # first row, last one, first column, last one


@dataclass(frozen=True)
class Behaviour:
    """How far the updates of a matrix are others, as a share of the largest, ``0.0`` for not at all.

    Numbers that it keeps in its groups count as updates: they tell of what moves weights later.

    Attributes:
        in_parts: where its halves are stepped by themselves.
        beside: where another parameter is stepped, too.
        draws: it draws random numbers, so that nothing can be said about the others.
        keeps: its state has numbers or tensors about the whole matrix, which may move weights later.
    """

    in_parts: float
    beside: float
    draws: bool = False
    keeps: bool = False


_log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, tuple, type(None))
SHOWN = ("loss_scale", "skipped_steps", "step_was_skipped", "gradient_norm")  # by autopar, on the user's optimizer
_NOT_OWN = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "step", "_opt_called", "_autopar", "scale_loss"}
_known: dict[tuple[type, str], Behaviour | None] = {}


def stepping(
    optimizer: Optimizer,
    group: dict[str, Any],
    *,
    tp: int,
    stages: int,
    zero: int,
    whole: str = "",
    experts: int = 1,
) -> str:
    """Return how a rank has to step the sharded parameters of a group, for steps as those of one process.

    ``parts``: its shards. ``owned``: whole ones, each on one of the tensor-parallel ranks. ``duplicated``: whole ones,
    all of them on each rank, as for statistics over all parameters and random numbers.

    Args:
        tp, stages: sizes of the axes.
        zero: stage.
        whole: ``owned`` or ``duplicated``, for optimizers that look at whole matrices; empty: they are refused.
        experts: ranks over which experts are sharded, where these are more than ``tp``.

    Raises:
        ConfigError: no way is right.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS) and (whole or max(tp, stages, experts) > 1):
        raise ConfigError(
            f"{name} is not supported with shards, with stages, or as optimizer= of autopar.initialize: it computes "
            "gradients inside of\n  step(closure), where they can neither be averaged, unscaled nor clipped.\n"
            "  Use an optimizer that needs no closure (AdamW, SGD, Muon ...)."
        )
    found = probe(optimizer, group)
    if found is None:
        return "parts"
    sharded = f"tensor_parallel_size={tp}" if tp >= experts else f"expert_parallel_size={experts}"
    alone = max(tp, experts) == 1
    if found.beside > 0:
        _refuse_beside(name, found, "" if alone or (whole and zero != 3) else sharded, stages, zero)
    if found.draws and experts > tp:
        raise ConfigError(
            f"{name} draws random numbers, others on each replica, and with {sharded} the ranks of several replicas "
            "step one model's experts.\n  Use an optimizer that draws none."
        )
    if alone or not (found.in_parts or found.beside or found.draws or found.keeps):
        return "parts"
    if found.in_parts > 0 and (not whole or zero == 3):
        raise ConfigError(_whole_text(name, found, sharded, zero))
    if not whole or zero == 3:
        return "parts"
    return "duplicated" if found.beside or found.draws else whole


def _whole_text(name: str, found: Behaviour, sharded: str, zero: int) -> str:
    instead = (
        "Use zero.stage 1, where a rank steps whole matrices; an"
        if zero == 3
        else "Give it to autopar.initialize(model, config, optimizer=optimizer), which steps whole ones; or use an"
    )
    return (
        f"{name} looks at whole matrices: the update of a matrix in two parts differs by "
        f"{100 * found.in_parts:.2g} % from that of the whole one.\n"
        f"  With {sharded} a rank has parts, and its steps would be others than on one process.\n"
        f"  {instead} optimizer that works element by element (AdamW, SGD, Adagrad ...)."
    )


def _refuse_beside(name: str, found: Behaviour, sharded: str, stages: int, zero: int) -> None:
    spread = (
        [sharded] * bool(sharded) + [f"pipeline_parallel_size={stages}"] * (stages > 1) + ["zero.stage=1"] * (zero == 1)
    )
    if spread:
        given = " With tensor_parallel_size alone, give it to autopar.initialize(..., optimizer=optimizer)." * (
            stages == 1 and bool(sharded)
        )
        raise ConfigError(
            f"{name} takes statistics over all parameters: the update of one differs by {100 * found.beside:.2g} % "
            f"beside another one.\n  With {', '.join(spread)} a rank steps some of them, or parts, and its steps "
            f"would be others than on one process.\n {given} Use an optimizer that steps each parameter by itself "
            "(AdamW, SGD, Adagrad ...), or replicas without ZeRO."
        )


def refuse_unlike(
    optimizer: Optimizer, held: Iterable[nn.Parameter], *, tp: int, stages: int, experts: int = 1
) -> None:
    """Raise where an optimizer that ``initialize`` was not given makes other steps than one process.

    Args:
        held: parameters of the model; param groups without any are not looked at.
        tp, stages, experts: sizes of the axes.

    Raises:
        ConfigError: a param group's settings make steps that are not element by element, with ``tp`` above 1, or that
            depend on other parameters, with ``tp`` or ``stages`` above 1.
    """
    ids = {id(parameter) for parameter in held}
    for group in optimizer.param_groups:
        if any(id(parameter) in ids for parameter in group["params"]):
            stepping(optimizer, group, tp=tp, stages=stages, zero=0, experts=experts)


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
    own = {name: value for name, value in vars(optimizer).items() if name not in _NOT_OWN.union(SHOWN)}
    if not all(isinstance(value, _PLAIN) for value in (*settings.values(), *own.values())):
        return _tried(optimizer, group)  # a function of the user's, say: the next one may be another
    key = (type(optimizer), repr((settings, own)))
    if key not in _known:
        _known[key] = _tried(optimizer, group)
    return _known[key]


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> Behaviour | None:
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            found = None
            for steps in _STEPS:
                found = _compared(lambda parts, seed=0, n=steps: _trajectory(optimizer, group, parts, seed, n))
                if found is not None and (found.in_parts or found.beside or found.draws):
                    break
            return found
    except Exception:  # attributes that a copy has not, or whatever else a step stumbles over
        return None


@dataclass(frozen=True)
class _Run:
    """The run of one copy: the update of its first parameter, and the numbers that it keeps.

    Attributes:
        numbers: those in the first parameter's state.
        of_group: those in its group.
        apart: whether the state has tensors of another shape than the parameter.
    """

    update: torch.Tensor
    numbers: dict[str, float]
    of_group: dict[str, float]
    apart: bool

    def differs(self, other: _Run, update: torch.Tensor | None = None) -> float:
        """Return how far another one's update is from this one's, or a number that both keep in their groups."""
        found = _difference(other.update if update is None else update, self.update)
        return max(found, _numbers_apart(self.of_group, other.of_group))


def _compared(run: Callable[..., _Run | None]) -> Behaviour | None:
    rows, columns = _SHAPE
    whole, again = run([(0, rows, 0, columns)]), run([(0, rows, 0, columns)], 1)
    if whole is None or again is None:
        return None  # it does not step such a matrix
    least = _LAST_BITS * torch.finfo(torch.float32).eps * (_drawn(1)[0].abs() + whole.update.abs().max())
    if not ((whole.update - again.update).abs() <= least).all():
        return Behaviour(0.0, 0.0, draws=True)  # noise is another one for each shape
    halves = (
        [(0, rows // 2, 0, columns), (rows // 2, rows, 0, columns)],
        [(0, rows, 0, columns // 2), (0, rows, columns // 2, columns)],
    )
    in_parts, keeps = 0.0, whole.apart
    for dim, parts in enumerate(halves):
        stepped = [run([part]) for part in parts]
        if any(part is None for part in stepped):
            return None
        found = [part for part in stepped if part is not None]
        update = torch.cat([part.update for part in found], dim)
        keeps = keeps or any(_numbers_apart(whole.numbers, part.numbers) for part in found)
        in_parts = max(in_parts, whole.differs(found[0], update))
    try:
        beside = run([(0, rows, 0, columns), (0, rows // 2, 0, columns // 2)])
    except Exception:  # one around another, whose copy has the first parameter alone: what is known counts
        beside = None
    if beside is None:
        return Behaviour(in_parts, 0.0, keeps=keeps) if in_parts or keeps else None
    return Behaviour(in_parts, whole.differs(beside), keeps=keeps)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    share = float((one - other).abs().max() / other.abs().max())
    return share if not share <= _SAME else 0.0  # also where it is no number


def _numbers_apart(one: dict[str, float], other: dict[str, float]) -> float:
    pairs = [(value, other.get(key, value)) for key, value in one.items()]
    return max((min(abs(a - b) / abs(a), 1.0) for a, b in pairs if abs(a - b) > _SAME * abs(a) > 0), default=0.0)


def _numbers(values: dict[Any, Any]) -> dict[str, float]:
    """Return the numbers among these values; tensors of one element count."""
    found = {key: value for key, value in values.items() if isinstance(value, float)}
    single = {k: v for k, v in values.items() if isinstance(v, torch.Tensor) and v.ndim == 0 and v.is_floating_point()}
    return {str(key): value for key, value in found.items()} | {str(key): float(v) for key, v in single.items()}


def _trajectory(
    optimizer: Optimizer, group: dict[str, Any], parts: Sequence[_Part], seed: int, steps: int
) -> _Run | None:
    """Step parts of the matrix with one copy; None if the first does not move."""
    torch.default_generator.manual_seed(seed)  # that of the CPU, which is put back; a GPU's stays as it is
    closures = _wants_closure(optimizer)  # each of whose steps is many
    weight, gradients = _drawn(1 if closures else steps)
    parameters = [nn.Parameter(weight[a:b, c:d].clone()) for a, b, c, d in parts]
    fresh = _fresh(optimizer, group, parameters)
    first = parameters[0]
    before = first.detach().clone()
    for gradient in gradients:
        for parameter, (a, b, c, d) in zip(parameters, parts, strict=True):
            parameter.grad = gradient[a:b, c:d].clone()
        step: Callable[..., Any] = type(optimizer).step
        step(fresh, *[_bowl(parameters)] * closures)
    update = first.detach() - before
    state = fresh.state.get(first)
    kept = state if isinstance(state, dict) else {}
    apart = any(isinstance(v, torch.Tensor) and v.numel() > 1 and v.shape != first.shape for v in kept.values())
    settings = {key: value for key, value in fresh.param_groups[0].items() if key != "params"}
    run = _Run(update, _numbers(kept), _numbers(settings), apart and not closures)
    return run if update.abs().max() > 0 else None


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


def _drawn(steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a matrix, and gradients, whose halves are of other sizes: where one is large the other is small.

    The gradients have one direction in common, along which estimates of a distance (Prodigy) grow.
    """
    generator = torch.Generator().manual_seed(0)
    rows, columns = (
        torch.where(torch.arange(size) < size // 2, 0.1, 3.0).view(shape)
        for size, shape in zip(_SHAPE, ((-1, 1), (1, -1)), strict=True)
    )
    weight = torch.randn(_SHAPE, generator=generator) * rows * columns
    common = torch.randn(_SHAPE, generator=generator)
    drawn = [torch.randn(_SHAPE, generator=generator) for _ in range(steps)]
    return weight, [(common + each) / (rows * columns) for each in drawn]


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
        if isinstance(value, Optimizer):  # one inside, which it wraps; deepcopy would leave its own attributes out
            memo[id(value)] = _copied(value, memo)
    attributes = {
        name: OrderedDict() if name.startswith("_optimizer_") else copy.deepcopy(value, memo)
        for name, value in vars(optimizer).items()
        if name not in ("step", "state", "param_groups")  # a scheduler's wrapper of the real one's step
    }
    copied = {**copy.deepcopy(settings, memo), "params": parameters}
    vars(made).update(attributes, state=defaultdict(dict), param_groups=[copied])
    return made


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy of an optimizer that has not stepped, with the parameters that ``memo`` has."""
    made: Optimizer = object.__new__(type(optimizer))
    attributes = {
        name: OrderedDict() if name.startswith("_optimizer_") else copy.deepcopy(value, memo)
        for name, value in vars(optimizer).items()
        if name not in ("step", "state")  # a scheduler's wrapper of the real one's step
    }
    vars(made).update(attributes, state=defaultdict(dict))
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
