"""Decide how an optimizer steps shards: known element-wise classes at once, any other class by one trial.

An element-wise optimizer steps shards. One that depends on the full matrix (Muon, Shampoo, LAMB, Adafactor, 8-bit
blocks) steps full parameters (:mod:`autopar.data_parallel.whole_parameters`). One that takes statistics over several
parameters (Prodigy, D-Adaptation), or draws random numbers, steps all of them on every rank.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import Optimizer

from autopar.config import ParallelConfig
from autopar.errors import ConfigError

ELEMENTWISE = {
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam,
}  # fmt: skip
"""Classes that are known to be element-wise. A subclass is tried like any other class."""

_SHAPE = (128, 80)  # halves are large enough for optimizers that keep small tensors in fp32
_RATE = 0.01  # the smallest learning rate of a trial
_Run = tuple[torch.Tensor, dict[str, torch.Tensor], bool]
_known: weakref.WeakKeyDictionary[Optimizer, dict[str, str | None]] = weakref.WeakKeyDictionary()  # by settings


def stepping(optimizer: Optimizer, group: dict[str, Any], config: ParallelConfig, *, given: bool = True) -> str:
    """Return how a rank has to step the sharded parameters of a group so that the result is that of one process.

    ``parts``: its shards. ``owned``: full parameters, each on one of the tensor-parallel ranks. ``duplicated``: all
    full parameters on each rank. ``sharded``: shards, except for Muon's directions.

    Args:
        given: Whether ``initialize`` gets the optimizer, so that full parameters can be stepped.

    Raises:
        ConfigError: the result would differ from that of one process.
    """
    tp, stages, experts = config.tensor_parallel_size, config.pipeline_parallel_size, config.expert_parallel_size
    name, alone, zero = type(optimizer).__name__, max(tp, experts) == 1, given and config.zero_stage == 1
    if isinstance(optimizer, optim.LBFGS) and (given or not alone or stages > 1):
        raise ConfigError(
            f"{name} is not supported with shards, with stages, or as optimizer= of autopar.initialize: it computes "
            "gradients inside of\n  step(closure), where they can neither be averaged, unscaled nor clipped.\n"
            "  Use an optimizer that needs no closure (AdamW, SGD, Muon ...)."
        )
    if (alone and stages == 1 and not zero) or type(optimizer) in ELEMENTWISE:
        return "parts"
    across, gathers = given and config.optimizer_across_parameters, given and not config.fully_sharded
    found = "across" if across else probe(optimizer, group)
    sharded = where = f"tensor_parallel_size={tp}" if tp >= experts else f"expert_parallel_size={experts}"
    if found == "across":
        spread = {sharded: not (alone or gathers), f"pipeline_parallel_size={stages}": stages > 1, "zero.stage=1": zero}
        where = ", ".join(text for text, applies in spread.items() if applies)
        if across and not where:
            return "duplicated"
        fact, where = f"{name} takes statistics over all parameters", where or sharded
        instead = "Use an optimizer that steps each parameter by itself (AdamW, SGD, Adagrad ...), or replicas alone"
        if stages == 1 and config.zero_stage == 0:
            instead = "Write optimizer: {across_parameters: true} in the config, and give it to autopar.initialize"
    elif found == "random" and experts > tp:
        raise ConfigError(
            f"{name} draws random numbers, others on each replica, and with {sharded} the ranks of several replicas "
            "step one model's experts.\n  Use an optimizer that draws none."
        )
    elif alone or found in (None, "parts") or (found == "random" and not gathers):
        return "parts"
    elif gathers:
        return "duplicated" if found == "random" else config.optimizer_whole
    else:
        fact = f"{name} looks at whole matrices: its steps of a matrix in two parts differ from that of the whole one"
        instead = "Give it to autopar.initialize(model, config, optimizer=optimizer), which steps whole ones"
        instead = "Use zero.stage 1, where a rank steps whole matrices" if config.fully_sharded else instead
        instead += "; or use an optimizer that works element by element (AdamW, SGD, Adagrad ...)"
    raise ConfigError(
        f"{fact}.\n  With {where} a rank steps some of them, or shards, so the result would differ from one process.\n"
        f"  {instead}."
    )


def refuse_unlike(optimizer: Optimizer, held: Iterable[nn.Parameter], config: ParallelConfig) -> None:
    """Raise ConfigError if an optimizer that ``initialize`` did not get would not step as on one process.

    Args:
        held: The model's parameters; param groups without any of them are skipped.
    """
    ids = set(map(id, held))
    for group in optimizer.param_groups:
        if not ids.isdisjoint(map(id, group["params"])):
            stepping(optimizer, group, config, given=False)


# -- the trial ---------------------------------------------------------------------------------------------------------


def probe(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return what a step with the settings of a group depends on; None if a copy of the optimizer cannot be tried.

    ``parts``: each element by itself. ``matrices``: the full matrix. ``across``: several parameters. ``random``: random
    numbers. Neither the optimizer nor the random generator changes.
    """
    if type(optimizer) in ELEMENTWISE:
        return "parts"
    key = repr({name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")})
    known = _known.setdefault(optimizer, {})
    if key not in known:
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                known[key] = _tried(optimizer, group)
        except Exception:  # an attribute that the copy lacks, a missing closure, or any other error of a step
            known[key] = None
    return known[key]


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Step a matrix in full, in halves along each dim, and next to another parameter.

    One half is large and the other one small. The gradients have one direction in common, along which estimates of a
    distance (Prodigy) grow.
    """
    rows, columns = (torch.where(torch.arange(size) < size // 2, 0.1, 3.0) for size in _SHAPE)
    scale = rows[:, None] * columns
    drawn = torch.randn((6, *_SHAPE), generator=torch.Generator().manual_seed(0))
    trial = torch.cat([drawn[:1] * scale, (drawn[1] + drawn[2:]) / scale])  # the weight, then a gradient for each step
    state = torch.get_rng_state()
    full = _run(optimizer, group, trial)
    if not torch.equal(torch.get_rng_state(), state):
        return "random"
    if not full[0].any():
        return None  # it does not step such a matrix
    if full[2] and all(_same(full, [_run(optimizer, group, x) for x in trial.chunk(2, dim)], dim) for dim in (-2, -1)):
        return "parts"
    with suppress(Exception):  # the copy of a wrapped optimizer has the first parameter only
        if not _same(full, [_run(optimizer, group, trial, trial[:, :64, :40])]):
            return "across"
    return "matrices"


def _same(full: _Run, parts: Sequence[_Run], dim: int = 0) -> bool:
    """Return whether the updates of parts are that of the full matrix, and the numbers that they keep, too."""
    pairs = [(numbers[key], full[1][key]) for _, numbers, _ in parts for key in numbers.keys() & full[1].keys()]
    pairs.append((torch.cat([update for update, _, _ in parts], dim), full[0]))
    return all(torch.allclose(one, other, equal_nan=True) for one, other in pairs)


def _run(optimizer: Optimizer, group: dict[str, Any], *trials: torch.Tensor) -> _Run:
    """Step a copy of the optimizer on one parameter per trial.

    Returns:
        The first parameter's update, the numbers in its state and group, and whether its other state has its shape.
    """
    parameters = [nn.Parameter(trial[0].clone()) for trial in trials]
    made = _fresh(optimizer, group, parameters)
    for step in range(1, len(trials[0])):
        for parameter, trial in zip(parameters, trials, strict=True):
            parameter.grad = trial[step].clone()
        type(optimizer).step(made)
    state: Any = made.state.get(parameters[0])
    state = {f"state.{key}": value for key, value in state.items()} if isinstance(state, dict) else {}
    values = {**made.param_groups[0], **state}
    numbers = {key: torch.as_tensor(x) for key, x in values.items() if isinstance(x, float | torch.Tensor)}
    numbers = {key: x for key, x in numbers.items() if x.ndim == 0 and x.is_floating_point()}
    tensors = [x for x in state.values() if isinstance(x, torch.Tensor) and x.numel() > 1]
    update = parameters[0].detach() - trials[0][0]
    return update, numbers, all(x.shape == update.shape for x in tensors)


def _fresh(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy that has not stepped, with these parameters in one group; other lists of it hold the first one."""
    settings = {name: value for name, value in group.items() if name != "params"}
    rate = settings.get("lr")
    if isinstance(rate, int | float) and rate < _RATE:  # small ones, of a warm-up for instance, hide differences
        settings["lr"] = _RATE
    with suppress(TypeError):  # defaults may lack arguments of the class, which then makes no state when it is built
        if optimizer.state and (made := type(optimizer)(parameters, **optimizer.defaults)).state:
            made.param_groups[0].update(settings)
            return made
    memo: dict[int, Any] = {id(p): parameters[0] for each in optimizer.param_groups for p in each["params"]}
    made = _copied(optimizer, memo)
    made.param_groups = [{**copy.deepcopy(settings, memo), "params": parameters}]
    return made


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy without state and hooks, with parameters from ``memo``. deepcopy would drop custom attributes."""
    made: Optimizer = memo.setdefault(id(optimizer), object.__new__(type(optimizer)))
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and id(value) not in memo:  # a wrapped optimizer
            _copied(value, memo)
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state")}  # a patched step
    hooks = {name: OrderedDict[int, Any]() for name in kept if name.startswith("_optimizer_")}
    vars(made).update({**copy.deepcopy({**kept, **hooks}, memo), "state": defaultdict(dict)})
    return made
