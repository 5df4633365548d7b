"""Tutorial 8: tensor, pipeline and data parallelism together, and a checkpoint that goes on with another mesh.

python tutorials/08_3d_parallel.py
torchrun --nproc-per-node 2 tutorials/08_3d_parallel.py
torchrun --nproc-per-node 8 tutorials/08_3d_parallel.py --steps 20
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, say, start
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import autopar
from autopar.distributed.mesh import MPU


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 10)


class Run:
    """A model on some mesh with what trains it. All runs see the same global batches in the same order."""

    def __init__(self, model: Any, data: Blocks, batch_size: int, tp: int, pp: int) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = LambdaLR(self.optimizer, warm_up)
        config = {
            "model_parallelism": {"tensor_parallel_size": tp, "pipeline_parallel_size": pp},
            "pipeline": {"microbatch_size": 1},
            "zero": {"stage": 1},
            "gradient_clipping": 1.0,
        }
        self.model, self.optimizer = autopar.initialize(
            model, config, optimizer=self.optimizer, lr_scheduler=self.scheduler
        )
        self.mpu: MPU = self.model.mpu
        self.data, self.batch, self.step = data, batch_size, 0

    def train(self, steps: int) -> list[float]:
        """Some steps; returns the loss of each over the global batch."""
        losses, dp = [], self.mpu.dp
        for _ in tqdm(range(steps), "parallel", disable=self.mpu.rank > 0):
            ids = rows(self.data, self.step, self.batch)[dp.rank :: dp.size]  # [batch/dp, context]: this replica's
            out = self.model.execute_pipeline(
                {"input_ids": ids, "labels": ids}, optimizer=self.optimizer, forward_only=False, broadcast_loss=True
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            total = out.loss.clone()
            dist.all_reduce(total, group=dp.group)
            losses.append(total.item() / dp.size)
        return losses


def rows(data: Blocks, step: int, count: int) -> torch.Tensor:
    """``[count, context]``: the global batch of a step."""
    return torch.stack([data.ids[(step * count + row) % len(data)] for row in range(count)])


def train_plain(model: Any, data: Blocks, batch_size: int, steps: int, device: Any) -> list[float]:
    """One process with the whole batch and nothing of autopar."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler, losses = LambdaLR(optimizer, warm_up), []
    for step in tqdm(range(steps), "plain"):
        ids = rows(data, step, batch_size).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def place(mpu: MPU) -> str:
    tp, pp, dp, _ = mpu.sizes
    return f"tensor parallel {tp} x pipeline parallel {pp} x data parallel {dp}"


def largest(ones: list[float], others: list[float]) -> str:
    return f"{max(abs(one - other) for one, other in zip(ones, others, strict=True)):.2e}"


def main() -> None:
    parser = arguments(__doc__, steps=20, batch_size=4)
    parser.add_argument("--pipeline-parallel-size", type=int, help="stages of one model replica")
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train the plain model with the whole batch, on rank 0, which must be able to hold it",
    )
    args = parser.parse_args()
    rank, world = start()
    # 8 processes are 2 x 2 x 2; 4 are two parts of two stages, 2 are two stages, 1 is the whole model.
    pp = args.pipeline_parallel_size or (2 if world % 2 == 0 else 1)
    tp = args.tensor_parallel_size or (2 if world % (2 * pp) == 0 else 1)
    tokenizer = load_tokenizer(args)
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    model = load_model(args, tokenizer).eval()  # without dropout, so that the runs compare
    fresh = copy.deepcopy(model)
    plain = copy.deepcopy(model) if args.compare and rank == 0 else None
    whole = sum(parameter.numel() for parameter in model.parameters())

    # 1. Three axes from one config. Each rank holds its part of its stage, and its replica's share of Adam's moments.
    global_batch = args.batch_size * world
    run = Run(model, data, global_batch, tp, pp)
    mpu = run.mpu
    held = sum(parameter.shape.numel() for parameter in model.parameters())
    half = args.steps // 2
    losses = run.train(half)
    moments = sum(state["exp_avg"].numel() for state in run.optimizer.state.values())
    lines = [""] * world
    dist.all_gather_object(
        lines,
        f"rank {rank}: part {mpu.tp.rank} of stage {mpu.pp.rank} of replica {mpu.dp.rank}: "
        f"{held:,} of {whole:,} parameters, first moments of {moments:,}",
    )
    say("\n".join(lines))

    # 2. Save half-way, with optimizer and scheduler, and go on.
    folder = args.output / "hybrid"
    run.model.save_parallelized(folder, optimizer=run.optimizer, lr_scheduler=run.scheduler, extra={"step": run.step})
    losses += run.train(args.steps - half)
    say(f"{place(mpu)}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    if plain is not None:
        plain.to(mpu.device)
        expected = train_plain(plain, data, global_batch, args.steps, mpu.device)
        say(f"one process on the whole batch of {global_batch}: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"largest difference of losses: {largest(losses, expected)}")

    # 3. The same checkpoint on another mesh: the stages' ranks share layers instead.
    other = Run(fresh, data, global_batch, tp * pp, 1)
    extra: dict[str, Any] = {}
    other.model.from_parallelized(folder, optimizer=other.optimizer, lr_scheduler=other.scheduler, extra=extra)
    other.step = extra["step"]
    resumed = other.train(args.steps - half)
    say(f"{place(other.mpu)}: resumed at step {half}, loss {resumed[-1]:.6f}")
    say(f"largest difference of losses after resuming: {largest(resumed, losses[half:])}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
