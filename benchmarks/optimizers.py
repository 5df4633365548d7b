"""Steps of optimizers that look at whole matrices: owned by one rank, on all, or Muon's in shards, beside AdamW's.

    python -m benchmarks optimizers --rounds 20

Tensor-parallel size 2, or that of ``--ranks``: forward, backward and ``optimizer.step()``; ``step, ms`` is the time of
that alone. All ranks together send ``sent`` for it, and the fullest rank keeps ``state``.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import Size, build, tokens
from benchmarks.ranks import run_ranks
from benchmarks.rounds import Turns, Variant, interleave, summary
from benchmarks.step import ROWS

_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW, shards": ("AdamW", {}),
    "Muon, owned": ("Muon", {"optimizer": {"full_matrix": "owned"}}),
    "Muon, duplicated": ("Muon", {"optimizer": {"full_matrix": "duplicated"}}),
    "Muon, sharded": ("Muon", {"optimizer": {"full_matrix": "sharded"}}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["llama"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=10)


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all rows, in a world of each size."""
    found: list[dict[str, Any]] = []
    for ranks in options["ranks"]:
        found += run_ranks("benchmarks.optimizers:rank_main", options, ranks)[0]
    return found


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: all ways of each row in turn."""
    turns = Turns(options["folder"])
    return [entry for row in options["rows"] for entry in _rows(row, *ROWS[row], options["rounds"], turns)]


def _rows(row: str, family: str, size: Size, rounds: int, turns: Turns) -> list[dict[str, Any]]:
    ways = {name: _Step(family, size, *way) for name, way in _WAYS.items()}
    found = summary(interleave({name: Variant(step) for name, step in ways.items()}, rounds, turns, warm_up=2))
    return [
        {
            "row": row,
            "tp": dist.get_world_size(),
            "way": name,
            "whole step, ms": found[name]["ms"],
            "step, ms": round(1000 * sorted(step.seconds)[len(step.seconds) // 2], 1),
            "sent, MiB": round(_sum(step.sent) / 2**20 / len(step.seconds), 1),
            "state, MiB": round(_max(step.state()) / 2**20, 1),
        }
        for name, step in ways.items()
    ]


class _Step:
    """A training step of one way, which notes the time of the optimizer's and the bytes that this rank sends for it."""

    def __init__(self, family: str, size: Size, kind: str, config: dict[str, Any]) -> None:
        import autopar
        from autopar.data_parallel import whole_parameters

        model = build(family, size)
        made = getattr(torch.optim, kind)([p for p in model.parameters() if p.ndim == 2], lr=1e-4)
        sizes = {"model_parallelism": {"tensor_parallel_size": dist.get_world_size()}}
        self.model, self.optimizer = autopar.initialize(model, {**sizes, **config}, optimizer=made)
        self.model.train()
        self.ids, self.sent, self._bytes = tokens(size), 0, whole_parameters
        self.seconds: list[float] = []

    def __call__(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        exchange = self._bytes.exchange

        def counted(sent: Any, due: Any, axis: Any) -> None:
            self.sent += sum(tensor.nbytes for tensors in sent for tensor in tensors)
            exchange(sent, due, axis)

        self._bytes.exchange = counted
        start = time.perf_counter()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self._bytes.exchange = exchange
        self.optimizer.zero_grad()

    def state(self) -> int:
        """Return the bytes of the optimizer's state on this rank."""
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _sum(number: int) -> float:
    total = torch.tensor(float(number), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _max(number: int) -> float:
    largest = torch.tensor(float(number), dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
