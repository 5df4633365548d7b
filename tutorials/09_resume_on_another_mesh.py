"""Tutorial 9: stop training on one mesh and go on with another, with optimizer, scheduler and random states.

python tutorials/09_resume_on_another_mesh.py
torchrun --nproc-per-node 2 tutorials/09_resume_on_another_mesh.py
torchrun --nproc-per-node 4 tutorials/09_resume_on_another_mesh.py --model gpt2 --tensor-parallel-size 2
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import autopar


class Run:
    """A model on some mesh with what is needed to train it. All runs see the same batches in the same order."""

    def __init__(self, args: Any, tokenizer: Any, data: Blocks, tensor_parallel_size: int) -> None:
        model = load_model(args, tokenizer)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        self.model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": tensor_parallel_size}})
        self.model.eval()  # without dropout, so that the runs can be compared
        mpu = self.model.mpu
        self.ddp = DistributedDataParallel(self.model, process_group=mpu.dp.group) if mpu.sizes.dp > 1 else self.model
        self.data, self.batch, self.step = data, args.batch_size * dist.get_world_size(), 0

    def train(self, steps: int) -> list[float]:
        """Some steps; returns the loss of each, over the whole batch."""
        mpu, losses = self.model.mpu, []
        each = self.batch // mpu.sizes.dp
        for _ in range(steps):
            first = self.step * self.batch + mpu.dp.rank * each  # this replica's rows of the global batch
            rows = [self.data[(first + row) % len(self.data)] for row in range(each)]
            ids = torch.stack([row["input_ids"] for row in rows]).to(mpu.device)  # [batch/dp, context]
            loss = self.ddp(input_ids=ids, labels=ids).loss
            loss.backward()
            autopar.clip_grad_norm_(self.model, max_norm=1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            total = loss.detach().clone()
            dist.all_reduce(total, group=mpu.dp.group)
            losses.append(total.item() / mpu.sizes.dp)
        return losses


def main() -> None:
    args = arguments(__doc__, steps=20, batch_size=4).parse_args()
    _, world = start()
    tokenizer = load_tokenizer(args)
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    size = args.tensor_parallel_size or world
    half, folder = args.steps // 2, args.output / "series"

    # 1. Train the first half, save, and go on. async_save returns as soon as the values are copied; keep_last removes
    #    older checkpoints of the series (step-1, step-2 ...) once the new one is whole.
    run = Run(args, tokenizer, data, size)
    first = run.train(half)
    run.model.save_parallelized(
        folder / f"step-{run.step}",
        optimizer=run.optimizer,
        lr_scheduler=run.scheduler,
        extra={"step": run.step},
        async_save=True,
        keep_last=2,
    )
    expected = run.train(args.steps - half)
    run.model.wait_for_save()  # raises here what went wrong in the background
    say(f"{mesh(run.model.mpu)}: loss {first[0]:.6f} -> {expected[-1]:.6f}")

    # 2. Load it on another mesh: each rank reads the ranges of the tensors that it holds there, and their moments.
    for other in sorted({1, size, world} - ({size} if world > 1 else set())):
        resumed = Run(args, tokenizer, data, other)
        extra: dict[str, Any] = {}
        resumed.model.from_parallelized(
            folder / f"step-{half}", optimizer=resumed.optimizer, lr_scheduler=resumed.scheduler, extra=extra
        )
        resumed.step = extra["step"]
        losses = resumed.train(args.steps - half)
        difference = max(abs(one - two) for one, two in zip(losses, expected, strict=True))
        say(f"{mesh(resumed.model.mpu)}: resumed at step {half}, loss {losses[-1]:.6f}")
        say(f"largest difference of losses after resuming: {difference:.2e}")

    # 3. A Hugging Face checkpoint is read the same way, without the whole model in memory of any rank.
    merged = args.output / "resumed-merged"
    run.model.save_parallelized(merged, merge_checkpoints=True)
    loaded = autopar.from_pretrained(
        type(run.model), merged, {"model_parallelism": {"tensor_parallel_size": size}}, dtype=torch.float32
    )
    ids = data[0]["input_ids"][None].to(run.model.mpu.device)
    with torch.no_grad():
        one, two = run.model(input_ids=ids).logits, loaded(input_ids=ids).logits
    say(f"from_pretrained, this rank's bytes only: logits differ by {(one - two).abs().max().item():.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
