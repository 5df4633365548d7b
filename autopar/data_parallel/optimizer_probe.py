"""Test whether an optimizer is element-wise: step a copy of it on a small matrix, full and in halves.

A tensor-parallel rank holds shards of matrices. An element-wise optimizer steps them as one process steps the full
matrices. Any other one (Muon, Shampoo, LAMB, Adafactor, 8-bit blocks) has to get full matrices
(:mod:`autopar.data_parallel.whole_parameters`). One that takes statistics over several parameters (Prodigy,
D-Adaptation), or draws random numbers, needs all of them on every rank.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.data_parallel.precision import warn_of_fp16
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.guards.step import untried
from autopar.plan.plan import Plan

ELEMENTWISE = {
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam,
}  # fmt: skip
"""Classes that are known to be element-wise; a class that derives from one is tried as any other."""

_SHAPE = (128, 80)  # halves are large enough for optimizers that keep small tensors in fp32


@dataclass(frozen=True)
class Behaviour:
    """How an optimizer steps a matrix. Differences are relative to the largest update; 0.0 means the same.

    Attributes:
        in_parts: Difference where its halves are stepped by themselves.
        beside: Difference where another parameter is stepped, too.
        draws: Whether it draws random numbers, so that nothing can be said about the differences.
        keeps: Whether its state has statistics of the full matrix, which may move weights later.
    """

    in_parts: float = 0.0
    beside: float = 0.0
    draws: bool = False
    keeps: bool = False


_Known = dict[str, Behaviour | None]  # settings of a group, as text -> how an optimizer steps with them
_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
_of_class: defaultdict[type, _Known] = defaultdict(dict)  # of optimizers without attributes that others have not
_OF_ANY = vars(optim.SGD([nn.Parameter(torch.zeros(1))])).keys()
_PLAIN = (bool, int, float, str, tuple, type(None))


def stepping(
    optimizer: Optimizer,
    group: dict[str, Any],
    *,
    tp: int,
    stages: int,
    zero: int,
    whole: str = "",
    experts: int = 1,
    across: bool = False,
) -> str:
    """Return how a rank has to step the sharded parameters of a group, for steps as those of one process.

    ``parts``: its shards. ``owned``: full ones, each on one of the tensor-parallel ranks. ``duplicated``: full ones,
    all of them on each rank, as for statistics over all parameters and random numbers.

    Args:
        tp, stages: Sizes of the axes.
        zero: ZeRO stage.
        whole: Way of stepping full matrices, ``owned`` or ``duplicated``; empty: not supported.
        experts: Number of ranks over which experts are sharded, where these are more than ``tp``.
        across: Whether the config declares that it takes statistics over several parameters, which a trial of two
            may not show.

    Raises:
        ConfigError: no way is right.
    """
    name, alone = type(optimizer).__name__, max(tp, experts) == 1
    if isinstance(optimizer, optim.LBFGS) and (whole or max(tp, stages, experts) > 1):
        raise ConfigError(
            f"{name} is not supported with shards, with stages, or as optimizer= of autopar.initialize: it computes "
            "gradients inside of\n  step(closure), where they can neither be averaged, unscaled nor clipped.\n"
            "  Use an optimizer that needs no closure (AdamW, SGD, Muon ...)."
        )
    if (alone and stages == 1 and zero != 1) or type(optimizer) in ELEMENTWISE:
        return "parts"
    found = probe(optimizer, group)
    if found is None and not across:
        return "parts"
    found = found or Behaviour()
    sharded = f"tensor_parallel_size={tp}" if tp >= experts else f"expert_parallel_size={experts}"
    is_given = bool(whole) and zero != 3  # so that full matrices can be stepped
    if across or found.beside > 0:
        _refuse_across(name, found, "" if alone or is_given else sharded, stages, zero)
    if found.draws and experts > tp:
        raise ConfigError(
            f"{name} draws random numbers, others on each replica, and with {sharded} the ranks of several replicas "
            "step one model's experts.\n  Use an optimizer that draws none."
        )
    if alone or not (across or found.in_parts or found.beside or found.draws or found.keeps):
        return "parts"
    if is_given:
        return "duplicated" if across or found.beside or found.draws else whole
    if found.draws:
        return "parts"
    share = f"{100 * found.in_parts:.2g} %"
    fact = f"looks at whole matrices: the update of a matrix in two parts differs by {share} from that of the whole one"
    fact = fact if found.in_parts else "looks at whole matrices: its state has statistics of them"
    instead = (
        "Use zero.stage 1, where a rank steps whole matrices"
        if zero == 3
        else "Give it to autopar.initialize(model, config, optimizer=optimizer), which steps whole ones"
    )
    raise _refusal(
        f"{name} {fact}",
        sharded,
        f"{instead}; or use an optimizer that works element by element (AdamW, SGD, Adagrad ...).",
    )


def _refuse_across(name: str, found: Behaviour, sharded: str, stages: int, zero: int) -> None:
    """Raise where a rank does not step all parameters."""
    spread = [(sharded, bool(sharded)), (f"pipeline_parallel_size={stages}", stages > 1), ("zero.stage=1", zero == 1)]
    where = ", ".join(text for text, applies in spread if applies)
    if where:
        given = "With tensor_parallel_size alone, give it to autopar.initialize(..., optimizer=optimizer). "
        differs = f"the update of one differs by {100 * found.beside:.2g} % beside another one"
        raise _refusal(
            f"{name} takes statistics over all parameters: "
            f"{differs if found.beside else 'optimizer.across_parameters=true'}",
            where,
            f"{given * (stages == 1 and bool(sharded))}Use an optimizer that steps each parameter by itself (AdamW, "
            "SGD, Adagrad ...), or replicas without ZeRO.",
        )


def _refusal(fact: str, where: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{fact}.\n  With {where} a rank steps some of them, or shards, so the result would differ from one process.\n"
        f"  {instead}"
    )


def refuse_unlike(
    optimizer: Optimizer, held: Iterable[nn.Parameter], *, tp: int, stages: int, experts: int = 1
) -> None:
    """Raise where an optimizer that ``initialize`` was not given makes other steps than one process.

    Args:
        held: Parameters of the model; param groups without any are not looked at.
        tp, stages, experts: Sizes of the axes.

    Raises:
        ConfigError: a param group's settings make steps that are not element-wise, with ``tp`` above 1, or that
            depend on other parameters, with ``tp`` or ``stages`` above 1.
    """
    ids = {id(parameter) for parameter in held}
    for group in optimizer.param_groups:
        if not ids.isdisjoint(map(id, group["params"])):
            stepping(optimizer, group, tp=tp, stages=stages, zero=0, experts=experts)


def look_at_new(plan: Plan, mpu: MPU, optimizer: Optimizer, held: list[tuple[str, nn.Parameter]]) -> None:
    """Check an optimizer before its first step.

    Args:
        held: Names and parameters of the model that it steps.

    Raises:
        ConfigError: ``initialize`` was not given it, and it has state of full weights, or is not element-wise.
    """
    sharded = any(hasattr(parameter, "autopar_shard") for _, parameter in held)
    if sharded and any(probe(optimizer, group) is None for group in optimizer.param_groups):
        untried.add(optimizer)
    if hasattr(optimizer, "_autopar"):
        return
    local = [p for _, p in held if not isinstance(p, DTensor)]
    _refuse_full_state(optimizer, held, plan)
    refuse_unlike(optimizer, local, tp=mpu.tp.size, stages=mpu.pp.size, experts=mpu.shards.size)
    if mpu.is_master:
        warn_of_fp16(optimizer, local)


def _refuse_full_state(optimizer: Optimizer, held: Iterable[tuple[str, nn.Parameter]], plan: Plan) -> None:
    """Raise ConfigError if an optimizer has state from before the model was sharded."""
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


# -- the trial ---------------------------------------------------------------------------------------------------------


def probe(optimizer: Optimizer, group: dict[str, Any]) -> Behaviour | None:
    """Return how an optimizer steps with the settings of a group; None if a copy of it cannot be tried.

    Nothing of the optimizer changes, nor the random generator.
    """
    if type(optimizer) in ELEMENTWISE:
        return Behaviour()
    settings = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
    is_plain = vars(optimizer).keys() <= _OF_ANY and all(isinstance(value, _PLAIN) for value in settings.values())
    known = _of_class[type(optimizer)] if is_plain else _known.setdefault(optimizer, {})
    if (key := repr(settings)) not in known:
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                known[key] = _tried(optimizer, group)
        except Exception:  # attributes that a copy has not, a closure that it wants, or whatever a step stumbles over
            known[key] = None
    return known[key]


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> Behaviour | None:
    """Step a matrix in full, its halves by themselves, and the matrix next to another parameter."""
    weight, gradients = _drawn()
    state = torch.get_rng_state()
    full = _Run(optimizer, group, [weight], [gradients])
    if not torch.equal(torch.get_rng_state(), state):
        return Behaviour(draws=True)
    if not full.update.any():
        return None  # it does not step such a matrix
    in_parts, keeps = 0.0, any(t.shape != weight.shape for t in full.tensors)
    for dim in (0, 1):
        halves = [
            _Run(optimizer, group, [part], [its])
            for part, its in zip(weight.chunk(2, dim), gradients.chunk(2, dim + 1), strict=True)
        ]
        difference = _difference(torch.cat([half.update for half in halves], dim), full.update)
        in_parts = max(in_parts, difference, *(half.difference_of(full.of_group, half.of_group) for half in halves))
        keeps = keeps or any(half.difference_of(full.of_state, half.of_state) for half in halves)
    if not in_parts and not keeps:
        return Behaviour()
    try:
        beside = _Run(optimizer, group, [weight, weight[:64, :40]], [gradients, gradients[:, :64, :40]])
    except Exception:  # an optimizer around another one, whose copy has the first parameter alone
        return Behaviour(in_parts, keeps=keeps)
    found = max(_difference(beside.update, full.update), full.difference_of(full.of_group, beside.of_group))
    return Behaviour(in_parts, found, keeps=keeps)


class _Run:
    """Step a copy of an optimizer that has not stepped.

    Attributes:
        update: Sum of its updates of the first parameter.
        tensors: Tensors of more than one element in the state of the first parameter.
        of_state, of_group: Numbers in its state, and in its group.
    """

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], weights: Sequence[torch.Tensor], gradients: Sequence[Any]
    ) -> None:
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        made = _fresh(optimizer, group, parameters)
        for turn in range(len(gradients[0])):
            for parameter, its in zip(parameters, gradients, strict=True):
                parameter.grad = its[turn].clone()
            type(optimizer).step(made)
        self.update = parameters[0].detach() - weights[0]
        state = made.state.get(parameters[0])
        kept = state if isinstance(state, dict) else {}
        self.tensors = [value for value in kept.values() if isinstance(value, torch.Tensor) and value.numel() > 1]
        self.of_state, self.of_group = _numbers(kept), _numbers(made.param_groups[0])

    @staticmethod
    def difference_of(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
        """Return the largest relative difference of numbers that both have."""
        return max((_difference(value, one[key]) for key, value in other.items() if key in one), default=0.0)


def _numbers(values: dict[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the numbers among these values; tensors of one element count."""
    found = {str(key): torch.as_tensor(x) for key, x in values.items() if isinstance(x, float | torch.Tensor)}
    return {key: x for key, x in found.items() if x.ndim == 0 and x.is_floating_point()}


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the difference relative to the largest number of ``other``; 0.0 if both are the same for torch."""
    if torch.allclose(one, other, equal_nan=True):
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp(min=torch.finfo(other.dtype).tiny))


def _drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix, and gradients, whose halves are of other sizes: where one is large the other is small.

    The gradients have one direction in common, along which estimates of a distance (Prodigy) grow.
    """
    generator = torch.Generator().manual_seed(0)
    rows, columns = (
        torch.where(torch.arange(size) < size // 2, 0.1, 3.0).view(shape)
        for size, shape in zip(_SHAPE, ((-1, 1), (1, -1)), strict=True)
    )
    weight = torch.randn(_SHAPE, generator=generator) * rows * columns
    drawn = torch.randn((5, *_SHAPE), generator=generator)
    return weight, (drawn[0] + drawn[1:]) / (rows * columns)


def _fresh(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy that has not stepped, with these parameters in one group; lists of its own hold the first."""
    settings = {name: value for name, value in group.items() if name != "params"}
    if isinstance(settings.get("lr"), int | float) and not settings["lr"]:  # of a warm-up
        settings["lr"] = settings.get("initial_lr") or 0.01
    if optimizer.state and type(optimizer)(parameters[:1], **optimizer.defaults).state:  # made with the optimizer
        made: Optimizer = type(optimizer)(parameters, **optimizer.defaults)
        made.param_groups[0].update(settings)
        return made
    memo: dict[int, Any] = {id(p): parameters[0] for each in optimizer.param_groups for p in each["params"]}
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):  # one inside, which it wraps; deepcopy would leave its own attributes out
            memo[id(value)] = _copied(value, memo)
    made = _copied(optimizer, memo)
    made.param_groups = [{**copy.deepcopy(settings, memo), "params": parameters}]
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
