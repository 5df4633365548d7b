"""``autopar.verify`` over all model types that policies list: small random models, a few ranks that stay up.

python -m benchmarks.verified_policies [MODEL_TYPE ...] [--meshes tp2 pp2 tp2xpp2] [--rows FILE] [--again [VERDICT ...]]

A row is one model type on one mesh, appended to a file of JSON lines as soon as it is known. A second run goes on where
the first was stopped; ``--again differs raises`` repeats rows with these verdicts, ``--again`` alone all of them. What
does not end in time takes its ranks down, and new ones are started. The exit code is 1 if anything differs, raises or
hangs.

holds: everything that was compared, in float32, or where that differs in float64 (the reason says so: rounding decides
in float32 on which side of a kink a number lies); differs: something does not; refused: an error of autopar that says
what to do instead; raises: any other error; hangs: no end in ``--timeout`` seconds; unbuilt: no small model runs with
any batches.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers

import autopar
from autopar import errors
from autopar.errors import AutoparError, ConfigError, PipelineError, UnsupportedModelError, clip
from autopar.policy.match import find_policy, supported_model_types
from autopar.tools.commands.models import of_task
from autopar.tools.verification.batches import make_batches
from autopar.tools.verification.report import Row, VerificationReport
from autopar.tools.verification.small_models import build_small
from benchmarks.derived_policies import main_case
from tests.harness.worlds import pooled
from tests.random_models import batches as batches_of, build, of_type

_AXES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "cp": "context_parallel_size"}
_SAMPLES, _TOKENS, _BATCHES = 2, 16, 2
_HEADS, _KV_HEADS = 4, 2
_WRONG = ("differs", "raises", "hangs")
_ROWS = Path(__file__).parent / "out" / "verified_policies.jsonl"


class Unbuilt(Exception):
    """No small model of a type runs with any batches."""


def sizes(mesh: str) -> dict[str, int]:
    """Return the keys of the configuration for ``tp2xpp2``."""
    found = [re.fullmatch(r"(tp|pp|cp)(\d+)", part) for part in mesh.split("x")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{mesh!r} is no mesh: it must be like tp2, pp2, cp2 or tp2xpp2")
    return {_AXES[part[1]]: int(part[2]) for part in found if part is not None}


def small(model_type: str) -> tuple[Any, list[dict[str, Any]], str]:
    """Build a small model of a type, and batches: what ``autopar verify`` makes, else what the tests have for it.

    The head is the usual one, or one that the policy is for.

    Raises:
        Unbuilt: neither runs.
    """
    try:
        head = of_task(model_type, None)
        model = build_small(head.kind, head.config)  # type: ignore[arg-type]
        find_policy(model)
        with torch.no_grad():
            return model, make_batches(model, count=_BATCHES, rows=_SAMPLES, length=_TOKENS), "made"
    except (ConfigError, UnsupportedModelError) as error:
        case = main_case(model_type)
        if case is None:
            raise Unbuilt("only inside of other models" if of_type(model_type).inside else str(error)) from error
        model = build(case, _HEADS, _KV_HEADS)
        return model, batches_of(case, model.config, _BATCHES), "of the tests"


def _double(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def verdict(report: VerificationReport) -> tuple[str, str]:
    """Return the verdict of a report, and the first reason."""
    wrong = [row for row in report.rows if row.holds is False]
    if not wrong:
        return ("holds", "") if report.ok else ("differs", "nothing was compared")
    first = wrong[0]
    text = clip(" ".join(str(first).split()), 400)
    name = _error(first)
    if name is None:
        place = f" ({report.culprit.module})" if report.culprit is not None and report.culprit.module else ""
        return "differs", text + place
    kind = getattr(errors, name, None)
    refused = isinstance(kind, type) and issubclass(kind, AutoparError) and not issubclass(kind, PipelineError)
    return ("refused" if refused else "raises"), text


def _error(row: Row) -> str | None:
    """The name of the error that a row tells of: of a stage that another one waited for, that one's own."""
    name = row.what if row.check == "plan" else row.what.removeprefix("raises ")
    if name == row.what and row.check != "plan":
        return None
    own = re.search(r" failed: (\w+): ", row.note)
    return own[1] if name == PipelineError.__name__ and own else name


def compare(model_type: str, mesh: str, checks: Sequence[str] | None, path: str) -> None:
    """Verify one model type on the ranks of this job; rank 0 writes the row to ``path``."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    start = time.perf_counter()
    row: dict[str, Any] = {"type": model_type, "mesh": mesh}
    try:
        model, batches, origin = small(model_type)
        row |= {"model": type(model).__name__, "batches": origin}
        config = {"model_parallelism": sizes(mesh)}
        report = autopar.verify(model, config, batches=batches, checks=checks)
        row["verdict"], row["why"] = verdict(report)
        if row["verdict"] == "differs":
            wide = autopar.verify(model.double(), config, batches=[*map(_double, batches)], checks=checks)
            if verdict(wide)[0] == "holds":
                report, row["verdict"], row["why"] = wide, "holds", f"in float64; in float32 {row['why']}"
        row["rows"] = [str(each) for each in report.rows if each.holds is not True]
    except (Unbuilt, ConfigError) as error:
        row |= {"verdict": "unbuilt", "why": clip(" ".join(str(error).split()), 400)}
    row["seconds"] = round(time.perf_counter() - start, 1)
    if torch.distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(row), encoding="utf-8")


def row_of(model_type: str, mesh: str, checks: Sequence[str] | None, timeout: float, path: Path) -> dict[str, Any]:
    """Verify one model type on ranks that have verified others; new ones if it takes those down."""
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    work = pooled(world_size=prod(sizes(mesh).values()), timeout=timeout)(compare)
    try:
        work(model_type, mesh, checks, str(path))
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return row
    except AssertionError as error:
        text = str(error)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        hangs = "did not end in" in lines[0]
        why = text[-1500:] if hangs else lines[-1]
        row = {"type": model_type, "mesh": mesh, "verdict": "hangs" if hangs else "raises", "why": why}
        return row | {"seconds": round(time.perf_counter() - start, 1)}
    finally:
        path.unlink(missing_ok=True)


def known(path: Path, again: Iterable[str] | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of earlier runs that need not be repeated, by mesh and model type; the last of each."""
    if not path.is_file() or again == []:
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    latest = {(row["mesh"], row["type"]): row for row in rows}
    return {key: row for key, row in latest.items() if row["verdict"] not in (again or ())}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of counts for each mesh, and the names of what does not hold, with reasons."""
    names = ("holds", "differs", "raises", "hangs", "refused", "unbuilt")
    lines = ["", f"{date.today()}, torch {torch.__version__}, transformers {transformers.__version__}", ""]
    lines += [f"| mesh | types | {' | '.join(names)} | seconds |", f"|{'---|' * (len(names) + 3)}"]
    for mesh in dict.fromkeys(row["mesh"] for row in rows):
        here = [row for row in rows if row["mesh"] == mesh]
        count = Counter(row["verdict"] for row in here)
        numbers = [str(count[name]) for name in names]
        lines.append(f"| {mesh} | {len(here)} | {' | '.join(numbers)} | {sum(row['seconds'] for row in here):.0f} |")
    lines.append("")
    for row in sorted(rows, key=lambda row: (row["mesh"], names.index(row["verdict"]), row["type"])):
        if row["why"]:
            lines.append(f"{row['mesh']} {row['verdict']:8} {row['type']}: {' '.join(row['why'].split())[:300]}")
    return "\n".join(lines)


def main() -> int:
    """Sweep, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; by default all")
    parser.add_argument("--meshes", nargs="+", default=["tp2", "pp2"], help="one after another: tp2, pp2, tp2xpp2 ...")
    parser.add_argument("--checks", help="of verify, with commas; by default all")
    parser.add_argument("--rows", type=Path, default=_ROWS, help="the file of JSON lines; benchmarks/out/ by default")
    parser.add_argument("--again", nargs="*", metavar="VERDICT", help="repeat rows with these verdicts; alone: all")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one model type")
    options = parser.parse_args()
    for mesh in options.meshes:
        try:
            sizes(mesh)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    types = sorted(options.types or supported_model_types())
    checks = options.checks.split(",") if options.checks else None
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    done = known(options.rows, options.again)
    rows = []
    for mesh in options.meshes:
        for model_type in types:
            row = done.get((mesh, model_type))
            if row is None:
                row = row_of(model_type, mesh, checks, options.timeout, options.rows.with_suffix(".now"))
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                why = " ".join(row["why"].split())[:150]
                print(f"{mesh} {model_type:32} {row['verdict']:8} {row['seconds']:6} s {why}", flush=True)
            rows.append(row)
    print(summary(rows))
    return int(any(row["verdict"] in _WRONG for row in rows))


if __name__ == "__main__":
    from benchmarks.verified_policies import main as run  # ranks import the module by this name

    raise SystemExit(run())
