"""``autopar env``: the versions, devices and settings that a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import autopar
from autopar import registry
from autopar.cli.app import Json, app, errors, print_json

_PACKAGES = ("torch", "transformers", "datasets", "safetensors", "pyyaml", "accelerate", "peft", "trl", "bitsandbytes")
_PREFIXES = ("AUTOPAR_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "CUDA_VISIBLE", "HF_HUB_OFFLINE")


@app.command(short_help="Print the versions, devices and settings for a bug report.", epilog="Example: autopar env")
def env(as_json: Json = False) -> None:
    """Print versions, devices, backends, transport, cores, policies, variables and the commit of the source tree."""
    with errors(as_json):
        found = collect()
        if as_json:
            print_json(found)
            return
        for name, value in found.items():
            print(f"* {name}: {_in_words(value)}")


def collect() -> dict[str, Any]:
    """Return the facts that :func:`env` prints, as plain data. Starts no process group."""
    import torch.distributed as dist

    from autopar.policy.match import supported_model_types

    packages = {name: _version(name) for name in _PACKAGES}
    backends = [name for name in ("gloo", "nccl", "xccl", "mpi", "ucc") if dist.is_backend_available(name)]
    return {
        "autopar": autopar.__version__,
        "commit": _commit(Path(autopar.__file__).parent),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "packages": {name: version for name, version in packages.items() if version},
        "devices": _devices(),
        "backends": backends,
        "shared memory (GB free)": round(shutil.disk_usage("/dev/shm").free / 1e9, 1),
        "cores": os.cpu_count(),
        "memory (GB)": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "model types": len(supported_model_types()),
        "features": [feature.name for feature in registry.features()],
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit(package: Path) -> str:
    """Return the commit of the repository that ``package`` lies in, with "+" for changes; "" for an installed wheel."""
    if not (package.parent / ".git").exists():
        return ""
    try:
        run = ["git", "-C", str(package.parent), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
        return subprocess.run(run, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _devices() -> list[str]:
    """Return one line per kind of GPU: number, name, memory and the version of CUDA or ROCm; empty for a CPU."""
    import torch

    found: dict[str, int] = {}
    version = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    try:
        for number in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(number)
            name = f"{of.name}, {of.total_memory / 1e9:.0f} GB, {version}"
            found[name] = found.get(name, 0) + 1
    except RuntimeError as error:  # a driver that does not fit
        return [f"not usable: {error}"]
    return [f"{count} x {name}" for name, count in found.items()]


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {of}" for name, of in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "unknown" if value in ("", None) else str(value)
