"""Tutorial 3: train LoRA adapters of PEFT on a sharded model, save them, and merge them into the model.

torchrun --nproc-per-node 2 tutorials/03_lora.py
torchrun --nproc-per-node 4 tutorials/03_lora.py --tensor-parallel-size 2

It prints the shapes of the adapters on rank 0, and compares losses, adapters and merged weights with PEFT on one
process. It needs peft.
"""

from __future__ import annotations

import copy
from itertools import cycle, islice
from typing import Any

import peft
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
    start,
    train_reference,
)

import autopar


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.eval()(input_ids=ids.to(next(model.parameters()).device)).logits[:].cpu()


def difference(first: torch.Tensor, second: torch.Tensor) -> str:
    return f"{(first - second).abs().max().item():.2e}"


def main() -> None:
    args = arguments(__doc__, steps=20, batch_size=4).parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    base = load_model(args, tokenizer).eval()

    # 1. Make the adapters with PEFT, then call initialize. The adapters of a layer are sharded like the layer.
    lora = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    model = peft.get_peft_model(copy.deepcopy(base), lora)
    reference = copy.deepcopy(model)
    model = autopar.initialize(model, {"tp": args.tensor_parallel_size or world})
    mpu = model.mpu
    layer = model.get_base_model().transformer.h[0].attn.c_attn  # column-parallel: A is replicated, B is sharded
    shapes = [list(adapter.default.weight.shape) for adapter in (layer.lora_A, layer.lora_B)]
    say(f"{mesh(mpu)}: on rank 0 A is {shapes[0]} and B is {shapes[1]}")

    # 2. Train the adapters. average_gradients averages over the replicas, without DDP.
    size = args.batch_size * mpu.dp.size
    data = Blocks(load_text(args.dataset), tokenizer, args.context, batch=size)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, mpu=mpu)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for batch in islice(cycle(loader), args.steps):
        ids = batch["input_ids"].to(mpu.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        autopar.average_gradients(model)
        autopar.clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(average(loss, mpu))
    say(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")

    # 3. save_pretrained writes the files of PEFT. Every rank calls it, and rank 0 writes.
    folder = args.output / "lora"
    model.save_pretrained(folder / "adapters")
    ids = data[0]["input_ids"].unsqueeze(0)
    with model.disable_adapter():
        worst = difference(logits(model, ids), logits(base, ids))
    say(f"adapters disabled: logits differ from the base model by {worst}")
    trained = logits(model, ids)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / "adapters")
    say(f"adapters loaded with PEFT: logits differ by {difference(logits(again, ids), trained)}")

    # 4. merge_adapter adds the adapters to the weights in place, shard by shard. No rank holds the full model.
    model.merge_adapter()
    model.save_parallelized(folder / "merged", merge_checkpoints=True)
    merged = type(base).from_pretrained(folder / "merged")
    say(f"merged model in transformers: logits differ by {difference(logits(merged, ids), trained)}")
    if rank == 0:
        expected = train_reference(reference.to(mpu.device).eval(), batches(data, args.steps, size), lr=5e-3)
        say(f"one process: largest difference of losses: {largest_difference(losses, expected)}")
    finish()


if __name__ == "__main__":
    main()
