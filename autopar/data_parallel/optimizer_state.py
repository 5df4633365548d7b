"""Check an optimizer made before ``initialize``, detect how it must step shards, and shard its state.

Element-wise classes step shards. An unknown class is tested once. A class that depends on the full matrix (Muon,
Shampoo, LAMB, Adafactor, 8-bit blocks) steps full parameters (:mod:`autopar.data_parallel.whole_parameters`). A class
that computes statistics over parameters (Prodigy, D-Adaptation), or draws random numbers, steps all full parameters on
every rank.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.config import ParallelConfig
from autopar.data_parallel.whole_parameters import fused
from autopar.errors import ConfigError
from autopar.guards.step import untried
from autopar.plan.plan import Plan

ELEMENTWISE = {
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam,
}  # fmt: skip
"""Classes that are known to be element-wise. A subclass is tested like an unknown class."""

_SHAPE = (128, 80)  # halves are large enough for optimizers that keep small tensors in fp32
_RATE = 0.01  # the smallest learning rate of a test
_Run = tuple[torch.Tensor, dict[str, torch.Tensor], bool]
_known: weakref.WeakKeyDictionary[Optimizer, dict[str, str | None]] = weakref.WeakKeyDictionary()  # by settings


def stepping(optimizer: Optimizer, group: dict[str, Any], config: ParallelConfig, *, given: bool = True) -> str:
    """Return how a rank must step the sharded parameters of a group. Raise if no way gives the result of one process.

    ``parts``: its shards. ``owned``: full parameters, each on one of the tensor-parallel ranks. ``duplicated``: all
    full parameters on each rank. ``sharded``: shards, with Muon's update directions gathered.

    Args:
        given: True if ``initialize`` receives the optimizer, so that full parameters can be stepped.
    """
    tp, stages, experts = config.tensor_parallel_size, config.pipeline_parallel_size, config.expert_parallel_size
    name, alone, zero = type(optimizer).__name__, max(tp, experts) == 1, given and config.zero_stage == 1
    if isinstance(optimizer, optim.LBFGS) and (given or not alone or stages > 1):
        raise ConfigError(
            f"{name} is not supported with shards, with stages, or as optimizer= of autopar.initialize\n"
            "  Use an optimizer without a closure (AdamW, SGD, Muon ...): gradients inside of step(closure) cannot be "
            "averaged,\n  unscaled or clipped."
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
        fact, where = f"{name} computes statistics over all parameters", where or sharded
        instead = "Use an optimizer without them (AdamW, SGD, Adagrad ...), or only replicas"
        if stages == 1 and config.zero_stage == 0:
            instead = "Write optimizer: {across_parameters: true} in the config, and pass it to autopar.initialize"
    elif found == "random" and experts > tp:
        raise ConfigError(
            f"{name} draws random numbers, which differ between replicas, and is not supported with {sharded}, where "
            "replicas share experts.\n  Use an optimizer without random numbers."
        )
    elif alone or found in (None, "parts") or (found == "random" and not gathers):
        return "parts"
    elif gathers:
        return "duplicated" if found == "random" else config.optimizer_full_matrix
    else:
        fact = f"{name} depends on full matrices: a step of two halves differs from a step of the full matrix"
        instead = "Pass it to autopar.initialize(model, config, optimizer=optimizer), which steps full matrices"
        instead = "Use zero.stage 1, where a rank steps full matrices" if config.fully_sharded else instead
        instead += "; or use an element-wise optimizer (AdamW, SGD, Adagrad ...)"
    raise ConfigError(
        f"{fact}.\n  With {where} a rank steps only some parameters, or shards, so the result would differ from one "
        f"process.\n  {instead}."
    )


def refuse_unlike(optimizer: Optimizer, held: Iterable[nn.Parameter], config: ParallelConfig) -> None:
    """Raise ConfigError if an optimizer that ``initialize`` did not receive would step ``held`` unlike one process."""
    ids = set(map(id, held))
    for group in optimizer.param_groups:
        if not ids.isdisjoint(map(id, group["params"])):
            stepping(optimizer, group, config, given=False)


# -- the test of a class -----------------------------------------------------------------------------------------------


def probe(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Classify the step of a group; None if a copy of the optimizer cannot be tested.

    ``parts``: element-wise. ``matrices``: depends on the full matrix. ``across``: depends on several parameters.
    ``random``: draws random numbers.
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
    """Step a matrix in full, in halves of small and of large values along each dim, and next to another parameter.

    The gradients have a common direction, so that distance estimates (Prodigy) grow.
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
    """Return whether the parts have the updates and the 0-dim state of the full matrix."""
    pairs = [(numbers[key], full[1][key]) for _, numbers, _ in parts for key in numbers.keys() & full[1].keys()]
    pairs.append((torch.cat([update for update, _, _ in parts], dim), full[0]))
    return all(torch.allclose(one, other, equal_nan=True) for one, other in pairs)


def _run(optimizer: Optimizer, group: dict[str, Any], *trials: torch.Tensor) -> _Run:
    """Step a copy. Return the first parameter's update, its 0-dim state, and whether its other state has its shape."""
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
    """Return a copy without steps whose group has these parameters; other lists of the copy hold the first one."""
    settings = {name: value for name, value in group.items() if name != "params"}
    rate = settings.get("lr")
    if isinstance(rate, int | float) and rate < _RATE:  # a small one, such as in a warm-up, hides differences
        settings["lr"] = _RATE
    with suppress(TypeError):  # defaults may lack arguments of the constructor
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


# -- the optimizer of ``initialize`` -----------------------------------------------------------------------------------


def check_optimizer(optimizer: Any, lr_scheduler: Any, model: nn.Module, config: ParallelConfig) -> list[list[str]]:
    """Return for each group of an optimizer how it is stepped, followed by the names of its parameters.

    Raises:
        ConfigError: The config needs an optimizer and there is none, it is not a torch optimizer, it has parameters of
            another model, its steps would differ from one process, or the scheduler drives another optimizer.
    """
    if optimizer is None:
        _refuse_without(config, lr_scheduler)
        return []
    if not isinstance(optimizer, torch.optim.Optimizer) or not getattr(type(optimizer).step, "hooked", False):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "_autopar"):
        raise ConfigError(f"this {type(optimizer).__name__} belongs to a parallelized model already\n  Make a new one.")
    if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError("lr_scheduler must drive the optimizer that is passed to initialize")
    if config.optimizer_split_fused:
        _refuse_unlike_muon(optimizer, "optimizer.split_fused=true", "Leave it out.")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        foreign = [parameter for parameter in group["params"] if id(parameter) not in names]
        if foreign:
            raise ConfigError(
                f"{len(foreign)} of {len(group['params'])} parameters in group {index} of {type(optimizer).__name__} "
                f"are not parameters of {type(model).__name__}; the first has shape {list(foreign[0].shape)}.\n"
                "  Make the optimizer from model.parameters() of the model that is passed to initialize."
            )
        how = check_group(optimizer, group, config) if group["params"] else ""
        groups.append([how, *(names[id(parameter)] for parameter in group["params"])])
    return groups


def check_group(optimizer: Any, group: dict[str, Any], config: ParallelConfig) -> str:
    """Return how a param group is stepped; raise ConfigError if ranks cannot step it like one process."""
    how = stepping(optimizer, group, config)
    if how == "sharded":
        instead = "Write optimizer: {full_matrix: owned}, which steps full matrices."
        _refuse_unlike_muon(optimizer, "optimizer.full_matrix=sharded", instead)
    if config.zero_optimizer_offload and how != "parts":
        raise ConfigError(
            f"zero.optimizer_offload is not supported with {type(optimizer).__name__}, which depends on full matrices\n"
            "  Leave zero.optimizer_offload out."
        )
    return how


def _refuse_unlike_muon(optimizer: Any, asked: str, instead: str) -> None:
    kind = type(optimizer)
    if kind is not torch.optim.Muon:
        raise ConfigError(
            f"{asked} supports only torch.optim.Muon, got {kind.__module__}.{kind.__qualname__}.\n  {instead}"
        )


def stepped_whole(optimizer: Any, config: ParallelConfig) -> set[int]:
    """Return the ``id`` of each parameter that is stepped as a full tensor."""
    sharded = max(config.tensor_parallel_size, config.expert_parallel_size) > 1
    groups = [group for group in optimizer.param_groups if group["params"]] if sharded else []
    whole = [group for group in groups if stepping(optimizer, group, config) not in ("parts", "sharded")]
    return {id(parameter) for group in whole for parameter in group["params"]}


def _refuse_without(config: ParallelConfig, lr_scheduler: Any) -> None:
    asked = [
        text
        for text, wanted in (
            (f"zero.stage={config.zero_stage}", config.zero_stage == 1),
            ("zero.optimizer_offload=true", config.zero_optimizer_offload),
            (f"precision.dtype={config.precision}", config.precision != "fp32" and not config.fully_sharded),
            (f"precision.dtype={config.precision}", config.precision == "fp16" and config.fully_sharded),
            ("optimizer.split_fused=true", config.optimizer_split_fused),
            (f"gradient_clipping={config.gradient_clipping:g}", config.gradient_clipping > 0),
            ("lr_scheduler", lr_scheduler is not None),
        )
        if wanted
    ]
    if asked:
        raise ConfigError(
            f"{', '.join(asked)} needs an optimizer, and initialize got none.\n"
            "  Call model, optimizer = autopar.initialize(model, config, optimizer=optimizer)."
        )


def check_state(optimizer: Any, model: nn.Module, plan: Plan, config: ParallelConfig) -> None:
    """Raise ConfigError if an optimizer's state cannot be sharded like the weights.

    That is, if there is state with ZeRO 2 or 3, state of a model on the meta device (except Adagrad's), or a state
    tensor of a sharded parameter with neither its shape nor one element. Also raise if ``optimizer.split_fused`` finds
    no fused matrix.
    """
    whole = stepped_whole(optimizer, config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if config.optimizer_split_fused:
        given = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        if not any(fused(plan.tensors[plan.canonical(name)]) for name in given):
            raise ConfigError(
                f"optimizer.split_fused=true needs a fused matrix (q | k | v, gate | up); none of the {len(given)} "
                f"matrices of this {type(optimizer).__name__} is fused.\n  Leave it out. Separate q, k and v (Llama) "
                "need no split, and q, k and v that alternate head by head (BLOOM, GPT-NeoX) are not split."
            )
    for parameter, entries in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:  # state that belongs to no parameter
            continue
        if config.fully_sharded and entries:
            raise ConfigError(
                f"{type(optimizer).__name__} must not have state before initialize with zero.stage "
                f"{config.zero_stage}; got state of {name}\n  Pass a new optimizer. A class that makes state when "
                "it is built (Adagrad) is not supported."
            )
        lost = next((key for key, value in entries.items() if isinstance(value, torch.Tensor) and value.is_meta), None)
        if lost is not None and not isinstance(optimizer, torch.optim.Adagrad):
            raise ConfigError(
                f"{type(optimizer).__name__} made '{lost}' of {name} from a model without values (lazy_init, "
                "from_pretrained(optimizer=)), so it has no values either.\n"
                "  Build the model in memory, or make the optimizer from the model that initialize returns."
            )
        layout = plan.tensors[plan.canonical(name)].layout
        if layout is None or id(parameter) in whole:
            continue
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != parameter.shape:
                raise ConfigError(
                    f"{type(optimizer).__name__} has stepped already, and its '{key}' of {name} cannot be sharded: "
                    f"expected shape {list(parameter.shape)}, got {list(value.shape)}.\n  Pass a new optimizer."
                )


def look_at_new(plan: Plan, config: ParallelConfig, optimizer: Any, held: list[tuple[str, nn.Parameter]]) -> None:
    """Check an optimizer that was not passed to ``initialize`` before its first step.

    Raises ConfigError if it has state of full weights, or is not element-wise.

    Args:
        held: The names and parameters of the model that it steps.
    """
    sharded = any(hasattr(parameter, "autopar_shard") for _, parameter in held)
    if sharded and any(probe(optimizer, group) is None for group in optimizer.param_groups):
        untried.add(optimizer)
    if hasattr(optimizer, "_autopar"):
        return
    local = [(name, p) for name, p in held if not isinstance(p, DTensor)]
    for name, parameter in local:
        state, due = optimizer.state.get(parameter), plan.tensors.get(plan.canonical(name))
        whole = parameter.shape if due is None else due.shape
        for key, value in state.items() if isinstance(state, dict) and tuple(parameter.shape) != tuple(whole) else ():
            if isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(whole):
                raise ConfigError(
                    f"{type(optimizer).__name__} has state of full weights: {key} of {name} must have the shape of the "
                    f"shard, {list(parameter.shape)}; got {list(whole)}.\n  Pass it to initialize, which shards its "
                    "state: model, optimizer = autopar.initialize(model, config, optimizer=optimizer)"
                )
    refuse_unlike(optimizer, [parameter for _, parameter in local], config)


def shard_state(optimizer: Any, names: Mapping[int, str], plan: Plan, rank: int, whole: set[int]) -> None:
    """Shard the state of each parameter like the parameter, and fill Adagrad's state on the meta device.

    Args:
        names: ``id(parameter)`` -> name.
        whole: The ``id`` of each parameter whose state stays full.
    """
    options = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter, entries in optimizer.state.items():
        if id(parameter) not in names:
            continue
        tensor = plan.tensors[plan.canonical(names[id(parameter)])]
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and (value.ndim or value.is_meta):
                sharded = tensor.layout is not None and value.shape == tensor.shape and id(parameter) not in whole
                shard = tensor.layout.shard(value, rank) if sharded and tensor.layout else value
                if value.is_meta:
                    first = options[id(parameter)]["initial_accumulator_value"] if key == "sum" else 0
                    shard = torch.full_like(shard, first, device=parameter.device)
                entries[key] = shard.to(parameter.device)


def keep_stage(optimizer: Any, model: nn.Module) -> None:
    """Keep only this pipeline stage's parameters in the optimizer's groups and state, in place.

    Empty groups stay, because schedulers count groups.
    """
    here = {id(parameter) for parameter in model.parameters()}
    gone = {p for group in optimizer.param_groups for p in group["params"] if id(p) not in here}
    for group in optimizer.param_groups:
        kept = [index for index, parameter in enumerate(group["params"]) if id(parameter) in here]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][index] for index in kept]
    for parameter in gone & optimizer.state.keys():
        del optimizer.state[parameter]


def move_state(
    optimizer: Any, parameter: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None = None
) -> None:
    """Move a parameter's state to ``device``, and its floating-point tensors to ``dtype``; None: no change."""
    entries = optimizer.state.get(parameter, {})
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            entries[key] = value.to(device or value.device, dtype if value.is_floating_point() else None)


def rebind(optimizer: Any, names: Mapping[int, str], model: nn.Module) -> None:
    """Put the model's current parameters into the optimizer's groups, because ``fully_shard`` replaced them."""
    now = dict(model.named_parameters())
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [now[names[id(parameter)]] for parameter in group["params"]]
