"""Machine, versions, and a digest of the measured code: what a number means nothing without."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import io
import os
import platform
import subprocess
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy")


def code_digest(root: Path = ROOT) -> str:
    """Digest the code and policies that a measurement runs: not ``autopar/tools``, comments, docstrings and spaces."""
    found = hashlib.sha256()
    package = root / "autopar"
    files = [*package.rglob("*.py"), *package.rglob("*.yaml"), *(root / "policies").rglob("*.yaml")]
    for path in sorted(files):
        if not path.is_relative_to(package / "tools"):
            content = path.read_bytes()
            code = _statements(content) if path.suffix == ".py" else content
            found.update(f"{path.relative_to(root)} {len(code)}\n".encode() + code)
    return found.hexdigest()[:16]


@functools.cache
def _statements(source: bytes) -> bytes:
    """Return what is in a file beside comments, docstrings and the lengths of spaces, the same with every Python."""
    lines = source.decode().split("\n")
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return " ".join(" ".join(lines).split()).encode()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Return processor, cores that this process may use, memory, kernel and load."""
    return {
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }


def gpu_facts() -> dict[str, Any]:
    """Return what torch and nvidia-smi tell about GPUs; a reason where they tell nothing."""
    import torch

    facts: dict[str, Any] = {"available": torch.cuda.is_available(), "torch_cuda": torch.version.cuda}
    if facts["available"]:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "nccl": _tried(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
            "cudnn": _tried(torch.backends.cudnn.version),
        }
    facts["nvidia_smi"] = _tried(_nvidia_smi)
    return facts


def _nvidia_smi() -> str:
    asked = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,power.limit,mig.mode.current"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def _tried(work: Any) -> Any:
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _line(file: str, key: str) -> str:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
