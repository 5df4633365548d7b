"""Tutorial 24: it does not fit, what now? One model under each lever: the same loss, fewer bytes.

python tutorials/24_memory.py
torchrun --nproc-per-node 4 tutorials/24_memory.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, say, start
from torch.distributed.tensor import DTensor

import autopar

# All other processes are replicas: of 4, "zero" shards over 4, or over 2 beside tp 2 or pp 2.
LEVERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "recomputed blocks": {"activation_checkpointing": {"enable": True}},
    "... that keep attention": {"activation_checkpointing": {"save": ["attention"]}},
    "every second block": {"activation_checkpointing": {"every": 2}},
    "ZeRO 1": {"zero": {"stage": 1}},
    "ZeRO 2": {"zero": {"stage": 2}},
    "ZeRO 3": {"zero": {"stage": 3}},
    "tp 2": {"tp": 2},
    "tp 2, ZeRO 3": {"tp": 2, "zero": {"stage": 3}},
    "pp 2": {"pp": 2},
    "pp 2, ZeRO 2": {"pp": 2, "zero": {"stage": 2}},
    "all of it": {"tp": 2, "zero": {"stage": 3}, "activation_checkpointing": {"enable": True}},
}


def held(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors on this rank."""
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def train(model: Any, optimizer: Any, batches: torch.Tensor) -> float:
    """Take one step for each of ``batches`` (``[steps, batch, context]``), and return the last loss of all replicas."""
    mpu, loss = model.mpu, torch.zeros(())
    for ids in batches:
        optimizer.zero_grad()
        mine = ids[mpu.dp.rank :: mpu.dp.size].to(mpu.device)  # [batch/dp, context]
        out = model.execute_pipeline({"input_ids": mine, "labels": mine}, optimizer=optimizer, broadcast_loss=True)
        optimizer.step()
        assert out.loss is not None
        loss = out.loss
    dist.all_reduce(loss, group=mpu.dp.group)
    return loss.item() / mpu.dp.size


def main() -> None:
    args = arguments(__doc__, steps=4, batch_size=8).parse_args()
    _, world = start()
    logging.getLogger("autopar").addHandler(logging.NullHandler())  # its line about each model stays away
    tokenizer = load_tokenizer(args)
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    numbers = range(args.steps * args.batch_size)
    batches = torch.stack([data[n % len(data)]["input_ids"] for n in numbers]).view(args.steps, args.batch_size, -1)
    say(f"{'':24}{'weights':>11}{'gradients':>11}{'optimizer':>11}{'activations':>13}{'loss':>9}")
    for name, lever in LEVERS.items():
        if world % (lever.get("tp", 1) * lever.get("pp", 1)):
            continue
        torch.manual_seed(0)
        model = load_model(args, tokenizer)
        config = {**lever, "pipeline": {"microbatch_size": 1}}
        dp = world // lever.get("tp", 1) // lever.get("pp", 1)
        batch = args.batch_size // dp
        plan = autopar.plan_memory(model, config, sequence=args.context, batch=batch, gpus=world, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
        loss = train(model.train(), optimizer, batches)
        mpu, states = model.mpu, [entry for state in optimizer.state.values() for entry in state.values()]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found = tuple(held(each) for each in (model.parameters(), gradients, states))
        place = (mpu.pp.rank, mpu.dp.rank, mpu.tp.rank)
        assert found == plan.ranks[place][:3], (name, found, plan.ranks[place])
        cells = "".join(f"{size / 1e6:>8.2f} MB" for size in found)
        say(f"{name:24}{cells}{plan.kept[place] / 1e6:>10.2f} MB{loss:>9.4f}")
        mpu.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
