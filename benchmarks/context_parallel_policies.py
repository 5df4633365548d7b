"""Context parallelism of every model type on four ranks, beside each other axis: compared with the plain model.

python -m benchmarks.context_parallel_policies [--types T ...] [--meshes M ...] [--rows FILE]

A row says of one model type on one mesh whether outputs, loss, every gradient after two micro-batches (and the weights
after a step of ZeRO-1) are the plain model's, or who refuses it. Rows are appended to a file; those that are there are
not made again, but for what was wrong or failed. What is wrong, and a refusal that neither NOT_IN_STAGES nor
NOT_OVER_FOUR lists (or the other way round), makes the exit code 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, code_digest
from tests.features.context_parallel.meshes import MESHES, compare
from tests.harness.worlds import pooled
from tests.random_models import Case
from tests.refused_types import LATE_IN_CONTEXT, NOT_BY_ROWS, NOT_IN_CONTEXT
from tests.test_every_policy import WHOLE, _main

NOT_IN_STAGES = {
    **dict.fromkeys(("albert", "hrm_text"), "its forward must call each block once, in order"),
    **dict.fromkeys(
        (
            *("flaubert", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
            *("mistral_large4", "xlm"),
        ),
        "later blocks or the head read outputs of earlier blocks, which leaves 1 groups",
    ),
    "ibert": "read ibert.embeddings.token_type_embeddings.weight, which another stage holds",  # in the first pass
}
"""Model types that have no two pipeline stages, also without a context axis, and what they are refused with."""

NOT_OVER_FOUR = {
    **dict.fromkeys(("musicgen", "musicgen_melody_decoder"), "RuntimeError: shape '[-1, 3, 52]' is invalid"),
    "rembert": "no sequence length up to 32 differs from all other sizes",
}
"""Model types that are cut over two context-parallel ranks and refused over four, and what with."""

_FILE = ROOT / "benchmarks" / "out" / "context_parallel_policies.jsonl"
_BESIDE = [name for name, mesh in MESHES.items() if mesh.cp == 2]
_REFUSED = ("refused", "late")


def method_of(model_type: str) -> str:
    """Return the method that a model type is compared with; about half of them have each."""
    return "gather" if len(model_type) % 2 else "ulysses"


def is_left_out(model_type: str, mesh: str) -> bool:
    """Whether a model type is known to be refused on a mesh, whatever else is in it."""
    sizes = MESHES[mesh]
    by_rows = sizes.sp and model_type in NOT_BY_ROWS
    return by_rows or (sizes.cp > 1 and model_type in NOT_IN_CONTEXT | LATE_IN_CONTEXT)


def holds(row: dict[str, Any]) -> bool:
    """Whether a row is as it has to be: equal, or refused where that is known."""
    if row["mesh"] == "cp2xpp2" and row["type"] in NOT_IN_STAGES:
        return row["verdict"] in _REFUSED and NOT_IN_STAGES[row["type"]] in row["why"]
    if row["mesh"] == "cp4" and row["type"] in NOT_OVER_FOUR:
        return row["verdict"] == "refused" and NOT_OVER_FOUR[row["type"]] in row["why"]
    by_rows = MESHES[row["mesh"]].sp and row["verdict"] == "refused" and "sequence_parallel" in row["why"]
    return row["verdict"] == "equal" or by_rows


@pooled(world_size=4, timeout=150)
def compare_on_ranks(case: Case, mesh: str, method: str, place: str) -> None:
    """Compare one case on one mesh; rank 0 writes the verdict to ``place``."""
    import torch.distributed as dist

    verdict = compare(case, MESHES[mesh], method)
    if dist.get_rank() == 0:
        Path(place).write_text(json.dumps(verdict._asdict()), encoding="utf-8")


def row_of(model_type: str, mesh: str, method: str, place: Path) -> dict[str, Any]:
    """Return the row of a model type on a mesh."""
    case, start = _main(model_type)[0], time.perf_counter()
    row = {"type": model_type, "head": str(case), "mesh": mesh, "method": method}
    try:
        compare_on_ranks(case, mesh, method, str(place))
        row |= json.loads(place.read_text(encoding="utf-8"))
    except AssertionError as error:  # a rank raised, or hangs
        row |= {"verdict": "failed", "why": str(error)[-3000:]}
    return row | {"seconds": round(time.perf_counter() - start, 2), "code": code_digest()}


def read_rows(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the last row of each model type, mesh and method in a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(row["type"], row["mesh"], row["method"]): row for row in map(json.loads, lines)}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each mesh: how many model types it has of each verdict; below, all that does not hold."""
    lines = []
    for mesh in MESHES:
        of_mesh = [row for row in rows if row["mesh"] == mesh]
        counts = collections.Counter(row["verdict"] for row in of_mesh)
        uncut = sum(row["verdict"] == "equal" and not row["cut"] for row in of_mesh) if MESHES[mesh].cp > 1 else 0
        if of_mesh:
            listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
            lines.append(f"{mesh}: {listed}" + (f" ({uncut} of them without a sequence that is cut)" if uncut else ""))
    bad = [row for row in rows if not holds(row)]
    return lines + [f"{row['verdict'].upper()}: {row['head']}, {row['mesh']}, {_line(row)}" for row in bad]


def _line(row: dict[str, Any]) -> str:
    lines = [line.strip() for line in row["why"].splitlines() if line.strip()] or [""]
    return (lines[0] if row["verdict"] in _REFUSED else lines[-1])[:200]


def main() -> int:
    """Make the rows that are missing, and print how many hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", default=WHOLE, help="model types; by default all")
    parser.add_argument("--meshes", nargs="*", default=_BESIDE, choices=MESHES, help=f"by default {', '.join(_BESIDE)}")
    parser.add_argument("--method", choices=("ulysses", "gather"), help="by default one of them for each model type")
    parser.add_argument("--rows", type=Path, default=_FILE, help="JSON, one row a line (default %(default)s)")
    options = parser.parse_args()
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    known = read_rows(options.rows)
    wanted = []
    for model_type in options.types:
        for mesh in options.meshes:
            if is_left_out(model_type, mesh):
                continue
            key = (model_type, mesh, options.method or method_of(model_type))
            wanted.append(key)
            if key in known and holds(known[key]):
                continue
            row = known[key] = row_of(*key, options.rows.with_suffix(".partial"))
            print(f"{model_type:32} {mesh:14} {row['verdict']:8} {row['seconds']:6.1f} s {_line(row)}", flush=True)
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    rows = [known[key] for key in wanted]
    print("\n".join(summary(rows)))
    return int(not all(map(holds, rows)))


if __name__ == "__main__":
    from benchmarks.context_parallel_policies import main as run  # ranks import the module by this name

    raise SystemExit(run())
