"""GPUs by name: their memory and speeds (``gpus.yaml``), and how much of these is reached."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import ConfigError, nearest


@dataclass(frozen=True)
class Gpu:
    """A GPU and its network; bytes, bytes a second and operations a second.

    Attributes:
        flops: of dense half-precision products; ``flops_fp32`` of products in fp32 (TF32 is off by default).
        within, between: one way, between GPUs of a node, and to another node (a network card each).
        products, stream, network: parts of these speeds that large operations reach: the estimate's assumptions.
        launch: least time of an operation; ``latency``: of a collective or a message; ``hop``: from rank to rank of a
            ring.
    """

    name: str
    memory: float
    flops: float
    flops_fp32: float
    bandwidth: float
    within: float
    between: float
    products: float = 0.5
    stream: float = 0.6
    network: float = 0.7
    launch: float = 5e-6
    latency: float = 20e-6
    hop: float = 3e-6

    def peak(self, precision: str) -> float:
        """Return the operations a second of products in a precision."""
        return self.flops_fp32 if precision == "fp32" else self.flops


_FILE = Path(__file__).with_name("gpus.yaml")
_UNITS = {"memory": 1e9, "tflops": 1e12, "tflops_fp32": 1e12, "bandwidth": 1e9, "within": 1e9, "between": 1e9}
GPUS = {
    name: Gpu(name, *(row[key] * unit for key, unit in _UNITS.items()))
    for name, row in yaml.safe_load(_FILE.read_text("utf-8")).items()
}


def gpu_of(device: str) -> Gpu | None:
    """Return the GPU that a device's name names, as ``NVIDIA A100-SXM4-80GB`` does; None if none is known."""
    words = re.split(r"[\s-]+", device.lower())
    named = {*words, *(first + second for first, second in pairwise(words))}
    return next((gpu for name, gpu in GPUS.items() if name in named), None)


def find_gpu(
    name: str, gigabytes: float | None = None, tflops: float | None = None, bandwidth: float | None = None
) -> Gpu:
    """Return a GPU by its name, with other figures where they are given.

    Args:
        gigabytes, bandwidth: of the memory, GB and GB/s; ``tflops``: TFLOP/s of products in half precision.

    Raises:
        ConfigError: the name is not known, or a figure is none.
    """
    if name not in GPUS:
        raise ConfigError(
            f"gpu={name!r} is not known.{nearest(name, GPUS)} Known: {', '.join(GPUS)}. For another one take "
            "the nearest, with --gpu-memory, --tflops and --bandwidth of its data sheet"
        )
    known = GPUS[name]
    own = {"memory": (gigabytes, 1e9), "flops": (tflops, 1e12), "bandwidth": (bandwidth, 1e9)}
    for option, (value, _) in zip(("gpu-memory", "tflops", "bandwidth"), own.values(), strict=True):
        if value is not None and value <= 0:
            raise ConfigError(f"{option} must be above 0, not {value:g}")
    figures: dict[str, Any] = {key: value * unit for key, (value, unit) in own.items() if value is not None}
    return replace(known, **figures)
