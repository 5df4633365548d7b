"""The report of ``verify``: comparisons, the first difference, memory and traffic. Plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.cli.tables import lines, size, table
from autopar.errors import VerificationError, clip

if TYPE_CHECKING:
    from rich.table import Table

_LINES = 10  # of an error
_VERDICTS = {True: "[green]passes[/]", False: "[red]differs[/]", None: "skipped"}


@dataclass(frozen=True)
class Row:
    """One comparison with the reference model.

    Attributes:
        check: ``plan``, ``weights``, ``forward``, ``backward``, ``step``, ``generate``, ``save``, ``reshard`` or
            ``dropout``.
        what: The compared values: ``logits``, ``loss``, ``worst gradient`` ...
        holds: The verdict; None if the comparison was skipped.
        difference: The largest difference, relative to the largest expected element, or None.
        allowed: The maximum allowed ``difference``.
        name: The tensor with the largest difference, if there are several tensors.
        note: The problem, or the reason for skipping.
        rank: The rank with the largest difference.
        failing, of: The numbers of tensors that differ, and of all compared tensors.
    """

    check: str
    what: str
    holds: bool | None
    difference: float | None = None
    allowed: float | None = None
    name: str = ""
    note: str = ""
    rank: int | None = None
    failing: int = 0
    of: int = 0

    def __str__(self) -> str:
        found = "" if self.difference is None or math.isinf(self.difference) else f" differs by {self.difference:.1e}"
        bound = f", allowed is {self.allowed:.0e}" if found and self.allowed is not None else ""
        place = f" on rank {self.rank}" if self.rank is not None and self.holds is False else ""
        name = f" ({self.name}{self._others})" if self.name else ""
        return f"{self.check}: {self.what}{name}{found}{bound}{place}" + (f": {self.note}" if self.note else "")

    @property
    def _others(self) -> str:
        return f", {self.failing} of {self.of} differ" if self.holds is False and self.of > 1 else ""


@dataclass(frozen=True)
class Culprit:
    """The first difference between the parallelized model and the reference model.

    Attributes:
        module: The path of the module; ``""`` for the model itself, or the loss.
        found: The description of the difference.
        lines: The policy lines of this module and the modules that it computes with, as ``file:line: rule``.
        modules: All suspected modules, the most likely first. Readers of one tensor share one gradient.
    """

    module: str
    found: str
    lines: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"first difference: {self.found}" + "".join(f"\n  {line}" for line in self.lines[:4])


@dataclass(frozen=True)
class Traffic:
    """Collectives or messages of one kind in a step on rank 0: the number of calls, and the sent bytes."""

    kind: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank after a step."""

    rank: int
    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class VerificationReport:
    """The result of :func:`autopar.verify`, identical on all ranks.

    Attributes:
        model, parameters: The class of the model, and its number of parameters.
        policy: The name of the policy, with its file and line.
        mesh: The size of each axis.
        dtype: The dtype of the reference model.
        device: ``cpu`` or ``cuda``.
        rows: The comparisons, in order.
        culprit: The first difference; None if nothing differs, or no module is to blame.
        memory, plain_memory: The memory of each rank, and of one process with the reference model.
        traffic: The collectives of a step, by kind.
        seconds: The duration in seconds.
    """

    model: str
    parameters: int
    policy: str
    mesh: Mapping[str, int]
    dtype: str
    device: str
    rows: tuple[Row, ...]
    culprit: Culprit | None = None
    memory: tuple[RankMemory, ...] = ()
    plain_memory: RankMemory | None = None
    traffic: tuple[Traffic, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether at least one comparison passes and none fails."""
        return all(row.holds is not False for row in self.rows) and any(row.holds for row in self.rows)

    def raise_if_failed(self) -> VerificationReport:
        """Return the report, or raise an error if a comparison fails.

        Raises:
            VerificationError: If a comparison fails. The message has the differences and the first one's module.
        """
        if self.ok:
            return self
        failed = [row for row in self.rows if row.holds is False]
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one rank"
        fail = f"{len(failed)} of {len(self.rows)} comparisons fail."
        text = [f"{self.model} on {mesh} differs from the reference model: {fail}"]
        blamed = str(self.culprit).splitlines() if self.culprit else []
        room = _LINES - 2 - len(blamed)
        text += [f"  {clip(str(row), 240)}" for row in failed[:room]]
        text += [f"  ... and {len(failed) - room} more"] if len(failed) > room else []
        raise VerificationError("\n".join([*text, *(f"  {line}" for line in blamed)]))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, in the form of ``autopar verify --json``. An infinite difference is None."""
        data = dataclasses.asdict(self)
        for row in data["rows"]:
            if math.isinf(row["difference"] or 0):
                row["difference"] = None
        return {"ok": self.ok, **data, "mesh": dict(self.mesh)}

    # -- shown -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join(lines(self, 160))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.markup import escape

        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        yield f"[bold]{escape(self.model)}[/]: {self.parameters:,} parameters, {escape(self.policy)}"
        yield f"{mesh}, {self.dtype} on {self.device}, {self.seconds:.0f} s"
        yield self._comparisons()
        if self.memory and self.plain_memory is not None:
            held = table("memory", "weights", "gradients", "optimizer")
            for name, one in [*((f"rank {one.rank}", one) for one in self.memory), ("reference", self.plain_memory)]:
                held.add_row(name, size(one.weights), size(one.gradients), size(one.optimizer))
            yield held
        if self.traffic:
            sent = table("sent by rank 0 in one step", "calls", "bytes")
            for each in self.traffic:
                sent.add_row(each.kind, str(each.calls), size(each.bytes))
            yield sent
        if self.culprit is not None:
            yield f"[red]{escape(str(self.culprit))}[/]"
        yield "[green]all checks pass[/]" if self.ok else "[red]some checks fail[/]"

    def _comparisons(self) -> Table:
        from rich.markup import escape
        from rich.table import Column

        rows = table("check", Column("compared with the reference model", overflow="fold"), "difference", "allowed", "")
        for row in self.rows:
            number = row.difference is not None and math.isfinite(row.difference)
            difference = f"{row.difference:.1e}" if row.difference and number else "equal" if number else "-"
            allowed = f"{row.allowed:.0e}" if row.allowed else "none" if row.allowed == 0 else "-"
            verdict = _VERDICTS[row.holds]
            place = f" (rank {row.rank})" if row.holds is False and row.rank is not None else ""
            name = ": ".join(filter(None, (row.what, row.name)))
            what = ": ".join(filter(None, (f"{name}{row._others}{place}", row.note)))
            rows.add_row(row.check, escape(what), difference, allowed, verdict)
        return rows


def merged(everyone: Sequence[Sequence[Row]]) -> tuple[Row, ...]:
    """Return the worst row over all ranks for each comparison. A rank may lack some comparisons.

    A skipped row (``holds`` None) counts only if all ranks skip the comparison.
    """

    def badness(row: Row) -> tuple[int, float]:
        return {None: 0, True: 1, False: 2}[row.holds], -1.0 if row.difference is None else row.difference

    found: dict[tuple[str, str], Row] = {}
    longest = max(everyone, key=len)
    for rank, rows in sorted(enumerate(everyone), key=lambda pair: pair[1] is not longest):
        for row in rows:
            key, mine = (row.check, row.what), dataclasses.replace(row, rank=rank)
            found[key] = max(found.get(key, mine), mine, key=badness)
    return tuple(row if row.holds is False else dataclasses.replace(row, rank=None) for row in found.values())
