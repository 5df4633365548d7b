"""Results: one JSON file a benchmark, with machine, versions and the digest of the code that it measured."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, code_digest, machine, versions

FOLDER = ROOT / "benchmarks" / "results"
STALE = "older than the code"


def make(name: str, options: dict[str, Any], rows: Any, seconds: float) -> dict[str, Any]:
    """Make the result of a benchmark: its rows, and all that they depend on."""
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "code": code_digest(),
        "machine": machine(),
        "versions": versions(),
        "options": options,
        "seconds": round(seconds, 1),
        "rows": rows,
    }


def write(result: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Write ``NAME.json``, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['benchmark']}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    return partial.rename(path)


def read_all(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return all results in a folder by name."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {result["benchmark"]: result for result in found if "benchmark" in result}


def is_stale(result: dict[str, Any], digest: str | None = None) -> bool:
    """Whether the code has changed since it was measured."""
    return result.get("code") != (digest or code_digest())


def caption(result: dict[str, Any], digest: str | None = None, load: bool = True) -> str:
    """Return when, where and with which versions a result was measured, and whether the code has changed since."""
    place, made = result["machine"], result["versions"]
    note = f" **{STALE}**" if is_stale(result, digest) else ""
    busy = f", load {place['load']}" if load else ""
    return (
        f"{result['date']}, {place['cores']} cores of {place['cpu']}, {place['memory_gib']} GiB{busy}; "
        f"Python {made['python']}, torch {made['torch']}, transformers {made['transformers']}; "
        f"code `{result['code']}`{note}"
    )
