"""Tutorial 17: a rank is killed in the middle of training, and the job goes on from its last checkpoint by itself.

python tutorials/17_survive_a_lost_rank.py
torchrun --nproc-per-node 2 --max-restarts 1 tutorials/17_survive_a_lost_rank.py
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start

import autopar

RESTARTS = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def batch_of(data: Blocks, step: int, size: int) -> torch.Tensor:
    """The batch of a step, the same whoever computes it. ``[batch, context]``"""
    rows = [data[(step * size + row) % len(data)] for row in range(size)]
    return torch.stack([row["input_ids"] for row in rows])


def train(args: Any, model: Any, data: Blocks, folder: Path) -> dict[int, float]:
    """Train to the last step, from the last checkpoint if there is one; loss of each step, also of those before."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    extra: dict[str, Any] = {"step": 0, "losses": {}}
    checkpoint = autopar.latest(folder)
    if checkpoint is not None:
        model.from_parallelized(checkpoint, optimizer=optimizer, extra=extra)
        say(f"goes on from {checkpoint.name}")
    losses = {int(step): loss for step, loss in extra["losses"].items()}
    with autopar.StopSignal(model.mpu) as stop:  # SIGTERM: torchrun, SLURM and kubernetes send it before they kill
        for step in range(extra["step"], args.steps):
            if ATTEMPT < RESTARTS and step == args.steps // 2 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)  # as when a machine is gone: nothing is said
            ids = batch_of(data, step, args.batch_size).to(model.mpu.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            extra = {"step": step + 1, "losses": {str(key): value for key, value in losses.items()}}
            model.save_parallelized(folder / f"step-{step + 1}", optimizer=optimizer, extra=extra, keep_last=2)
            if stop.requested():  # the same answer on every rank
                say(f"told to stop: saved step-{step + 1}")
                break
    return losses


def main() -> None:
    args = arguments(__doc__, steps=8, batch_size=2).parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    folder = args.output / "survive"
    if ATTEMPT == 0 and rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()

    model = load_model(args, tokenizer).eval()  # without dropout, to compare
    plain = copy.deepcopy(model)
    sizes = {"tensor_parallel_size": args.tensor_parallel_size or world}  # of the ranks that are there now
    model = autopar.initialize(model, {"model_parallelism": sizes})
    losses = train(args, model, data, folder)
    say(f"{mesh(model.mpu)}, attempt {ATTEMPT + 1}: loss {losses[0]:.6f} -> {losses[max(losses)]:.6f}")

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    differences = []
    for step in range(args.steps if rank == 0 else 0):  # one process that nothing happens to
        ids = batch_of(data, step, args.batch_size)
        loss = plain(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        differences.append(abs(loss.item() - losses[step]))
    if rank == 0:
        say(f"one process without interruption: largest difference of losses: {max(differences):.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
