"""Estimate the time of a collective or message over a network of nodes with NCCL's cost model. Pure functions.

For each algorithm (ring, tree) and protocol (LL, LL128, Simple) NCCL adds a latency to bytes divided by a bandwidth.
It selects the fastest combination. ``hardware.yaml`` has the constants. The number of hops determines the time of small
messages, and the slowest link determines the time of large messages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DATA: Any = yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text("utf-8"))
"""The contents of ``hardware.yaml``."""

_NCCL, _ASSUMED = DATA["nccl"], DATA["assumed"]
_PROTOCOLS = ("LL", "LL128", "Simple")
_CHANNELS = 16


class Group(NamedTuple):
    """The number of communicating ranks, and of nodes. All nodes have equally many of these ranks."""

    ranks: int
    nodes: int = 1

    @classmethod
    def of(cls, size: int, stride: int, gpus_per_node: int) -> Group:
        """Return the group of ``size`` ranks with a distance of ``stride``."""
        return cls(size, -(-size // -(-gpus_per_node // stride)))

    def steps(self, kind: str) -> int:
        """Return the number of steps of a ring collective. In each step a rank sends one shard of the tensor."""
        return (2 if kind == "all_reduce" else 1) * (self.ranks - 1)

    def sent(self, kind: str, size: int) -> int:
        """Return the bytes that a rank sends in a ring collective of ``size`` bytes, or for a message."""
        return size if kind == "send" else size * self.steps(kind) // self.ranks


@dataclass(frozen=True)
class Network:
    """The links within and between nodes.

    Attributes:
        intra: The one-way bandwidth from a GPU to its node, in bytes per second.
        inter: The one-way bandwidth from a GPU to other nodes, its share of the network cards, in bytes per second.
        nvlink: A flag, set if NVLink connects the GPUs of a node, else PCIe.
        latency: The seconds of a hop between nodes, in addition to NCCL's constant for RDMA.
    """

    intra: float
    inter: float
    nvlink: bool = True
    latency: float = 0.0

    def seconds(self, kind: str, size: int, group: Group) -> float:
        """Return the seconds of a collective whose full tensor has ``size`` bytes, or of a message (``send``)."""
        return _seconds(self, kind, size, group) if group.ranks > 1 else 0.0

    def ring_bandwidth(self, group: Group) -> float:
        """Return the bytes per second that a rank sends over a ring, for large messages.

        The ranks of a node use separate network cards in parallel. Efficiency falls with the number of nodes.
        """
        inside = self.intra * _NCCL["usable"]["nvlink" if self.nvlink else "pcie"]
        return inside if group.nodes == 1 else min(inside, self.usable_inter(group.nodes) * group.ranks / group.nodes)

    def usable_inter(self, nodes: int) -> float:
        """Return the bytes per second from a GPU to other nodes, in a group on ``nodes`` nodes."""
        return self.inter * _NCCL["usable"]["net"] / (1 + _ASSUMED["fabric_loss"] * log2(nodes))


def exposed(total: float, work: float) -> float:
    """Return the seconds of communication, out of ``total``, that do not overlap with ``work`` seconds.

    Collectives do not count as work, because they use the same links.
    """
    return total - _ASSUMED["overlap"] * min(total, work)


@functools.cache
def _seconds(network: Network, kind: str, size: int, group: Group) -> float:
    if kind == "all_to_all":
        return _all_to_all(network, size, group)
    sent, steps = group.sent(kind, size), group.steps(kind)
    between = 0 if group.nodes == 1 else 2 * group.nodes if kind == "all_reduce" else group.nodes - 1
    large = kind == "all_reduce" and group.nodes > 1 and size >= 64 * _CHANNELS * group.ranks
    times = [
        _ring(network, sent, group, protocol, steps, between, plateau=large and protocol == "Simple")
        for protocol in _protocols(network)
    ]
    return min([*times, *(_trees(network, size, group) if kind == "all_reduce" else ())])


def _protocols(network: Network) -> tuple[str, ...]:
    return _PROTOCOLS if network.nvlink else ("LL", "Simple")


def _hop(network: Network, algorithm: str, protocol: str, *, between: bool) -> float:
    """Return the seconds of a hop within a node, or between nodes."""
    link = "net" if between else "nvlink" if network.nvlink else "pcie"
    own = _NCCL["hop"][link][algorithm][_PROTOCOLS.index(protocol)] * 1e-6
    return own + (network.latency * (2 if protocol == "Simple" else 1) if between else 0.0)


def _ring(
    network: Network, sent: int, group: Group, protocol: str, steps: int, between: int, *, plateau: bool = False
) -> float:
    """Return the seconds of a ring collective.

    Args:
        sent, steps, between: The bytes that each rank sends, the number of hops, and of hops between nodes.
        plateau: A flag for a large all-reduce, which has a different latency.
    """
    bandwidth = network.ring_bandwidth(group)
    if protocol == "LL":
        bandwidth = min(bandwidth / 4, _low_latency(group.nodes))
    elif protocol == "LL128":
        bandwidth *= 0.92 if group.ranks >= 2 * group.nodes or group.nodes == 1 else 0.7
    posting = _NCCL["posting"] * 1e-6 * (3 if protocol == "Simple" else 1) if between else 0.0
    inside = max(_hop(network, "ring", protocol, between=False), posting) * max(steps - between, 0)
    latency = _base("ring", protocol) + inside + between * _hop(network, "ring", protocol, between=True)
    return latency * (_NCCL["plateau"] if plateau else 1) + sent / bandwidth


def _trees(network: Network, size: int, group: Group) -> Iterator[float]:
    """Yield the seconds of an all-reduce over a tree of nodes, with a chain of ranks on each node, by protocol."""
    for protocol in _protocols(network):
        bandwidth = 0.92 * network.ring_bandwidth(group)
        if protocol == "LL":
            bandwidth = min(bandwidth / 3.8, _low_latency(group.nodes))
        elif protocol == "LL128":
            bandwidth *= 7 / 9 if group.nodes == 1 else 120 / 128
        place = max(size // 64, 1).bit_length() - 1
        corrections = _NCCL["tree_correction"][_PROTOCOLS.index(protocol)]
        bandwidth *= 0.5 * (corrections[place] if place < len(corrections) else 1.0)
        inside = (group.ranks / group.nodes - 1) * _hop(network, "tree", protocol, between=False)
        outside = int(log2(group.nodes)) * _hop(network, "tree", protocol, between=True)
        yield _base("tree", protocol) + 2 * (inside + outside) + size / bandwidth


def _all_to_all(network: Network, size: int, group: Group) -> float:
    """Return the seconds of an all-to-all. Links within and between nodes work at the same time."""
    on_node = group.ranks / group.nodes
    part = size / group.ranks
    inside = part * (on_node - 1) / network.ring_bandwidth(Group(group.ranks))
    outside = part * (group.ranks - on_node) / network.usable_inter(group.nodes)
    latency = _base("ring", "LL") + (on_node - 1) * _hop(network, "ring", "LL", between=False)
    if group.nodes > 1:
        latency += _hop(network, "ring", "LL", between=True) + (group.ranks - on_node) * _NCCL["posting"] * 1e-6
    return latency + max(inside, outside)


def _base(algorithm: str, protocol: str) -> float:
    return float(_NCCL["base"][algorithm][_PROTOCOLS.index(protocol)]) * 1e-6


def _low_latency(nodes: int) -> float:
    return float(_NCCL["low_latency"][min(nodes, 3) - 1]) * 1e9
