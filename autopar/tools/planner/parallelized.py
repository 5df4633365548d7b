"""Describe a parallelized model: a table of its parameters (``summary``), and the speed of a step (``metrics``)."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.cli.tables import filled, lines, shape
from autopar.compat.transformers import from_config
from autopar.deferred_init.context import lazy_init
from autopar.errors import ConfigError, not_parallelized
from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan, held as held_here, rows
from autopar.tools.planner.candidate import Rows
from autopar.tools.planner.hardware import find_gpu, gpu_of
from autopar.tools.planner.planned_model import PlannedModel


def summary(model: nn.Module) -> str:
    """Print a table of a parallelized model: its parameters, their rules, and the local shapes. Only rank 0 prints.

    Returns:
        The table of this rank, on every rank. The ranks do not communicate.

    Raises:
        ConfigError: If the model is not parallelized.
    """
    state = vars(model).get("_autopar")
    if state is None:
        raise not_parallelized(model)
    mpu, plan, stages = state.mpu, state.plan, state.stages
    held = dict(model.named_parameters())
    entries: list[dict[str, str]] = []
    for name, tensor in plan.tensors.items():
        names = [name, *tensor.aliases]
        here: Any = next((held[each] for each in names if each in held), None)
        if here is None and (not any(each in stages.tensors for each in names) or mpu.pp.rank in stages.holders(name)):
            continue  # a buffer
        local = here.to_local() if hasattr(here, "to_local") else here
        entries.append(
            {
                "name": name,
                "shape": shape(tensor.shape),
                "rule": rule_of(plan, tensor),
                "here": "-" if local is None else shape(local.shape),
                "dtype": tensor.dtype if local is None else str(local.dtype).removeprefix("torch."),
                "stages": ", ".join(map(str, stages.holders(name))) if mpu.pp.size > 1 else "",
            }
        )
    cells = [[name, *list(row.values())[1:]] for name, row in rows(entries)]
    tensors = filled(["parameter", "shape", "rule", "on this rank", "dtype", "pp rank"], cells)
    sizes = mpu.sizes._asdict()
    if sizes.get("cp") == 1:
        del sizes["cp"]
    if mpu.ep.size > 1:
        sizes["ep"] = mpu.ep.size
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    place = f"{mesh}, rank {mpu.rank}: " + ", ".join(f"{axis} {getattr(mpu, axis).rank}" for axis in sizes)
    elements, size = held_here(model)
    text = [
        f"{plan.model_type} by policy {plan.policy}; {place}",
        *lines(tensors),
        f"this rank: {elements:,} parameters, {size / 1e6:,.1f} MB",
    ]
    if mpu.is_master:
        print("\n".join(text))
    return "\n".join(text)


def metrics(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    seconds: float,
    *,
    gpu: str | None = None,
    log: Any = None,
    **values: float | None,
) -> dict[str, float | None]:
    """Return the speed of a training step: ``tokens_per_second``, ``flops``, ``flops_per_second`` and ``mfu``.

    FLOPs count the matmuls of forward and backward, on the meta device, once per sequence length. They include padding
    and exclude recomputation. The ranks do not communicate.

    Args:
        model: A parallelized model.
        batch: The batch of this replica, with ``input_ids`` ``[batch, sequence]``; all replicas' batches count as
            equally large.
        seconds: The seconds of the step.
        gpu: ``a100``, ``h100`` ...; by default this process's GPU. If it is unknown, ``mfu`` is None.
        log: CSV file to append a row to, TensorBoard ``SummaryWriter``, W&B run, or function that takes a dict; used
            on rank 0 only. ``python -m autopar.tools.plot`` draws the file. The others get no figures that are None.
        **values: Further figures of the step for the log, such as ``step=10, loss=2.3``; None if unknown.

    Returns:
        Numbers of all ranks together, ``tokens_per_second_per_gpu``, ``memory_gb`` (the peak of this rank: of its GPU,
        or resident on a CPU), and ``values``.

    Raises:
        ConfigError: If the model is not parallelized or not a Hugging Face model, the batch has no ``input_ids``,
            ``seconds`` is not above 0, the GPU is unknown, or ``log`` (on rank 0 only) has other columns or an unknown
            type.
    """
    state = vars(model).get("_autopar")
    if state is None:
        raise not_parallelized(model)
    if not seconds > 0:
        raise ConfigError(f"metrics: seconds must be above 0, not {seconds}")
    ids = batch.get("input_ids")
    if ids is None or ids.ndim != 2:
        raise ConfigError(
            f"metrics: the batch must have input_ids [batch, sequence]; got {', '.join(batch) or 'an empty batch'}"
        )
    samples, sequence = ids.shape
    world = state.mpu.world_size
    known: dict[int, int] = vars(model).setdefault("_autopar_flops", {})
    if sequence not in known:
        known[sequence] = _flops_of_sample(state.inner_of(model), sequence, state.own_policy)
    replicas = state.mpu.dp.size
    flops = known[sequence] * samples * replicas
    own = gpu_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    found = own if gpu is None else find_gpu(gpu)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    kind = state.config.precision  # without a section ``precision``, the model's dtype
    if kind == "fp32":
        kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, kind)
    peak = None if found is None else found.peak(kind)
    device = state.mpu.device
    on_gpu = device.type == "cuda"
    used = torch.cuda.max_memory_allocated(device) if on_gpu else 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    figures: dict[str, float | None] = {
        "tokens_per_second": samples * sequence * replicas / seconds,
        "tokens_per_second_per_gpu": samples * sequence * replicas / seconds / world,
        "flops": float(flops),
        "flops_per_second": flops / seconds,
        "mfu": None if peak is None else flops / seconds / world / peak,
        "memory_gb": used / 1e9,
    }
    if twice := figures.keys() & values.keys():
        raise ConfigError(f"metrics: {min(twice)}= is one of the figures of autopar; use another name")
    given = {name: value if isinstance(value, int | None) else float(value) for name, value in values.items()}
    figures = {**given, **figures}
    if log is not None and state.mpu.rank == 0:
        _append(Path(log), figures) if isinstance(log, str | Path) else _log(log, figures)
    return figures


def _log(log: Any, figures: Mapping[str, float | None]) -> None:
    """Pass the known figures to TensorBoard, W&B or a function. Raises ConfigError for another object."""
    known = {name: value for name, value in figures.items() if value is not None}
    if callable(scalar := getattr(log, "add_scalar", None)):
        for name, value in known.items():
            if name != "step":
                scalar(name, value, known.get("step"))
    elif callable(send := getattr(log, "log", log)):
        send(known)
    else:
        raise ConfigError(
            f"metrics: log must be a CSV file, a SummaryWriter, a W&B run or a function; got {type(log).__name__}"
        )


def _append(path: Path, figures: Mapping[str, float | None]) -> None:
    """Append a row to a CSV file. Raises ConfigError if the file has other columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        columns = next(csv.reader(file), None)
        if columns not in (None, [*figures]):
            raise ConfigError(f"metrics: {path} has the columns {columns}, expected {[*figures]}. Use another file.")
        writer = csv.DictWriter(file, [*figures])
        if columns is None:
            writer.writeheader()
        writer.writerow(figures)


def _flops_of_sample(inner: nn.Module, sequence: int, policy: Any) -> int:
    """Return the FLOPs of the reference model's forward and backward of one sample."""
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(f"metrics: model must be a Hugging Face PreTrainedModel; got {type(inner).__name__}")
    kind: Any = next(each for each in type(inner).__mro__ if not each.__module__.startswith("autopar"))
    with lazy_init():
        plain = from_config(kind, vars(inner).get("_autopar_config", inner.config))
    count = PlannedModel(plain, policy, sequence=sequence, precision="fp32").count(Rows(1), 1)
    return sum(calls * each.in_all for unit in count.units() for each, calls in unit.operations.items())


def rule_of(plan: Plan, tensor: TensorPlan) -> str:
    """Return the rule of a tensor with its units, for example ``column heads | kv_heads``, or ``replicated``."""
    for name in (tensor.name, *tensor.aliases):
        path, _, own = name.rpartition(".")
        module = plan.modules.get(path)
        if module is not None and own in module.layouts:
            rule = "by_expert" if module.rule == "one_expert" else module.rule or "sharded"
            return f"{rule} {_units(module.layouts[own])}"
        if module is not None and own in module.once:
            return "once"
        if module is not None and own in module.summed:
            return "replicated, gradient all-reduced"
    return "replicated" if tensor.layout is None else f"sharded {_units(tensor.layout)}"


def _units(layout: Layout) -> str:
    return " | ".join(block.unit for block in layout.blocks) + (" (replicated)" if layout.replicated else "")
