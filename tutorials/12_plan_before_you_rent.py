"""Tutorial 12: plan before you rent. What a configuration will hold, planned without weights, and what ranks then hold.

python tutorials/12_plan_before_you_rent.py
torchrun --nproc-per-node 2 tutorials/12_plan_before_you_rent.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start, whole_world

import autopar


def held(model: Any, optimizer: Any) -> tuple[int, int, int]:
    """Bytes of weights, gradients and the optimizer's state on this rank."""
    gradients = [parameter.grad for parameter in model.parameters()]
    states = [entry for state in optimizer.state.values() for entry in state.values()]
    return tuple(sum(tensor.nbytes for tensor in each) for each in (model.parameters(), gradients, states))  # type: ignore[return-value]


def main() -> None:
    args = arguments(__doc__, steps=4, batch_size=4).parse_args()
    start()
    tokenizer = load_tokenizer(args)
    model = load_model(args, tokenizer)
    size = whole_world(args)
    config = {"model_parallelism": {"tensor_parallel_size": size}, "pipeline": {"microbatch_size": 1}}

    # Before: any configuration, on any number of GPUs. Nothing is allocated, nothing is changed.
    for sections in (
        {},
        {"activation_checkpointing": {"enable": True}},
        {"model_parallelism": {"tensor_parallel_size": 2}},
        {"model_parallelism": {"pipeline_parallel_size": 2}, "pipeline": {"microbatch_size": 1}},
    ):
        plan = autopar.plan_memory(model, sections, sequence=args.context, batch=args.batch_size, device="cpu")
        kinds = ", ".join(sections) or "one process"
        say(f"{kinds}: {plan.peak.total / 1e6:.2f} MB, of it {plan.peak.activations / 1e6:.2f} MB activations")
    plan = autopar.plan_memory(model, config, sequence=args.context, batch=args.batch_size, device="cpu")

    # Afterwards: the same one, for real.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    say(mesh(model.mpu))
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    ids = torch.stack([data[number]["input_ids"] for number in range(args.batch_size)]).to(model.mpu.device)
    for _ in range(args.steps):
        optimizer.zero_grad()
        model.execute_pipeline({"input_ids": ids, "labels": ids}, optimizer=optimizer)
        optimizer.step()
    planned = plan.ranks[0, 0, model.mpu.tp.rank]
    found = held(model, optimizer)
    for kind, expected, real in zip(("weights", "gradients", "optimizer"), planned, found, strict=False):
        say(f"{kind} on rank 0: planned {expected:,} bytes, held {real:,}")
    same = torch.tensor([planned[:3] == found], dtype=torch.int32, device=model.mpu.device)
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    say(f"planned and held are equal on all ranks: {bool(same.item())}")

    step = autopar.metrics(model, {"input_ids": ids}, seconds=1.0)
    say(f"a step is {step['flops']:,.0f} operations for {ids.numel():,} tokens")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
