"""Find out how an optimizer has to step shards: known element-wise classes at once, any other class by one trial.

An element-wise optimizer steps shards as one process steps the full matrices. Any other one (Muon, Shampoo, LAMB,
Adafactor, 8-bit blocks) needs full matrices (:mod:`autopar.data_parallel.whole_parameters`). One that takes statistics
over several parameters (Prodigy, D-Adaptation), or draws random numbers, needs all of them on every rank. The trial
steps copies of the optimizer on a small matrix: in full, in halves, and next to another parameter.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
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
"""Classes that are known to be element-wise; a class that derives from one is tried as any other."""

_SHAPE = (128, 80)  # halves are large enough for optimizers that keep small tensors in fp32
_RATE = 0.01  # the smallest learning rate of a trial
_known: weakref.WeakKeyDictionary[Optimizer, dict[str, str | None]] = weakref.WeakKeyDictionary()  # by settings


def stepping(optimizer: Optimizer, group: dict[str, Any], config: ParallelConfig, *, given: bool = True) -> str:
    """Return how a rank has to step the sharded parameters of a group, for steps as those of one process.

    ``parts``: its shards. ``owned``: full ones, each on one of the tensor-parallel ranks. ``duplicated``: full ones,
    all of them on each rank, as for statistics over all parameters and random numbers. ``sharded``: as parts, but for
    Muon's directions.

    Args:
        given: Whether ``initialize`` is given the optimizer, so that full matrices can be stepped.

    Raises:
        ConfigError: no way is right.
    """
    tp, stages, experts = config.tensor_parallel_size, config.pipeline_parallel_size, config.expert_parallel_size
    zero, across = (config.zero_stage, config.optimizer_across_parameters) if given else (0, False)
    name, alone = type(optimizer).__name__, max(tp, experts) == 1
    if isinstance(optimizer, optim.LBFGS) and (given or max(tp, stages, experts) > 1):
        raise ConfigError(
            f"{name} is not supported with shards, with stages, or as optimizer= of autopar.initialize: it computes "
            "gradients inside of\n  step(closure), where they can neither be averaged, unscaled nor clipped.\n"
            "  Use an optimizer that needs no closure (AdamW, SGD, Muon ...)."
        )
    if (alone and stages == 1 and zero != 1) or type(optimizer) in ELEMENTWISE:
        return "parts"
    found = "across" if across else probe(optimizer, group)
    sharded = f"tensor_parallel_size={tp}" if tp >= experts else f"expert_parallel_size={experts}"
    given = given and zero != 3
    if found == "across":
        spread = {
            sharded: not (alone or given),
            f"pipeline_parallel_size={stages}": stages > 1,
            "zero.stage=1": zero == 1,
        }
        where = ", ".join(text for text, applies in spread.items() if applies)
        instead = "Use an optimizer that steps each parameter by itself (AdamW, SGD, Adagrad ...), or replicas alone"
        if stages == 1 and zero not in (1, 3):
            instead = "Write optimizer: {across_parameters: true} in the config, and give it to autopar.initialize"
        if where or not across:
            raise _refusal(f"{name} takes statistics over all parameters", where or sharded, instead)
    if found == "random" and experts > tp:
        raise ConfigError(
            f"{name} draws random numbers, others on each replica, and with {sharded} the ranks of several replicas "
            "step one model's experts.\n  Use an optimizer that draws none."
        )
    if alone or found in (None, "parts") or (found == "random" and not given):
        return "parts"
    if not given:
        instead = "Give it to autopar.initialize(model, config, optimizer=optimizer), which steps whole ones"
        raise _refusal(
            f"{name} looks at whole matrices: its steps of a matrix in two parts differ from that of the whole one",
            sharded,
            f"{'Use zero.stage 1, where a rank steps whole matrices' if zero == 3 else instead}; or use an optimizer "
            "that works element by element (AdamW, SGD, Adagrad ...)",
        )
    return "duplicated" if found in ("across", "random") else config.optimizer_whole


def _refusal(fact: str, where: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{fact}.\n  With {where} a rank steps some of them, or shards, so the result would differ from one process.\n"
        f"  {instead}."
    )


def refuse_unlike(optimizer: Optimizer, held: Iterable[nn.Parameter], config: ParallelConfig) -> None:
    """Raise ConfigError where an optimizer that ``initialize`` was not given makes other steps than one process.

    Args:
        held: Parameters of the model; param groups without any are not looked at.
    """
    ids = {id(parameter) for parameter in held}
    for group in optimizer.param_groups:
        if not ids.isdisjoint(map(id, group["params"])):
            stepping(optimizer, group, config, given=False)


# -- the trial ---------------------------------------------------------------------------------------------------------


def probe(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return how an optimizer steps with the settings of a group; None if a copy of it cannot be tried.

    ``parts``: element by element. ``matrices``: by the full matrix. ``across``: by several parameters. ``random``: it
    draws random numbers. Nothing of the optimizer changes, nor the random generator.
    """
    if type(optimizer) in ELEMENTWISE:
        return "parts"
    key = repr({name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")})
    known = _known.setdefault(optimizer, {})
    if key not in known:
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                known[key] = _tried(optimizer, group)
        except Exception:  # attributes that a copy has not, a closure that it wants, or whatever a step stumbles over
            known[key] = None
    return known[key]


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Step a matrix in full, its halves by themselves, and the matrix next to another parameter.

    The halves are of unlike sizes: where one is large the other is small. The gradients have one direction in common,
    along which estimates of a distance (Prodigy) grow.
    """
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.where(torch.arange(size) < size // 2, 0.1, 3.0) for size in _SHAPE)
    scale = rows[:, None] * columns
    weight, drawn = (torch.randn(shape, generator=generator) for shape in (_SHAPE, (5, *_SHAPE)))
    weight, gradients = weight * scale, (drawn[0] + drawn[1:]) / scale
    state = torch.get_rng_state()
    full, kept, by_element = _run(optimizer, group, [weight], [gradients])
    if not torch.equal(torch.get_rng_state(), state):
        return "random"
    if not full.any():
        return None  # it does not step such a matrix
    for dim in (0, 1):
        parts = zip(weight.chunk(2, dim), gradients.chunk(2, dim + 1), strict=True)
        halves = [_run(optimizer, group, [part], [its]) for part, its in parts]
        by_element &= torch.allclose(torch.cat([update for update, _, _ in halves], dim), full, equal_nan=True)
        by_element &= all(_agree(of_half, kept) for _, of_half, _ in halves)
    if by_element:
        return "parts"
    try:
        beside, of_both, _ = _run(optimizer, group, [weight, weight[:64, :40]], [gradients, gradients[:, :64, :40]])
    except Exception:  # an optimizer around another one, whose copy has the first parameter alone
        return "matrices"
    return "matrices" if torch.allclose(beside, full, equal_nan=True) and _agree(of_both, kept) else "across"


def _agree(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[key], other[key], equal_nan=True) for key in one.keys() & other.keys())


def _run(
    optimizer: Optimizer, group: dict[str, Any], weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], bool]:
    """Step a copy of an optimizer that has not stepped, once for each gradient.

    Returns:
        The first parameter's update, numbers in its state and group, and whether other state is all of its shape.
    """
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    made = _fresh(optimizer, group, parameters)
    for of_step in zip(*gradients, strict=True):
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(made)
    state: Any = made.state.get(parameters[0])
    state = {f"state.{key}": value for key, value in state.items()} if isinstance(state, dict) else {}
    values = {**made.param_groups[0], **state}
    numbers = {key: torch.as_tensor(x) for key, x in values.items() if isinstance(x, float | torch.Tensor)}
    numbers = {key: x for key, x in numbers.items() if x.ndim == 0 and x.is_floating_point()}
    tensors = [x for x in state.values() if isinstance(x, torch.Tensor) and x.numel() > 1]
    return parameters[0].detach() - weights[0], numbers, all(x.shape == weights[0].shape for x in tensors)


def _fresh(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy that has not stepped, with these parameters in one group; lists of its own hold the first."""
    settings = {name: value for name, value in group.items() if name != "params"}
    rate = settings.get("lr")
    if isinstance(rate, int | float) and rate < _RATE:  # small ones, of a warm-up for instance, hide differences
        settings["lr"] = _RATE
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
