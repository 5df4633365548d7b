"""Planted faults: all are caught, and most are attributed to the module that they were planted in."""

from __future__ import annotations

import functools
import os
import time
from contextlib import ExitStack
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from autopar.config import ParallelConfig
from autopar.verification.ranks import checks_of, verify_on_ranks
from autopar.verification.report import Report
from tests.parity import language_batches, randomise
from tests.pool import pooled
from tests.small import gpt2, llama
from tests.verification.faults import FAULTS, Fault, text_of

_EVEN = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 36, "vocab_size": 132}


@functools.cache
def _model(name: str) -> Any:
    if name == "gpt2":
        return gpt2(n_embd=32, n_head=4, vocab_size=132)
    if name == "qwen3":
        torch.manual_seed(0)
        return randomise(Qwen3ForCausalLM(Qwen3Config(**_EVEN, num_hidden_layers=2, num_key_value_heads=2, head_dim=8)))
    return llama(**_EVEN, num_key_value_heads=1 if name == "mqa" else 2)


def _verified(fault: Fault) -> Report:
    sizes = {name: size for name, size in fault.mesh.items() if name != "data_parallel_size"}
    config = ParallelConfig.parse({"model_parallelism": sizes})
    batches = language_batches(132, count=2)
    with ExitStack() as stack:
        if fault.before is not None:
            fault.before(stack)
        after = fault.after
        change = None if after is None else lambda session: after(session, stack)
        checks = [name for name in checks_of(fault.checks) if name != "weights" or fault.after is None]
        return verify_on_ranks(_model(fault.model), config, text_of(fault), batches, checks, change)


@pooled(world_size=2, timeout=300)
def test_planted_faults() -> None:
    attributed, missed, astray = [], [], []
    for fault in FAULTS:
        start = time.perf_counter()
        report = _verified(fault)
        found = report.culprit.module if report.culprit is not None else None
        if os.environ.get("SHOW_FAULTS") and torch.distributed.get_rank() == 0:
            rows = [str(row)[:150] for row in report.rows if row.holds is False]
            print(f"{time.perf_counter() - start:.2f} {fault.name}: {report.culprit and str(report.culprit)[:300]} {rows[:2]}", flush=True)
        if report.ok:
            missed.append(fault.name)
        elif fault.refused:
            assert report.rows[0].check == "plan", fault.name
            (attributed if fault.refused in report.rows[0].note else astray).append((fault.name, report.rows[0].note))
        elif found is not None and found in fault.modules:
            attributed.append((fault.name, found))
        else:
            astray.append((fault.name, found))
    assert not missed, missed
    print(len(attributed), len(FAULTS), astray)
    assert len(FAULTS) >= 50
    assert len(attributed) >= 40, astray
