"""Tutorial 23: QLoRA. A base in 4 bits, of which each rank quantizes its shard; adapters that plain PEFT reads.

Needs `peft` and `bitsandbytes`.

python tutorials/23_qlora.py
torchrun --nproc-per-node 4 tutorials/23_qlora.py
"""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_text, load_tokenizer, say, start
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import autopar

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def save_base(folder: Path, vocabulary: int) -> None:
    """Write a small Llama with 2 heads of 64, as any that is on the hub."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes)).save_pretrained(folder)


def load_base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4, dtype=torch.float32)


def main() -> None:
    args = arguments(__doc__, steps=20, batch_size=4).parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    base = args.output / "qlora-base"
    if rank == 0:
        save_base(base, len(tokenizer))
    dist.barrier()

    # No process holds the model. Each rank reads its shards, and quantizes them to the bytes of the whole one's.
    with autopar.lazy_init():
        model = load_base(base)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    config = {"tp": 2 if world % 2 == 0 else 1, "zero": {"stage": 1}}
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    mpu = model.mpu
    held = sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8)
    say(f"tp {mpu.tp.size} x dp {mpu.dp.size}: {held:,} bytes of 4-bit weights on each rank")

    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size // mpu.dp.size, shuffle=True, mpu=mpu)
    model.train()
    losses = []
    for batch in islice(cycle(loader), args.steps):
        ids = batch["input_ids"].to(mpu.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        autopar.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    say(f"after {args.steps} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    # The adapters are PEFT's own files, and belong to the same base on one process.
    model.save_parallelized(args.output / "qlora", adapter_only=True)
    dist.barrier()
    ids = data[0]["input_ids"].view(1, -1)
    here = model(input_ids=ids.to(mpu.device)).logits[:].detach().cpu()
    if rank == 0:
        plain = peft.PeftModel.from_pretrained(load_base(base), args.output / "qlora").train()
        difference = (plain(input_ids=ids.to(plain.device)).logits.cpu() - here).abs().max().item()
        say(f"plain transformers, PEFT and bitsandbytes: logits differ by {difference:.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
