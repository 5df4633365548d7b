"""Tutorial 10: weights, gradients and optimizer state sharded over the replicas (ZeRO-3), beside tensor parallelism.

python tutorials/10_fully_sharded.py
torchrun --nproc-per-node 4 tutorials/10_fully_sharded.py --tensor-parallel-size 2
torchrun --nproc-per-node 4 tutorials/10_fully_sharded.py --tensor-parallel-size 2 --cpu-offload    # on GPUs
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import autopar


def train(model: Any, optimizer: Any, batches: torch.Tensor, name: str) -> list[float]:
    """One step for each of ``batches`` (``[steps, global batch, context]``); the losses over the global batch."""
    dp, losses = model.mpu.dp, []
    for ids in tqdm(batches, name, disable=model.mpu.rank > 0):
        mine = ids[dp.rank :: dp.size].to(model.mpu.device)  # [batch/dp, context]: this replica's
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()  # FSDP averages gradients over the replicas, each rank keeps its share of them
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=dp.group)
        losses.append(total.item() / dp.size)
    return losses


def train_plain(model: Any, batches: torch.Tensor, device: torch.device) -> list[float]:
    """One process with the whole batch and nothing of autopar."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for ids in tqdm(batches, "plain"):
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def held(tensors: Any) -> int:
    """Elements on this rank."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() for tensor in tensors)


def largest(ones: list[float], others: list[float]) -> str:
    return f"{max(abs(one - other) for one, other in zip(ones, others, strict=True)):.2e}"


def main() -> None:
    parser = arguments(__doc__, steps=10, batch_size=4)
    parser.add_argument("--cpu-offload", action="store_true", help="keep the shares in the CPU's memory")
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train the plain model with the whole batch, on rank 0, which must be able to hold it",
    )
    args = parser.parse_args()
    rank, world = start()
    tp = args.tensor_parallel_size or (2 if world % 4 == 0 else 1)
    tokenizer = load_tokenizer(args)
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    count = args.batch_size * world // tp
    rows = torch.arange(args.steps * count) % len(data)
    batches = data.ids[rows].view(args.steps, count, args.context)
    plain = load_model(args, tokenizer).eval()  # without dropout, so that the runs compare
    whole = sum(parameter.numel() for parameter in plain.parameters())

    # 1. By config: each of the dp replicas keeps 1/dp of its tensor-parallel share, block by block. A block's weights
    #    are collected when it runs, and let go after it.
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "model_parallelism": {"tensor_parallel_size": tp},
        "zero": {"stage": 3, "cpu_offload": args.cpu_offload},
    }
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    losses = train(model, optimizer, batches, "zero stage 3")
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    lines = [""] * world
    dist.all_gather_object(
        lines,
        f"rank {rank}: part {model.mpu.tp.rank} of replica {model.mpu.dp.rank}: {held(model.parameters()):,} of "
        f"{whole:,} weights, {held(moments):,} first moments",
    )
    say("\n".join(lines))
    say(f"{mesh(model.mpu)}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")

    # 2. By hand: tensor parallelism by autopar, torch's fully_shard over the data-parallel axis of its mesh. The
    #    optimizer is made afterwards, of the parameters that fully_shard has put in place.
    other = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": tp}})
    if args.model is None:  # the blocks of a GPT-2
        for block in other.transformer.h:
            fully_shard(block, mesh=other.mpu.mesh["dp"])
    fully_shard(other, mesh=other.mpu.mesh["dp"])
    by_hand = train(other, torch.optim.AdamW(other.parameters(), lr=1e-3), batches, "fully_shard")
    say(f"fully_shard by hand: largest difference of losses: {largest(by_hand, losses)}")

    # 3. The whole weights in a checkpoint that plain transformers reads.
    folder = args.output / "fully-sharded"
    model.save_parallelized(folder, merge_checkpoints=True)
    ids = batches[0, :2].to(model.mpu.device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        if rank == 0:
            merged = AutoModelForCausalLM.from_pretrained(folder).to(model.mpu.device).eval()
            difference = (merged(input_ids=ids).logits - logits).abs().max().item()
            say(f"merged checkpoint, plain transformers: logits differ by {difference:.2e}")
    if args.compare and rank == 0:
        expected = train_plain(plain.to(model.mpu.device), batches, model.mpu.device)
        say(f"one process on the whole batch of {count}: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"largest difference of losses: {largest(losses, expected)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
