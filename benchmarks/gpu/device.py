"""The device that a section runs on, a GPU or, to try the sections, the CPU; and the notes that a section takes."""

from __future__ import annotations

import contextlib
import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.process_memory import forget_high_water, high_water

MIB = 2**20
# Dense bf16 FLOP/s without sparsity, by what the name contains; the first match counts.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "T4": 65e12,
}


class Device:
    """A device, its clock and its memory."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.torch = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(0)

    @property
    def name(self) -> str:
        """Return its name."""
        return torch.cuda.get_device_name(0) if self.kind == "cuda" else "CPU"

    def sync(self) -> None:
        """Wait for all that was started."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def synced(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Return ``work`` with a wait at its end, for a clock."""

        def run() -> None:
            work()
            self.sync()

        return run

    def seconds(self, work: Callable[[], Any]) -> float:
        """Time one call."""
        self.sync()
        start = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - start

    def peak_mib(self, work: Callable[[], Any]) -> float:
        """Return how much the memory of tensors grows at most during a call; on the CPU the resident set."""
        self.sync()
        if self.kind == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.seconds(work)
            return round((torch.cuda.max_memory_allocated() - before) / MIB, 1)
        before = forget_high_water()
        work()
        return round((high_water() - before) / MIB, 1)

    def held_mib(self) -> float:
        """Return the memory of tensors now."""
        return round(torch.cuda.memory_allocated() / MIB, 1) if self.kind == "cuda" else 0.0

    def release(self) -> None:
        """Give cached memory back, and what only reference cycles hold."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()


def peak_flops(name: str) -> float | None:
    """Return the bf16 peak of a GPU by its name; None if it is not in the list."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def mfu(parameters: int, layers: int, hidden: int, seq: int, tokens_per_s: float, peak: float | None) -> float | None:
    """Return the share of the peak that a training step reaches: 6 N + 12 L h s FLOPs a token (PaLM, appendix B)."""
    if peak is None:
        return None
    return (6 * parameters + 12 * layers * hidden * seq) * tokens_per_s / peak


class Notes:
    """What a section has found, written to a file at each note: a section that dies later keeps them.

    Args:
        path: of the file; None keeps them in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.found: dict[str, Any] = {}

    def __call__(self, name: str, value: Any) -> Any:
        """Note a value, and return it."""
        self.found[name] = value
        if self.path is not None:
            self.path.write_text(json.dumps(self.found))
        return value

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note the error inside, if there is one, instead of raising it: the other parts go on."""
        try:
            yield
        except Exception as error:
            self(
                name, {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": traceback.format_exc()[-6000:]}
            )
