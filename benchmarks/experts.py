"""Steps of a small mixture over 2 ranks: its experts on each replica, over both of them, or over tensor-parallel ranks.

    python -m benchmarks experts --rounds 20

All ways train on the same tokens: two replicas have half of them each. ``sent`` is what a rank's collectives are given
in a step, and ``held`` its weights, gradients and states of AdamW.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from autopar.tools.verification.recording import recording_of
from benchmarks.ranks import run_ranks
from benchmarks.rounds import Turns, Variant, interleave, summary

_WAYS: dict[str, dict[str, Any]] = {
    "dp 2, all experts on each": {},
    "dp 2, ep 2": {"ep": 2},
    "dp 2, ep 2, all_reduce": {"ep": 2, "model_parallelism": {"expert_dispatch": "all_reduce"}},
    "tp 2, each expert cut": {"tp": 2},
    "tp 2, ep 2": {"tp": 2, "ep": 2},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--experts", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=10)


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all ways with each number of experts."""
    found: list[dict[str, Any]] = run_ranks("benchmarks.experts:rank_main", options, 2)[0]
    return found


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: all ways in turn."""
    turns = Turns(options["folder"])
    return [entry for experts in options["experts"] for entry in _rows(experts, options["rounds"], turns)]


def _rows(experts: int, rounds: int, turns: Turns) -> list[dict[str, Any]]:
    steps = {name: _Step(experts, config) for name, config in _WAYS.items()}
    found = summary(interleave({name: Variant(step) for name, step in steps.items()}, rounds, turns, warm_up=2))
    return [
        {
            "experts": experts,
            "way": name,
            "step, ms": found[name]["ms"],
            "CPU ms a rank": found[name]["cpu_ms"],
            "sent, MiB": round(step.sent() / 2**20, 2),
            "held, MiB": round(step.held() / 2**20, 1),
        }
        for name, step in steps.items()
    ]


class _Step:
    """A training step of one way."""

    def __init__(self, experts: int, config: dict[str, Any]) -> None:
        import autopar

        model = mixture(experts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.average = autopar.average_gradients
        self.model, self.optimizer = autopar.initialize(model.train(), config, optimizer=optimizer)
        whole = torch.randint(0, 1024, (4, 128), generator=torch.Generator().manual_seed(1))
        replica, replicas = self.model.mpu.dp.rank, self.model.mpu.dp.size
        self.ids = whole.chunk(replicas)[replica]

    def __call__(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.average(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sent(self) -> int:
        """Return the bytes that this rank's collectives are given in a step."""
        with recording_of(self.model.mpu.tp) as found:
            self()
        return sum(each.elements * each.dtype.itemsize for each in found)

    def held(self) -> int:
        """Return the bytes of weights, gradients and the optimizer's state on the fullest rank."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        own = 2 * sum(p.nbytes for p in self.model.parameters()) + sum(value.nbytes for value in states)
        largest = torch.tensor(own)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)


def mixture(experts: int) -> Any:
    """Build a small Qwen3-MoE, each token of which chooses two experts; the same weights on every rank."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)
