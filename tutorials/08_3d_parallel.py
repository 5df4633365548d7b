"""Tutorial 8: pipeline stages. Train with tensor, pipeline and data parallelism together (3D), with ZeRO-1.

torchrun --nproc-per-node 8 tutorials/08_3d_parallel.py
torchrun --nproc-per-node 4 tutorials/08_3d_parallel.py --tensor-parallel-size 1
torchrun --nproc-per-node 2 tutorials/08_3d_parallel.py

8 processes are 2 replicas of 2 stages of 2 shards. It prints the parameters and optimizer states on each rank, and
compares the losses with one process. Then it loads the checkpoint on a mesh without stages and continues.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
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
    say_on_each_rank,
    start,
    train_reference,
)
from torch.optim.lr_scheduler import LambdaLR

import autopar


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 10)


class Run:
    """A model on some mesh, with its optimizer and scheduler."""

    def __init__(self, model: Any, tp: int, pp: int) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = LambdaLR(self.optimizer, warm_up)
        config = {
            "tp": tp,
            "pp": pp,
            "pipeline": {"schedule": "1f1b", "microbatch_size": 1},
            "zero": {"stage": 1},
            "gradient_clipping": 1.0,
        }
        self.model, self.optimizer = autopar.initialize(
            model, config, optimizer=self.optimizer, lr_scheduler=self.scheduler
        )

    def train(self, steps: list[torch.Tensor]) -> list[float]:
        """Take one step for each global batch, and return the losses."""
        losses, mpu = [], self.model.mpu
        for ids in steps:
            mine = ids[mpu.dp.rank :: mpu.dp.size]  # [batch/dp, context]: the slice of this replica
            # Forward and backward of all micro-batches through all stages.
            out = self.model.execute_pipeline(
                {"input_ids": mine, "labels": mine}, optimizer=self.optimizer, forward_only=False, broadcast_loss=True
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(average(out.loss, mpu))
        return losses


def main() -> None:
    parser = arguments(__doc__, steps=20, batch_size=4, compare=True)
    parser.add_argument("--pipeline-parallel-size", type=int, help="stages of one replica")
    args = parser.parse_args()
    rank, world = start()
    pp = args.pipeline_parallel_size or (2 if world % 2 == 0 else 1)
    tp = args.tensor_parallel_size or (2 if world % (2 * pp) == 0 else 1)
    tokenizer = load_tokenizer(args)
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    steps = batches(data, args.steps, args.batch_size * world)
    first, second = steps[: args.steps // 2], steps[args.steps // 2 :]
    model = load_model(args, tokenizer).eval()  # dropout is random: the comparison runs without it
    other = copy.deepcopy(model)
    reference = copy.deepcopy(model) if args.compare and rank == 0 else None
    full = sum(parameter.numel() for parameter in model.parameters())

    # 1. One config for three axes. A rank holds a shard of its stage. ZeRO-1 shards the optimizer state over replicas.
    run = Run(model, tp, pp)
    mpu = run.model.mpu
    held = sum(parameter.shape.numel() for parameter in model.parameters())
    losses = run.train(first)
    moments = sum(state["exp_avg"].numel() for state in run.optimizer.state.values())
    say(f"{mesh(mpu)}: {full:,} parameters")
    say_on_each_rank(
        f"shard {mpu.tp.rank} of stage {mpu.pp.rank} of replica {mpu.dp.rank}: {held:,} parameters, "
        f"first moments of {moments:,}"
    )

    # 2. Save halfway, then continue.
    folder = args.output / "3d"
    run.model.save_parallelized(folder, optimizer=run.optimizer, lr_scheduler=run.scheduler)
    losses += run.train(second)
    say(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    if reference is not None:
        expected = train_reference(reference.to(mpu.device), steps, schedule=warm_up)
        say(f"one process, batch size {args.batch_size * world}: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"largest difference of losses: {largest_difference(losses, expected)}")

    # 3. Load the checkpoint on another mesh, without stages.
    resumed = Run(other, tp * pp, 1)
    resumed.model.from_parallelized(folder, optimizer=resumed.optimizer, lr_scheduler=resumed.scheduler)
    worst = largest_difference(resumed.train(second), losses[len(first) :])
    say(f"resumed on {mesh(resumed.model.mpu)}: largest difference of losses: {worst}")
    finish()


if __name__ == "__main__":
    main()
