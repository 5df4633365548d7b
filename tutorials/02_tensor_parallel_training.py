"""Tutorial 2: tensor-parallel training. The losses are those of one process that holds the whole model.

python tutorials/02_tensor_parallel_training.py
torchrun --nproc-per-node 2 tutorials/02_tensor_parallel_training.py
torchrun --nproc-per-node 4 tutorials/02_tensor_parallel_training.py --model gpt2 --batch-size 2 --no-compare
"""

from __future__ import annotations

import argparse
import copy
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start, whole_world
from tqdm import tqdm

import autopar


def train(model: Any, optimizer: torch.optim.Optimizer, loader: Any, steps: int, clip: Any, title: str) -> list[float]:
    """The same loop for the plain and the parallel model; returns the losses."""
    device, losses = next(model.parameters()).device, []
    for batch in tqdm(islice(cycle(loader), steps), title, steps, disable=dist.get_rank() > 0):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = arguments(__doc__, steps=20, batch_size=4)
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train the plain model, on rank 0, which must be able to hold it",
    )
    args = parser.parse_args()
    rank, _ = start()
    tokenizer = load_tokenizer(args)
    model = load_model(args, tokenizer)
    model.train(not args.compare)  # dropout draws other numbers in one process than in two: without it runs compare
    plain = copy.deepcopy(model) if args.compare and rank == 0 else None

    # The optimizer comes first: initialize keeps the Parameter objects and changes what they hold.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size = whole_world(args)
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": size}})

    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    # All ranks of one tensor-parallel group get the same batches.
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, shuffle=True, seed=0, mpu=model.mpu)
    # Each rank has its share of the gradients: the norm of them all needs all ranks.
    losses = train(model, optimizer, loader, args.steps, lambda m: autopar.clip_grad_norm_(m, max_norm=1.0), "parallel")
    say(f"{mesh(model.mpu)}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    if plain is not None:
        plain.to(model.mpu.device)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, shuffle=True, seed=0, mpu=model.mpu)
        expected = train(
            plain,
            optimizer,
            loader,
            args.steps,
            lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), max_norm=1.0),
            "plain",
        )
        say("step      plain   parallel")
        for step in sorted({0, args.steps // 2, args.steps - 1}):
            say(f"{step:4}  {expected[step]:9.6f}  {losses[step]:9.6f}")
        say(f"largest difference of losses: {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
