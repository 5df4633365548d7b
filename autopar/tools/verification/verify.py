"""Verify a model: run the reference model and the parallelized model on the same inputs, and compare them.

``verify`` starts a process for each rank. On the CPU they are forks of this process. So they can use a model, policy or
class that is not importable, and they share the model's memory. CUDA and process groups do not support forks. Then
all arguments are pickled for new processes. All ranks get the same report.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import PreTrainedModel

from autopar import errors
from autopar.compat.peft import is_peft_model
from autopar.config import ParallelConfig
from autopar.distributed.collectives import gathered
from autopar.distributed.process import start_process_group
from autopar.distributed.rng import kept
from autopar.errors import AutoparError, ConfigError, VerificationError, in_one_line, nearest
from autopar.policy.schema import Policy
from autopar.storage.progress import hidden_bars, progress_bar
from autopar.stored import form_kept, stored_weights
from autopar.tools.verification.batches import Batch, make_batches
from autopar.tools.verification.checks import backward, dropout, forward, generate, reshard, save, step, weights
from autopar.tools.verification.diagnosis import culprit_of_error, diagnose
from autopar.tools.verification.outputs import of_first
from autopar.tools.verification.recording import counted
from autopar.tools.verification.report import Culprit, Row, VerificationReport, merged
from autopar.tools.verification.session import PlainModelError, Session

_BATCHES = 2  # gradients accumulate over batches


def verify(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    batches: Sequence[Batch] | None = None,
    checks: Sequence[str] | None = None,
    data_parallel_size: int = 1,
    sequence: int = 16,
    device: str = "cpu",
    timeout: float = 1800.0,
) -> VerificationReport:
    """Compare ``model`` with its parallelized copy: outputs, gradients, a step, generated tokens and checkpoints.

    Without torchrun it starts processes. In a job of several ranks, every rank must call it with the same arguments,
    and gets the same report. The model is only read.

    Args:
        model: The model in memory, with weights. Dropout is off, except in the check ``dropout``.
        config, policy: The configuration and policy, as in :func:`autopar.initialize`.
        batches: Dicts of the forward's arguments, with the samples of all replicas, and with labels for a loss. All
            ranks use the batches of rank 0. Default: two random batches, for Hugging Face models.
        checks: The checks to run: ``weights``, ``forward``, ``generate``, ``save``, ``reshard``, ``backward``,
            ``step`` or ``dropout``. Default: all.
        data_parallel_size: The number of replicas to start; at least the number of replicas that share experts.
        sequence: The tokens of each random sample.
        device: The device of started processes: ``cpu``, or ``cuda`` with one GPU per rank.
        timeout: The timeout of started processes in seconds.

    Returns:
        A :class:`~autopar.tools.verification.report.VerificationReport` with ``ok``, ``raise_if_failed()`` and
        ``to_dict()``. It prints as a table.

    Raises:
        ConfigError: The call is wrong, or no inputs are known for the model. A refusal of ``initialize`` is a row of
            the report, not an error.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, not {device!r}")
    chosen = checks_of(checks)
    if data_parallel_size < 1:
        raise ConfigError(f"data_parallel_size must be at least 1, not {data_parallel_size}")
    world = job = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if job == 1:
        sizes = ParallelConfig.parse(config)
        tp = sizes.tensor_parallel_size
        replicas = max(data_parallel_size, sizes.expert_parallel_size // tp)
        world = tp * sizes.pipeline_parallel_size * sizes.context_parallel_size * replicas
    parsed = ParallelConfig.parse(config, world)
    lacking = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if lacking is not None:
        fix = "Build the model outside of lazy_init."
        raise ConfigError(f"verify requires a model with weights, but {lacking} is on the meta device.\n  {fix}")
    if parsed.compile:
        raise ConfigError("verify does not support compile, because it hooks modules.\n  Remove the section compile.")
    with form_kept(model):
        listed: list[Batch] = list(batches) if batches is not None else [*_make(model, parsed, world, sequence)]
        if not listed:
            raise ConfigError("batches must not be empty.\n  Pass at least one dict of the model's arguments.")
        work = partial(verify_on_ranks, model, parsed, policy, listed, chosen)
        if job == 1 and not forks(device) and (quantized := stored_weights(model)):
            raise ConfigError(
                f"verify cannot send {len(quantized)} quantized weights to new processes.\n"
                "  Call it in a torchrun job, or on the CPU in a process without a process group."
            )
        if job == 1:
            return run_on_ranks(work, world, device=device, timeout=timeout)
        with kept():  # restore the script's random states
            return work()


def _make(model: nn.Module, config: ParallelConfig, world: int, sequence: int) -> list[dict[str, Any]]:
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not inner or (inner[0] is not model and not is_peft_model(model)):
        raise ConfigError(
            f"verify cannot make inputs for {type(model).__name__}.\n  Pass batches=[{{'input': tensor, ...}}]."
        )
    rows = config.data_parallel_size(world) * max(2, config.pipeline_parallel_size)
    with torch.no_grad():
        return make_batches(inner[0], count=_BATCHES, rows=rows, length=sequence)


_CHECKS: dict[str, Callable[[Session], list[Row]]] = {
    "weights": weights,
    "forward": forward,
    "generate": generate,
    "save": save,
    "reshard": reshard,
    "backward": backward,
    "step": step,
    "dropout": dropout,
}
CHECKS = tuple(_CHECKS)
_NEEDS = {"step": "backward", "backward": "forward", "generate": "forward"}  # check -> required check


def checks_of(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return the checks to run, in order. ``step`` requires ``backward``. Raises ConfigError for an unknown check."""
    for name in wanted or ():
        if name not in CHECKS:
            raise ConfigError(f"there is no check '{name}'.{nearest(name, CHECKS)} Known: {', '.join(CHECKS)}")
    chosen = {*(wanted or CHECKS), "weights"}
    chosen |= {"backward"} if "step" in chosen else set()
    return tuple(name for name in CHECKS if name in chosen)


def verify_on_ranks(
    model: nn.Module,
    config: ParallelConfig,
    policy: Any,
    batches: Sequence[Batch],
    checks: Sequence[str],
    change: Callable[[Session], None] | None = None,
    alarm: Callable[[VerificationReport], None] = lambda report: None,
) -> VerificationReport:
    """Compare on the ranks of a running job. Every rank calls this function with the same arguments.

    Args:
        model: The full model, which is only read. All ranks use the weights and batches of rank 0.
        change: A function to call with the session before the first check.
        alarm: A callback for the report of a rank that raises an error while other ranks may wait for it.
    """
    start = time.monotonic()
    start_process_group()
    empty = _empty_report(model, config)
    shared = of_first([dict(batch) for batch in batches])  # ranks may have different random batches
    try:
        session = Session(model, config, policy, shared)
    except PlainModelError as error:
        raise ConfigError(f"{empty.model} does not run with the batches: {error}") from error
    except AutoparError as error:
        own = Row("plan", type(error).__name__, False, note=in_one_line(error))
        texts = gathered((own, culprit_of_error(error, model, None, "")))
        row, culprit = next((pair for pair in texts if pair[1] is not None), texts[0])  # the rank with a culprit
        return replace(empty, rows=(row,), culprit=culprit, seconds=time.monotonic() - start)
    try:
        if change is not None:
            change(session)
        used = f"policy {session.state.policy.name} ({session.policy})"
        empty = replace(empty, policy=used, mesh=_mesh(session.config, dist.get_world_size()))

        def tell(rows: Sequence[Row], culprit: Culprit | None) -> None:
            alarm(replace(empty, rows=tuple(rows), culprit=culprit, seconds=time.monotonic() - start))

        with progress_bar("verifying", len(checks), unit=" checks") as bar:
            rows, culprit = _run(session, checks, tell, bar)
        return replace(
            empty,
            rows=tuple(rows),
            culprit=culprit,
            memory=tuple(each for each in gathered(session.memory) if each is not None),
            plain_memory=session.plain_memory,
            traffic=of_first(counted(session.sent)),
            seconds=of_first(time.monotonic() - start),
        )
    finally:
        session.mpu.destroy()


def _empty_report(model: nn.Module, config: ParallelConfig) -> VerificationReport:
    """Return a report without comparisons."""
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
    dtype = ", ".join(kinds) or "no parameters"
    dtype += f", precision {config.precision}" if config.precision != "fp32" else ""
    device = "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"
    count, mesh = sum(p.numel() for p in model.parameters()), _mesh(config, dist.get_world_size())
    return VerificationReport(type(model).__name__, count, "no policy", mesh, dtype, device, ())


def _mesh(config: ParallelConfig, world: int) -> dict[str, int]:
    """Return the sizes of a mesh, with cp and ep only if they are above 1."""
    sizes = {"tp": config.tensor_parallel_size, "pp": config.pipeline_parallel_size}
    sizes |= {"dp": config.data_parallel_size(world)}
    more = {"cp": config.context_parallel_size, "ep": config.expert_parallel_size}
    return sizes | {axis: size for axis, size in more.items() if size > 1}


_Tell = Callable[[Sequence[Row], Culprit | None], None]


def _run(session: Session, checks: Sequence[str], tell: _Tell, bar: Any) -> tuple[list[Row], Culprit | None]:
    rows: list[Row] = []
    culprit: Culprit | None = None
    failed: dict[str, str] = {}
    for check in checks:
        reason = failed.get(_NEEDS.get(check, "")) or failed.get("")
        if reason:
            rows.append(Row(check, "left out", None, note=reason))
            failed[check] = reason
            continue
        found, raised, who = _tried(session, check, lambda own, who: tell([*rows, *own], culprit or who))  # noqa: B023
        bar.update()
        rows += found
        if all(row.holds is None for row in found):
            failed[check] = found[0].note
        if any(row.holds is False for row in found):
            failed[check] = f"{check} differs already"
            if raised:
                failed[""] = f"{check} has raised an error"
            culprit = culprit or (who if raised else diagnose(session, check, found))
    return rows, culprit


def _tried(session: Session, check: str, tell: _Tell) -> tuple[tuple[Row, ...], bool, Culprit | None]:
    """Return the rows of a check, whether a rank raised an error, and the module that raised it. All ranks agree."""
    raised, who = False, None
    try:
        mine = _CHECKS[check](session)
    except PlainModelError as error:  # identical on all ranks
        return (Row(check, "left out", None, note=str(error)),), False, None
    except Exception as error:
        raised, who = True, culprit_of_error(error, session.parallel, session.plan, session.policy)
        what, note = f"raises {type(error).__name__}", in_one_line(error, 400)
        mine = [Row(check, what, False, note=note, rank=dist.get_rank())]
        tell(mine, who)
    everyone = gathered((mine, raised, who))
    failures = [(rows[0], by) for rows, failed, by in everyone if failed]
    if failures:
        return (failures[0][0],), True, next((by for _, by in failures if by is not None), None)
    return merged([rows for rows, _, _ in everyone]), False, None


Work = Callable[..., VerificationReport]
"""The work of each rank. It calls its ``alarm`` with a report if it fails while other ranks may wait for it."""

_GRACE = 20.0  # seconds for the other ranks to end after one rank fails
_PATIENCE = timedelta(minutes=10)


def forks(device: str) -> bool:
    """Return whether started processes are forks, which share this process's memory."""
    return device == "cpu" and not torch.cuda.is_initialized() and not dist.is_initialized()


def run_on_ranks(work: Work, world: int, *, device: str = "cpu", timeout: float = 1800.0) -> VerificationReport:
    """Run ``work`` in ``world`` processes for ``timeout`` seconds. Return the report of rank 0, or of a failed rank.

    Raises:
        ConfigError, VerificationError: If there are too few GPUs, or a process died or timed out. Other errors of
            autopar are raised again.
    """
    if device == "cuda" and torch.cuda.device_count() < world:
        raise ConfigError(
            f"{world} ranks require {world} GPUs, but this machine has {torch.cuda.device_count()}.\n"
            "  Use --device cpu to compare on the CPU."
        )
    context: Any = multiprocessing.get_context("fork" if forks(device) else "spawn")
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        pipes, processes = {}, []
        gc.collect()  # in a fork, the end of a process group would wait for missing threads
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(work, rank, world, folder, device, there), daemon=True)
            process.start()
            there.close()
            pipes[rank] = here
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(10)


def _collect(pipes: dict[int, Any], processes: list[Any], limit: float, timeout: float) -> VerificationReport:
    reports: dict[int, VerificationReport] = {}
    alarms: list[VerificationReport] = []
    while pipes:
        ready = multiprocessing.connection.wait(list(pipes.values()), max(0.0, limit - time.monotonic()))
        if not ready:
            break
        for rank, pipe in list(pipes.items()):
            if pipe not in ready:
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                processes[rank].join(5)
                kind, value = "died", f"the process of rank {rank} exited with code {processes[rank].exitcode}"
            if kind == "alarm":
                alarms.append(value)
                limit = min(limit, time.monotonic() + _GRACE)
                continue
            del pipes[rank]
            if kind == "report":
                reports[rank] = value
            elif not alarms:
                error = getattr(errors, kind, VerificationError)
                raise error(value if error is not VerificationError else f"rank {rank} failed: {value}")
    if len(reports) == len(processes):
        return reports[0]
    if alarms:
        return alarms[0]
    raise VerificationError(f"ranks {sorted(pipes)} of {len(processes)} timed out after {timeout:g} s")


def _main(work: Work, rank: int, world: int, folder: str, device: str, pipe: Any) -> None:
    """Run one rank. Exit without destructors, because a peer may have failed."""
    torch.set_num_threads(1)  # the parent's threads do not exist in a fork
    transformers.logging.set_verbosity_error()
    code = 1
    try:
        backend = "gloo"
        if device == "cuda":
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"
        place = f"file://{folder}/rendezvous"
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=world, timeout=_PATIENCE)
        with hidden_bars(only_transformers=True):
            pipe.send(("report", work(alarm=lambda report: pipe.send(("alarm", report)))))
        code = 0
    except AutoparError as error:
        pipe.send((type(error).__name__, str(error)))
    except BaseException:
        pipe.send(("died", traceback.format_exc()))
    pipe.close()
    os._exit(code)
