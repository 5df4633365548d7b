"""GPUs by name: their memory and speeds as their data sheets have them, and how much of that is reached."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import ConfigError, nearest

__all__ = ["GPUS", "Gpu", "find_gpu"]


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

    def with_memory(self, gigabytes: float | None) -> Gpu:
        """Return the same with another memory."""
        return self if gigabytes is None else replace(self, memory=gigabytes * 1e9)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80e9, 312e12, 19.5e12, 2.0e12, 300e9, 25e9),
        Gpu("h100", 80e9, 989e12, 67e12, 3.35e12, 450e9, 50e9),
        Gpu("h200", 141e9, 989e12, 67e12, 4.8e12, 450e9, 50e9),
        Gpu("b200", 180e9, 2250e12, 75e12, 8.0e12, 900e9, 50e9),
    )
}


def find_gpu(name: str, gigabytes: float | None = None) -> Gpu:
    """Return a GPU by its name, with another memory if one is given.

    Raises:
        ConfigError: the name is not known, or the memory is none.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu={name!r} is not known.{nearest(name, GPUS)} Known: {', '.join(GPUS)}")
    if gigabytes is not None and gigabytes <= 0:
        raise ConfigError(f"gpu-memory must be above 0 GB, not {gigabytes:g}")
    return GPUS[name].with_memory(gigabytes)
