"""Tutorial 9: save a training run, resume it on another mesh, and merge the checkpoint for transformers.

torchrun --nproc-per-node 2 tutorials/09_resume_on_another_mesh.py
torchrun --nproc-per-node 4 tutorials/09_resume_on_another_mesh.py --tensor-parallel-size 2

It trains with tensor parallelism, saves halfway, resumes with data parallelism, and compares the losses. Then it
merges the shards with `autopar merge`, which needs neither GPUs nor the code of the model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from offline import (
    Blocks,
    arguments,
    average,
    batches,
    finish,
    largest_difference,
    load_model,
    load_text,
    load_tokenizer,
    mesh,
    say,
    start,
)
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

import autopar


class Run:
    """A model on some mesh, with its optimizer and scheduler."""

    def __init__(self, model: Any, tp: int) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        self.model = autopar.initialize(model, {"tp": tp}).eval()  # eval: dropout is random

    def train(self, steps: list[torch.Tensor]) -> list[float]:
        """Take one step for each global batch, and return the losses."""
        losses, mpu = [], self.model.mpu
        for ids in steps:
            mine = ids[mpu.dp.rank :: mpu.dp.size].to(mpu.device)  # [batch/dp, context]
            loss = self.model(input_ids=mine, labels=mine).loss
            loss.backward()
            autopar.average_gradients(self.model)
            autopar.clip_grad_norm_(self.model, max_norm=1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(average(loss, mpu))
        return losses


def main() -> None:
    args = arguments(__doc__, steps=20, batch_size=4).parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    steps = batches(data, args.steps, args.batch_size * world)
    half = args.steps // 2
    tp = args.tensor_parallel_size or world

    # 1. Train half of the steps, save, and continue. With async_save the call returns when the values are copied, and
    #    a thread writes them. keep_last removes older checkpoints when the new one is complete.
    run = Run(load_model(args, tokenizer), tp)
    first = run.train(steps[:half])
    checkpoint = args.output / "series" / f"step-{half}"
    run.model.save_parallelized(
        checkpoint,
        optimizer=run.optimizer,
        lr_scheduler=run.scheduler,
        extra={"step": half},
        async_save=True,
        keep_last=2,
    )
    expected = run.train(steps[half:])
    run.model.wait_for_save()  # raises the error if the save failed
    say(f"{mesh(run.model.mpu)}: loss {first[0]:.6f} -> {expected[-1]:.6f}")

    # 2. Load it on another mesh. Each rank reads only its shards, and their optimizer state.
    for other in sorted({1, tp, world} - ({tp} if world > 1 else set())):
        resumed = Run(load_model(args, tokenizer), other)
        extra: dict[str, Any] = {}
        resumed.model.from_parallelized(
            checkpoint, optimizer=resumed.optimizer, lr_scheduler=resumed.scheduler, extra=extra
        )
        losses = resumed.train(steps[extra["step"] :])
        say(f"resumed at step {extra['step']} on {mesh(resumed.model.mpu)}: loss {losses[-1]:.6f}")
        say(f"largest difference of losses: {largest_difference(losses, expected)}")

    # 3. Merge the shards: `autopar merge SOURCE DESTINATION` on the command line. One process is enough.
    run.model.save_parallelized(args.output / "sharded")
    merged = args.output / "merged"
    if rank == 0:
        folders = [os.path.relpath(args.output / "sharded"), os.path.relpath(merged)]
        subprocess.run([sys.executable, "-m", "autopar", "merge", *folders, "--force"], check=True)
    dist.barrier()

    # 4. Load the merged folder: with transformers, and sharded again.
    ids = steps[0][:1].to(run.model.mpu.device)
    with torch.no_grad():
        logits = run.model(input_ids=ids).logits
        model = AutoModelForCausalLM.from_pretrained(merged).to(ids.device)
        say(f"from_pretrained of transformers: logits differ by {(model(ids).logits - logits).abs().max().item():.2e}")
        model = autopar.from_pretrained(type(model), merged, {"tp": tp}, dtype=torch.float32)
        say(f"from_pretrained of autopar: logits differ by {(model(ids).logits - logits).abs().max().item():.2e}")
    finish()


if __name__ == "__main__":
    main()
