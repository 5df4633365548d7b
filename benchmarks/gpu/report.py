"""The report: sections in processes of their own, each with a limit; written after each one, whatever became of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.machine import ROOT
from benchmarks.ranks import RanksTimeout, run_ranks
from benchmarks.tables import cell


class Section(NamedTuple):
    """A section: ``module:function(options, device, notes)`` on so many processes, and its limit in seconds.

    Attributes:
        backend: of the default process group; empty where ``initialize`` makes it.
        environment: of its ranks; ``{rank}`` is the rank.
    """

    function: str
    limit: float
    world: int = 1
    backend: str = ""
    environment: Mapping[str, str] = {}


# nccl takes one rank a GPU, and knows a GPU by its host: with a host of its own each rank may have the same one.
TWO_HOSTS = {"NCCL_HOSTID": "host-{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
BOTH = "cpu:gloo,cuda:nccl"
_SINGLE, _SHARED = "benchmarks.gpu.single:", "benchmarks.gpu.shared:"
SECTIONS: dict[str, Section] = {
    "tests": Section("", 240),
    "nccl": Section(_SINGLE + "nccl", 60),
    "overhead": Section(_SINGLE + "overhead", 90),
    "training": Section(_SINGLE + "training", 120),
    "decode": Section(_SINGLE + "decode", 90),
    "memory": Section(_SINGLE + "memory", 60),
    "loss": Section(_SINGLE + "loss_memory", 60),
    "loading": Section(_SINGLE + "loading", 60),
    "offload": Section(_SINGLE + "offload", 75),
    "tensor parallel, shared": Section(_SHARED + "tensor_parallel", 75, 2, BOTH, TWO_HOSTS),
    "pipeline, shared": Section(_SHARED + "pipeline", 75, 2, BOTH, TWO_HOSTS),
    "replicas, shared": Section(_SHARED + "replicas", 75, 2, BOTH, TWO_HOSTS),
}
BUDGET = 520.0  # seconds of all sections: below 9 minutes with what starting takes


def section_main(options: dict[str, Any]) -> None:
    """On every rank of a section: call it with a device and a file for its notes."""
    import torch

    from benchmarks.gpu.device import Device, Notes

    if options["device"] == "cuda":  # what the CPU does there is only preparation
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
    os.environ |= {key: value.format(rank=os.environ["LOCAL_RANK"]) for key, value in options["environment"].items()}
    module, _, name = options["function"].partition(":")
    notes = Notes(Path(options["notes"]) / f"{os.environ['LOCAL_RANK']}.json")
    getattr(importlib.import_module(module), name)(options, Device(options["device"]), notes)


def run_section(section: Section, options: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Run a section; its notes, and its error if it has one. Never raises."""
    start, error, late = time.perf_counter(), "", False
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-") as folder:
        try:
            if not section.function:
                return run_tests(limit)
            cuda = options["device"] == "cuda"
            given = {**options, "function": section.function, "notes": folder, "environment": dict(section.environment)}
            backend = section.backend if cuda or not section.backend else "gloo"
            method = "spawn" if cuda else "forkserver"
            main = "benchmarks.gpu.report:section_main"
            run_ranks(main, given, section.world, backend=backend, timeout=limit, method=method)
        except Exception as failure:
            late = isinstance(failure, RanksTimeout)
            error = str(failure) if isinstance(failure, RuntimeError) else traceback.format_exc()
        notes = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    seconds = round(time.perf_counter() - start, 1)
    return {"status": "timed out" if late else status(error, notes), "seconds": seconds, "error": error, "notes": notes}


def status(error: str, notes: Sequence[Mapping[str, Any]]) -> str:
    """Say in a word or two what became of a section."""
    parts = sum(isinstance(value, dict) and "traceback" in value for found in notes for value in found.values())
    return "failed" if error else f"{parts} parts failed" if parts else "ok"


def run_tests(limit: float) -> dict[str, Any]:
    """Run the tests that are marked ``gpu``."""
    asked = "-q -rsfE --tb=short -n 3 --tier all -m gpu tests/gpu"
    asked += " -p no:benchmark"  # of pytest-benchmark, where that is installed: it warns beside -n
    command = [sys.executable, "-m", "pytest", *asked.split()]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=limit)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = f"{_text(late.stdout)}{_text(late.stderr)}\nnot done after {limit:.0f} s", None
    found = {"status": {0: "ok", 5: "no tests", None: "timed out"}.get(code, "failed"), "error": ""}
    notes = [{"last line": (output.strip().splitlines() or [""])[-1], "output": output[-12000:]}]
    return {**found, "seconds": round(time.perf_counter() - start, 1), "notes": notes}


def _text(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def run(options: dict[str, Any], names: Sequence[str], folder: Path, gpu: Mapping[str, Any]) -> dict[str, Any]:
    """Run the sections within the budget; JSON and Markdown are written before the first and after each."""
    start = time.perf_counter()
    done: dict[str, Any] = {}
    name = "gpu" if options["device"] == "cuda" else "gpu-on-cpu"
    for section in [None, *names]:
        if section is not None:
            left = options["budget"] - (time.perf_counter() - start)
            if left < 5:
                found = {"status": "skipped", "seconds": 0.0, "notes": []}
                done[section] = {**found, "error": f"no time left of {options['budget']:.0f} s"}
            else:
                done[section] = run_section(SECTIONS[section], options, min(left, SECTIONS[section].limit))
            print(f"{section}: {done[section]['status']}, {done[section]['seconds']} s", flush=True)
        rows = [{"section": key, "status": one["status"], "s": one["seconds"]} for key, one in done.items()]
        rows += [{"section": key, "status": "not run yet", "s": None} for key in names if key not in done]
        result = results.make(name, options, rows, time.perf_counter() - start)
        result |= {"gpu": dict(gpu), "sections": done}
        results.write(result, folder)
        (folder / f"{name}.md").write_text(markdown(result))
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """Write the report for people."""
    lines = ["# Report of a GPU", "", results.caption(dict(result)), ""]
    lines += [f"* {key}: {_inline(value)}" for key, value in result["gpu"].items()]
    lines += ["", "| section | status | s |", "| --- | --- | --- |"]
    lines += [f"| {row['section']} | {row['status']} | {cell(row['s'])} |" for row in result["rows"]]
    for name, section in result["sections"].items():
        lines += ["", f"## {name}: {section['status']}", ""]
        if section["error"]:
            lines += ["```text", section["error"].rstrip(), "```", ""]
        for rank, notes in enumerate(section["notes"]):
            lines += [f"Rank {rank}:", ""] if len(section["notes"]) > 1 else []
            for key, value in notes.items():
                lines += _note(key, value)
    return "\n".join(lines) + "\n"


def _note(key: str, value: Any) -> list[str]:
    if isinstance(value, dict) and "traceback" in value:
        return [f"* **{key} failed**: {_inline(value['error'])}", "", "```text", value["traceback"].rstrip(), "```", ""]
    if isinstance(value, str) and "\n" in value:
        return [f"* {key}:", "", "```text", value.rstrip(), "```", ""]
    if isinstance(value, dict) and value and all(isinstance(entry, dict) for entry in value.values()):
        header = list(dict.fromkeys(column for entry in value.values() for column in entry))
        rows = [
            f"| {name} | " + " | ".join(cell(entry.get(key)) for key in header) + " |" for name, entry in value.items()
        ]
        return [f"* {key}:", "", f"| | {' | '.join(header)} |", "| --- " * (len(header) + 1) + "|", *rows, ""]
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return [f"* {key}:", *[f"  * {entry}" for entry in value]]
    return [f"* {key}: {_inline(value)}"]


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell(entry)}" for key, entry in value.items())
    return cell(value)
