"""Seconds, bytes and memory of saving a model with AdamW on 4 ranks, by mesh, next to FSDP2 and torch's checkpoints.

    python -m benchmarks saving                     # an even share of 100 MB for each rank
    python -m benchmarks saving --megabytes 40 --rounds 1 --meshes "dp 4, ZeRO 3" --disk /mnt/disk

A share is all bytes of the weights and the optimizer's state divided by the number of ranks. ``bytes`` are those that
the busiest rank writes, and ``peak`` is how much the anonymous memory of a rank (RssAnon, read every millisecond) grows
at most above what it was before the save; both in shares. ``async`` is the same of a save in the background, of which
``s`` is the time until training goes on. ``torch`` is FSDP2 by itself, saved by ``torch.distributed.checkpoint``; in
turns with it, autopar saves the same model with ZeRO 3.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.process_memory import status
from benchmarks.ranks import run_ranks

RANKS = 4
HIDDEN = 512
MESHES: dict[str, dict[str, Any]] = {
    **{f"dp 4, ZeRO {stage}": {"zero": {"stage": stage}} for stage in range(4)},
    **{f"tp 2 x dp 2, ZeRO {stage}": {"tp": 2, "zero": {"stage": stage}} for stage in (2, 3)},
    "pp 2 x dp 2": {"pp": 2},
    "tp 2 x pp 2": {"tp": 2, "pp": 2},
    "ep 2 x dp 2": {"ep": 2},
    "torch": {},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--megabytes", type=float, default=100.0, help="of an even share")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=[*MESHES])
    parser.add_argument("--disk", help="where to make the temporary folder: the disk to measure")


class Peak:
    """Samples the anonymous memory of this process inside of ``with``; ``grown`` is the most above the start."""

    def __enter__(self) -> Peak:
        self.start = self.most = status("RssAnon")
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ends.wait(0.001):
            self.most = max(self.most, status("RssAnon"))

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.grown = max(self.most, status("RssAnon")) - self.start


def build(megabytes: float, experts: bool) -> Any:
    """Make a model whose weights are a third of the shares, without drawing them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
    from transformers.initialization import no_init_weights

    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 8, "num_key_value_heads": 8}
    sizes |= {"vocab_size": 4096, "intermediate_size": 3 * HIDDEN // (2 if experts else 1), "tie_word_embeddings": True}
    kind, config = (MixtralForCausalLM, MixtralConfig) if experts else (LlamaForCausalLM, LlamaConfig)
    layer = HIDDEN * HIDDEN * (4 + (4 * 4.5 if experts else 9))
    count = round((megabytes * 1e6 * RANKS / 12 - 4096 * HIDDEN) / layer / 2) * 2
    with no_init_weights():
        model = kind(config(num_hidden_layers=max(2, count), **sizes, **({"num_local_experts": 4} if experts else {})))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def made(mesh: str, megabytes: float) -> tuple[Any, Any, Callable[[str, bool], None]]:
    """Return a model after a step, its optimizer, and a function that saves both."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    import autopar

    model, inputs = build(megabytes, "ep" in mesh), torch.arange(16).view(2, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if mesh == "torch":
        for layer in (*model.model.layers, model):
            fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        pipeline = {"pipeline": {"num_microbatches": 2}} if "pp" in mesh else {}
        model, optimizer = autopar.initialize(model, {**MESHES[mesh], **pipeline}, optimizer=optimizer)
    if "pp" in mesh:
        model.execute_pipeline({"input_ids": inputs, "labels": inputs}, optimizer=optimizer)
    else:
        model(input_ids=inputs, labels=inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    def save(folder: str, in_background: bool) -> None:
        if mesh != "torch":
            model.save_parallelized(folder, optimizer=optimizer, timeout=600, async_save=in_background)
            return
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder)

    return model, optimizer, save


def rank_main(options: dict[str, Any]) -> dict[str, Any]:
    """On every rank: train a step, save, and return what it took."""
    import torch.distributed as dist

    model, _, save = made(options["mesh"], options["megabytes"])
    kinds = {"": save, "async ": save}
    if options["mesh"] == "torch":
        kinds = {"": save, "autopar ": made("dp 4, ZeRO 3", options["megabytes"])[2]}
    found: dict[str, list[float]] = {}
    for number in range(options["rounds"] + 1):
        for kind in [*kinds][:: 1 if number % 2 else -1]:
            dist.barrier()
            with Peak() as peak:
                start = time.perf_counter()
                kinds[kind](options["target"] + kind.strip(), kind == "async ")
                seconds = time.perf_counter() - start
                if kind == "async ":
                    model.wait_for_save()
            found.setdefault(f"{kind}peak", []).append(peak.grown)
            if number:
                found.setdefault(f"{kind}s", []).append(seconds)
    return {name: max(values) if "peak" in name else statistics.median(values) for name, values in found.items()}


def written(folder: Path) -> list[int]:
    """Return the bytes of each rank's files."""
    found: dict[str, int] = {}
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".distcp"):  # model-tp0-pp1-dp1, __3_0
            rank = path.stem.partition("-")[2] or path.stem.split("_")[2]
            found[rank] = found.get(rank, 0) + path.stat().st_size
    return [*found.values()]


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Save on each mesh in fresh processes."""
    rows = []
    for mesh in options["meshes"]:
        with tempfile.TemporaryDirectory(prefix="autopar-saving-", dir=options["disk"]) as name:
            target = Path(name, "checkpoint")
            given = {
                "mesh": mesh,
                "target": str(target),
                "megabytes": options["megabytes"],
                "rounds": options["rounds"],
            }
            ranks = run_ranks("benchmarks.saving:rank_main", given, RANKS)
            each = written(target)
        share = sum(each) / RANKS
        row = {"mesh": mesh, "share, MB": round(share / 1e6), "bytes / share": round(max(each) / share, 2)}
        for kind in ("", "async ", "autopar "):
            if f"{kind}s" in ranks[0]:
                row[f"{kind}s"] = round(max(rank[f"{kind}s"] for rank in ranks), 2)
                row[f"{kind}peak / share"] = round(max(rank[f"{kind}peak"] for rank in ranks) / share, 2)
        if "autopar s" in row:
            row["torch / autopar"] = round(row["s"] / row["autopar s"], 2)
        rows.append(row)
    return rows
