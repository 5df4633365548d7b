"""Tutorial 16: DeepSpeed's engine, with its ZeRO and its clipping, around a tensor-parallel model.

python tutorials/16_deepspeed.py
torchrun --nproc-per-node 4 tutorials/16_deepspeed.py --tensor-parallel-size 2
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start

import autopar


def import_deepspeed() -> Any:
    """DeepSpeed; on the CPU without the operations that it would have to compile."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings(action="ignore"):
        import deepspeed
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
    return deepspeed


def batch_of(data: Blocks, step: int, size: int) -> torch.Tensor:
    """The batch of a step, of all replicas. ``[batch, context]``"""
    return torch.stack([data[(step * size + row) % len(data)]["input_ids"] for row in range(size)])


def main() -> None:
    args = arguments(__doc__, steps=10, batch_size=2).parse_args()
    rank, world = start()
    deepspeed = import_deepspeed()
    deepspeed.logger.setLevel("ERROR")
    tokenizer = load_tokenizer(args)
    model = load_model(args, tokenizer).eval()  # without dropout, to compare
    plain = copy.deepcopy(model) if rank == 0 else None
    size = args.tensor_parallel_size or (2 if world % 2 == 0 else 1)

    # 1. The model is parallelized, and the engine takes the mesh from its MPU: it averages over replicas alone, and by
    #    the marks of the parameters its norm counts each of them once.
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": size}})
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        mpu=model.mpu,
        config={
            "train_micro_batch_size_per_gpu": args.batch_size,
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    engine.eval()
    data, mpu = Blocks(load_text(args.dataset), tokenizer, args.context), model.mpu
    batch, losses = args.batch_size * mpu.sizes.dp, []
    for step in range(args.steps):
        ids = batch_of(data, step, batch)[mpu.dp.rank * args.batch_size :][: args.batch_size].to(mpu.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mpu.dp.group)
        losses.append(total.item() / mpu.sizes.dp)
    say(f"{mesh(mpu)}, ZeRO 1 of DeepSpeed: loss {losses[0]:.6f} -> {losses[-1]:.6f}")

    # 2. One process on the whole batch.
    if plain is not None:
        plain.to(mpu.device)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        differences = []
        for step in range(args.steps):
            ids = batch_of(data, step, batch).to(mpu.device)
            loss = plain(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            differences.append(abs(loss.item() - losses[step]))
        say(f"one process on the whole batch of {batch}: largest difference of losses: {max(differences):.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
