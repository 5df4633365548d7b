"""Loss curves: a small GPT-2 trained on the tutorials' text by one process, and by tp 2 x dp 2.

    python -m benchmarks curves --steps 400

One process runs transformers and AdamW alone. Four processes run the same loop with autopar. Both begin with the same
weights, and see the same samples in the same order: those of a step are shared by the replicas.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.ranks import run_ranks

ONE, MESH = "one process", "tp 2 x dp 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, of all replicas")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3)


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train both, and put their losses side by side."""
    with tempfile.TemporaryDirectory() as words:  # of the tokenizer, which the first one trains
        options = {**options, "words": words}
        one = run_ranks("benchmarks.curves:rank_main", {**options, "config": None}, 1)[0]
        mesh = run_ranks("benchmarks.curves:rank_main", {**options, "config": {"tp": 2}}, 4)[0]
    return [{"step": step, ONE: a, MESH: b} for step, (a, b) in enumerate(zip(one, mesh, strict=True), 1)]


def rank_main(options: dict[str, Any]) -> list[float]:
    """On every rank: train, and return the loss of each step, over the samples of all replicas."""
    from transformers import GPT2LMHeadModel

    import autopar
    from tutorials.offline import Blocks, load_text, load_tokenizer, small_gpt2

    words = argparse.Namespace(model=None, output=Path(options["words"]), vocab_size=2048)
    tokenizer = load_tokenizer(words)
    blocks = Blocks(load_text(), tokenizer, options["context"])
    samples = [blocks[number % len(blocks)] for number in range(options["steps"] * options["batch"])]
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(small_gpt2(tokenizer, context=options["context"])).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["lr"])
    if options["config"] is None:
        loader: Any = DataLoader(samples, batch_size=options["batch"])
    else:
        model = autopar.initialize(model, options["config"])
        share = options["batch"] // model.mpu.dp.size
        loader = autopar.prepare_dataloader(samples, batch_size=share, mpu=model.mpu)
    losses = []
    for batch in loader:
        if options["config"] is None:
            loss = model(**batch).loss
            loss.backward()
        else:
            loss = model.execute_pipeline(batch, broadcast_loss=True).loss.detach() / model.mpu.dp.size
            dist.all_reduce(loss, group=model.mpu.dp.group)  # each replica has that of its own samples
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
