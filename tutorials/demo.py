"""Demo: train a small GPT-2 from scratch on 4 processes, save it, merge it, and load it with transformers.

make demo
torchrun --nproc-per-node 4 tutorials/demo.py
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from offline import HERE, TEXT, Blocks, finish, load_text, load_tokenizer, mesh, say, small_gpt2, start, unigram_loss
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import autopar

TOLERANCE = 1e-5
PROMPT = "The state of the Union"
NEXT = """Next:
  1. Choose a mesh for your model and GPUs: {autopar} plan llama --gpus 8 --sequence 4096 --global-batch 64
  2. Compare your model with one process: {autopar} verify llama --tp 2
  3. Change your training loop: docs/start.md"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tensor-parallel-size", type=int, help="default: 2 if the number of processes is even, else 1")
    add("--dataset", help="text file, or name on the hub; default: tutorials/data/state_of_the_union.txt")
    add("--steps", type=int, default=250)
    add("--batch-size", type=int, default=16, help="sequences per step, over all replicas (default 16)")
    add("--learning-rate", type=float, default=3e-3)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=128)
    add("--context", type=int, default=128)
    add("--vocab-size", type=int, default=2048)
    add("--output", type=Path, default=HERE / "out")
    args = parser.parse_args()
    args.model = None
    return args


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the training text and the validation text: every 20th paragraph."""
    held_out = texts[10::20]
    return [text for number, text in enumerate(texts) if number % 20 != 10], held_out


@torch.no_grad()
def evaluate(model: Any, loader: Any, mpu: autopar.MPU) -> float:
    """Return the mean validation loss. Each replica evaluates a slice of the data."""
    model.eval()
    total = torch.zeros(2, device=mpu.device)
    for batch in loader:
        ids = batch["input_ids"].to(mpu.device)
        total += torch.tensor([model(input_ids=ids, labels=ids).loss.item() * len(ids), len(ids)], device=mpu.device)
    dist.all_reduce(total, group=mpu.dp.group)
    return (total[0] / total[1]).item()


def train(engine: Any, optimizer: Any, loader: Any, steps: int, mpu: autopar.MPU, rank: int) -> None:
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        return min(step / warmup, 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    schedule = LambdaLR(optimizer, factor)
    engine.train()
    began, tokens, epoch, done = time.perf_counter(), 0, 0, 0
    with tqdm(total=steps, desc="training", disable=rank > 0, mininterval=1.0 if sys.stderr.isatty() else 10.0) as bar:
        while done < steps:
            loader.set_epoch(epoch)
            for batch in loader:
                ids = batch["input_ids"].to(mpu.device)
                loss = engine(input_ids=ids, labels=ids).loss
                loss.backward()
                autopar.clip_grad_norm_(engine, max_norm=1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                tokens += ids.numel() * mpu.dp.size
                done += 1
                if rank == 0:
                    speed = tokens / (time.perf_counter() - began)
                    bar.set_postfix(loss=f"{loss.item():.3f}", tokens_per_s=f"{speed:,.0f}", refresh=False)
                    bar.update()
                if done == steps:
                    break
            epoch += 1


def merge(source: Path, destination: Path, tokenizer: Any) -> None:
    """Run ``autopar merge SOURCE DESTINATION``. It also copies the tokenizer files."""
    tokenizer.save_pretrained(source)
    folders = [os.path.relpath(source), os.path.relpath(destination), "--force"]
    command = [sys.executable, "-m", "autopar", "merge", *folders]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"error: {' '.join(command)} failed")


def main() -> None:
    args = parse()
    began = time.perf_counter()
    rank, world = start()
    tp = args.tensor_parallel_size or (2 if world % 2 == 0 else 1)
    say(f"{world} process(es), text {args.dataset or TEXT.relative_to(HERE.parent)}")
    tokenizer = load_tokenizer(args)
    training, validation = (Blocks(part, tokenizer, args.context) for part in split(load_text(args.dataset)))
    baseline = unigram_loss(training, validation, len(tokenizer))
    say(
        f"{training.ids.numel():,} tokens to train on, {validation.ids.numel():,} held out, vocabulary {len(tokenizer)}"
    )

    config = small_gpt2(tokenizer, context=args.context, layers=args.layers, hidden=args.hidden)
    model = GPT2LMHeadModel(config)
    full = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)  # made before initialize
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": tp}})
    mpu = model.mpu
    say(f"{mesh(mpu)}, {full:,} parameters")

    engine = DistributedDataParallel(model, process_group=mpu.dp.group)
    dp = mpu.dp.size
    size = max(1, args.batch_size // dp)
    loader = autopar.prepare_dataloader(training, batch_size=size, shuffle=True, seed=0, drop_last=True, mpu=mpu)
    if len(loader) == 0:
        raise SystemExit(f"error: {len(training)} sequences are too few for {dp} batches of {size}; use a longer text")
    validation.ids = validation.ids[: max(len(validation) // dp, 1) * dp]  # no replica repeats a sequence
    validation_loader = autopar.prepare_dataloader(validation, batch_size=size, mpu=mpu)

    before = evaluate(model, validation_loader, mpu)
    trained_from = time.perf_counter()
    train(engine, optimizer, loader, args.steps, mpu, rank)
    trained_until = time.perf_counter()
    after = evaluate(model, validation_loader, mpu)
    evaluated = time.perf_counter()

    sharded, merged = args.output / "sharded", args.output / "merged"
    model.save_parallelized(sharded)
    if rank == 0:
        merge(sharded, merged, tokenizer)
    dist.barrier()
    saved_until = time.perf_counter()

    # Compare the parallel model with transformers, which loads the merged folder.
    probe = validation.ids[:4].to(mpu.device)
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(mpu.device)
    length = min(60, args.context - prompt.shape[1])
    settings = {"min_new_tokens": length, "max_new_tokens": length, "pad_token_id": tokenizer.pad_token_id}
    with torch.no_grad():
        logits = model(probe).logits
    tokens = model.generate(prompt, do_sample=False, **settings)
    torch.manual_seed(1)
    sample = model.generate(prompt, do_sample=True, top_k=40, **settings)
    parameters: list[int] = [0] * world
    dist.all_gather_object(parameters, sum(parameter.shape.numel() for parameter in model.parameters()))
    failed = False
    if rank == 0:
        reference = AutoModelForCausalLM.from_pretrained(merged).to(mpu.device).eval()
        with torch.no_grad():
            difference = (reference(probe).logits - logits).abs().max().item()
        failed = not difference <= TOLERANCE
        same = torch.equal(reference.generate(prompt, do_sample=False, **settings), tokens)
        print(f"merged model in transformers: logits differ by at most {difference:.2e} (tolerance {TOLERANCE:.0e})")
        print(f"merged model in transformers: {'the same' if same else 'DIFFERENT'} greedy tokens")
        print("sampled:", *tokenizer.decode(sample[0], skip_special_tokens=True).split(), end="\n\n")
        table = Table(show_header=False)
        table.add_row("validation loss (nats per token)", "")
        table.add_row("  unigrams (no context)", f"{baseline:.3f}")
        table.add_row("  model before training", f"{before:.3f}")
        table.add_row("  model after training", f"{after:.3f}")
        table.add_row("parameters", f"{full:,}")
        for number, count in enumerate(parameters):
            table.add_row(f"  on rank {number}", f"{count:,}")
        table.add_row("seconds", f"{time.perf_counter() - began:.1f}")
        table.add_row(f"  {args.steps} training steps", f"{trained_until - trained_from:.1f}")
        table.add_row("  save and merge", f"{saved_until - evaluated:.1f}")
        Console().print(table)
    finish()
    if rank == 0 and not failed:
        print(NEXT.format(autopar=f"{os.path.relpath(sys.executable)} -m autopar"))
    if failed:
        raise SystemExit(f"error: the merged model's logits differ by {difference:.2e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
