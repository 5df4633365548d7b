"""Find machines by name: nodes with GPUs and a network, from ``hardware.yaml``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from autopar.errors import ConfigError, nearest
from autopar.tools.planner.network import DATA, Network


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        memory, bandwidth: The memory in bytes, and its bandwidth in bytes per second.
        flops, flops_fp32: The peak FLOP/s of dense matmuls in half precision, and in fp32 (TF32 is off by default).
        products: The fraction of ``flops`` that the fastest matmul reaches.
    """

    name: str
    memory: float
    flops: float
    flops_fp32: float
    bandwidth: float
    products: float

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of matmuls in a precision."""
        return self.flops_fp32 if precision == "fp32" else self.flops


@dataclass(frozen=True)
class Node:
    """A machine with GPUs, connected to equal machines; ``storage``: bytes per second of reads and of writes."""

    name: str
    gpu: Gpu
    gpus: int
    network: Network
    storage: float


_UNITS = {"memory": 1e9, "tflops": 1e12, "tflops_fp32": 1e12, "bandwidth": 1e9, "products": 1}
GPUS = {name: Gpu(name, *(row[key] * unit for key, unit in _UNITS.items())) for name, row in DATA["gpus"].items()}
_PER_NODE = 8


def gpu_of(device: str) -> Gpu | None:
    """Return the GPU for a device name, for example ``NVIDIA A100-SXM4-80GB``; None if the name has no known GPU."""
    words = re.split(r"[\s-]+", device.lower())
    named = {*words, *(first + second for first, second in pairwise(words))}
    return next((GPUS[name] for name in sorted(GPUS, key=len, reverse=True) if name in named), None)


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name. Raises ConfigError if the name is unknown."""
    if name not in GPUS:
        raise ConfigError(
            f"gpu={name!r} is not known.{nearest(name, GPUS)} Known: {', '.join(GPUS)}.\n  For a different GPU use a "
            "similar one, and set --gpu-memory, --tflops and --memory-bandwidth from its data sheet."
        )
    return GPUS[name]


FIGURES = {
    "gpu_memory": ("memory", 1e9),
    "tflops": ("flops", 1e12),
    "memory_bandwidth": ("bandwidth", 1e9),
    "intra_node_bandwidth": ("intra", 1e9),
    "inter_node_bandwidth": ("inter", 1e9),
    "latency": ("latency", 1e-6),
    "storage_bandwidth": ("storage", 1e9),
}
"""Option that overrides a property of a machine -> its field and unit."""


def find_node(name: str = "dgx-h100", gpus_per_node: int | None = None, **figures: float | None) -> Node:
    """Return a machine by its name, with some properties overridden.

    Args:
        name: The name of a machine (``dgx-h100``), a number of equal GPUs (``4xl40s``), or a GPU (eight GPUs).
        gpus_per_node: The number of GPUs per node.
        figures: The overrides of :data:`FIGURES`: memory in GB, speeds in TFLOP/s and GB/s, latency in microseconds.

    Raises:
        ConfigError: If the name is unknown, or an override is not positive.
    """
    nodes: dict[str, str] = DATA["nodes"]
    form = re.fullmatch(r"(\d+)x(\w+)", nodes.get(name, name))
    count, kind = (int(form[1]), form[2]) if form else (_PER_NODE, name)
    kind = f"rtx{kind}" if f"rtx{kind}" in GPUS else kind
    if kind not in GPUS and not form and name not in nodes:
        raise ConfigError(
            f"node={name!r} is not known.{nearest(name, [*nodes, *GPUS])} Known: {', '.join(nodes)}; or COUNTxGPU, for "
            f"example 4xl40s, with one of {', '.join(GPUS)}.\n  For a different machine use a similar one, and set "
            "--gpu-memory, --tflops, --memory-bandwidth, --intra-node-bandwidth and --inter-node-bandwidth."
        )
    if count < 1 or (gpus_per_node is not None and gpus_per_node < 1):
        raise ConfigError(f"gpus-per-node must be at least 1, not {count if count < 1 else gpus_per_node}")
    gpu, links = find_gpu(kind), DATA["gpus"][kind]
    network = Network(links["intra"] * 1e9, links["inter"] * 1e9, links["link"] == "nvlink")
    node = Node(name, gpu, gpus_per_node or count, network, DATA["storage"] * 1e9)
    given: dict[str, Any] = {}
    for option, value in figures.items():
        field, unit = FIGURES[option]
        if value is not None:
            if value < 0 or (value == 0 and field != "latency"):
                raise ConfigError(f"{option.replace('_', '-')} must be above 0, not {value:g}")
            given[field] = value * unit
    return replace(
        node,
        gpu=replace(gpu, **{field: value for field, value in given.items() if hasattr(gpu, field)}),
        network=replace(network, **{field: value for field, value in given.items() if hasattr(network, field)}),
        storage=given.get("storage", node.storage),
    )
