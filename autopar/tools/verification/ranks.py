"""The checks on the ranks of a job, one after another: one verdict on all ranks, the culprit of the first failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.config import ParallelConfig
from autopar.distributed.process import start_process_group
from autopar.errors import AutoparError, ConfigError, clip, nearest
from autopar.tools.verification.culprits import culprit_of_error
from autopar.tools.verification.diagnosis import diagnose
from autopar.tools.verification.draws import dropout
from autopar.tools.verification.generation import generate
from autopar.tools.verification.report import Culprit, Report, Row, merged
from autopar.tools.verification.saving import reshard, save
from autopar.tools.verification.session import Batch, PlainModelError, Session
from autopar.tools.verification.training import backward, forward, step, traffic_of, weights

__all__ = ["CHECKS", "checks_of", "verify_on_ranks"]

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
_NEEDS = {"step": "backward", "backward": "forward", "generate": "forward"}  # what fails with it


def checks_of(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return the checks to run, in their order; ``step`` brings ``backward`` along.

    Raises:
        ConfigError: one is unknown.
    """
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
    alarm: Callable[[Report], None] | None = None,
) -> Report:
    """Compare on the ranks of a job that runs; every rank calls it with the same arguments.

    Args:
        model: whole, only read; all ranks take the weights and batches of rank 0.
        change: called with the session before the first check.
        alarm: called on a rank that raises an error, while others may wait for it, with what it knows.
    """
    start = time.monotonic()
    start_process_group()
    facts = _Facts(model, config)
    shared = [[dict(batch) for batch in batches]]
    dist.broadcast_object_list(shared)  # a script may have drawn others on each rank
    try:
        session = Session(model, config, policy, shared[0])
    except PlainModelError as error:
        raise ConfigError(f"{facts.model} does not run with these batches: {error}") from error
    except AutoparError as error:
        own = Row("plan", type(error).__name__, False, note=" ".join(str(error).split()))
        culprit = culprit_of_error(error, model, None, "")
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, (own, culprit))
        first = next((pair for pair in texts if pair[1] is not None), texts[0])  # where it was found out
        return facts.report((first[0],), first[1], time.monotonic() - start)
    try:
        if change is not None:
            change(session)
        facts.policy, facts.mesh = f"policy {session.state.policy.name} ({session.policy})", session.mpu.sizes._asdict()

        def tell(rows: Sequence[Row], culprit: Culprit | None) -> None:
            if alarm is not None:
                alarm(facts.report(rows, culprit, time.monotonic() - start))

        rows, culprit = _run(session, checks, tell)
        memory: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(memory, session.memory)
        traffic: list[Any] = [traffic_of(session)]
        dist.broadcast_object_list(traffic)
        seconds: list[Any] = [time.monotonic() - start]
        dist.broadcast_object_list(seconds)
        held = tuple(each for each in memory if each is not None)
        more = {"memory": held, "plain_memory": session.plain_memory, "traffic": traffic[0]}
        return facts.report(rows, culprit, seconds[0], **more)
    finally:
        session.close()


class _Facts:
    """Facts about the model for the report, found before anything can fail."""

    def __init__(self, model: nn.Module, config: ParallelConfig) -> None:
        self.model, self.parameters = type(model).__name__, sum(p.numel() for p in model.parameters())
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
        self.dtype = ", ".join(kinds) or "no parameters"
        if config.precision != "fp32":
            self.dtype += f", precision {config.precision}"
        tp, cp, pp = config.tensor_parallel_size, config.context_parallel_size, config.pipeline_parallel_size
        dp = config.data_parallel_size(dist.get_world_size())
        self.mesh: Mapping[str, int] = {"tp": tp, "pp": pp, "dp": dp, "cp": cp}
        self.device = "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"
        self.policy = "no policy"

    def report(self, rows: Sequence[Row], culprit: Culprit | None, seconds: float, **more: Any) -> Report:
        """Return the report."""
        kept = {axis: size for axis, size in self.mesh.items() if axis != "cp" or size > 1}
        return Report(
            *(self.model, self.parameters, self.policy, kept, self.dtype, self.device, tuple(rows), culprit),
            **{"seconds": seconds, **more},
        )


_Tell = Callable[[Sequence[Row], Culprit | None], None]


def _run(session: Session, checks: Sequence[str], tell: _Tell) -> tuple[list[Row], Culprit | None]:
    rows: list[Row] = []
    culprit: Culprit | None = None
    failed: dict[str, str] = {}
    for check in checks:
        reason = failed.get(_NEEDS.get(check, "")) or failed.get("")
        if reason:
            rows.append(Row(check, "left out", None, note=reason))
            failed[check] = reason
            continue
        found, error = _tried(session, check, lambda own, who: tell([*rows, *own], culprit or who))  # noqa: B023
        rows += found
        wrong = [row for row in found if row.holds is False]
        if all(row.holds is None for row in found):
            failed[check] = found[0].note
        if wrong:
            failed[check] = f"{check} differs already"
            if error is not None or any("raises" in row.what for row in wrong):
                failed[""] = f"{check} has raised an error"
            if culprit is None:
                culprit = _culprit(session, check, found, error)
    return rows, culprit


def _tried(session: Session, check: str, tell: _Tell) -> tuple[tuple[Row, ...], Exception | None]:
    """The rows of a check, the same on all ranks; and the error of this rank, if it raised one."""
    error: Exception | None = None
    try:
        mine = _CHECKS[check](session)
    except PlainModelError as raised:  # the same on all ranks
        return (Row(check, "left out", None, note=str(raised)),), None
    except Exception as raised:
        error = raised
        text = clip(" ".join(str(raised).split()), 400)
        mine = [Row(check, f"raises {type(raised).__name__}", False, note=text, rank=dist.get_rank())]
        tell(mine, culprit_of_error(raised, session.parallel, session.plan, session.policy))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, error is not None))
    raising = [(rank, rows) for rank, (rows, raised) in enumerate(everyone) if raised]
    if raising:
        rank, rows = raising[0]
        return (Row(**{**vars(rows[0]), "rank": rank}),), error
    return merged([rows for rows, _ in everyone]), None


def _culprit(session: Session, check: str, rows: Sequence[Row], error: Exception | None) -> Culprit | None:
    if not any("raises" in row.what for row in rows):
        return diagnose(session, check, rows)
    mine = None if error is None else culprit_of_error(error, session.parallel, session.plan, session.policy)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((culprit for culprit in everyone if culprit is not None), None)
