"""Tutorial 4: QLoRA. Each rank quantizes its shard of the base model to 4 bits and trains adapters on it.

torchrun --nproc-per-node 4 tutorials/04_qlora.py

It prints the bytes of 4-bit weights on each rank, and compares the trained model with transformers, PEFT and
bitsandbytes on one process. It needs peft and bitsandbytes.
"""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from offline import Blocks, arguments, average, finish, load_text, load_tokenizer, mesh, say, start
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import autopar

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def save_base(folder: Path, vocabulary: int) -> None:
    """Write a small Llama with two heads."""
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

    # 1. Inside lazy_init no weights are loaded. initialize reads and quantizes only the shard of this rank. The bytes
    #    equal a shard of the quantized full model.
    with autopar.lazy_init():
        model = load_base(base)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    config = {"tp": args.tensor_parallel_size or (2 if world % 2 == 0 else 1), "zero": {"stage": 1}}
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    mpu = model.mpu
    held = sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8)
    say(f"{mesh(mpu)}: {held:,} bytes of 4-bit weights on rank 0")

    # 2. Train the adapters.
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
        losses.append(average(loss, mpu))
    say(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    # 3. Save the adapters as PEFT files, and load them on one process.
    model.save_parallelized(args.output / "qlora", adapter_only=True)
    dist.barrier()
    ids = data[0]["input_ids"].view(1, -1)
    found = model(input_ids=ids.to(mpu.device)).logits[:].detach().cpu()
    if rank == 0:
        reference = peft.PeftModel.from_pretrained(load_base(base), args.output / "qlora").train()
        difference = (reference(input_ids=ids.to(reference.device)).logits.cpu() - found).abs().max().item()
        say(f"one process with PEFT and bitsandbytes: logits differ by {difference:.1e}")
    finish()


if __name__ == "__main__":
    main()
