"""Tutorial 1: train a GPT-2 with tensor and data parallelism, generate text, and merge the checkpoint.

torchrun --nproc-per-node 2 tutorials/01_tensor_parallel.py
torchrun --nproc-per-node 4 tutorials/01_tensor_parallel.py --tensor-parallel-size 2
torchrun --nproc-per-node 4 tutorials/01_tensor_parallel.py --model gpt2 --batch-size 2 --no-compare

It prints the parameters on each rank, the losses next to the losses of one process, and the generated text.
"""

from __future__ import annotations

import copy
from itertools import cycle, islice

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
    say_on_each_rank,
    start,
    train_reference,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import autopar


def main() -> None:
    args = arguments(__doc__, steps=20, batch_size=4, compare=True).parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    model = load_model(args, tokenizer)
    model.train(not args.compare)  # dropout is random: the comparison runs without it
    reference = copy.deepcopy(model) if args.compare and rank == 0 else None
    full = sum(parameter.numel() for parameter in model.parameters())

    # 1. One line shards the model in place. The Parameter objects stay, so an optimizer that exists keeps working.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = autopar.initialize(model, {"tp": args.tensor_parallel_size or world})
    mpu = model.mpu
    say(f"{mesh(mpu)}: {type(model).__name__} with {full:,} parameters")
    held = sum(parameter.shape.numel() for parameter in model.parameters())
    say_on_each_rank(f"shard {mpu.tp.rank} of replica {mpu.dp.rank}, {held:,} parameters")

    # 2. Train. Replicas get different batches, and all ranks of a replica get the same batch. DDP averages the
    #    gradients over the replicas. Clipping needs the norm over all ranks.
    engine = DistributedDataParallel(model, process_group=mpu.dp.group)
    size = args.batch_size * mpu.dp.size
    data = Blocks(load_text(args.dataset), tokenizer, args.context, batch=size)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, mpu=mpu)
    losses = []
    for batch in islice(cycle(loader), args.steps):
        ids = batch["input_ids"].to(mpu.device)
        loss = engine(input_ids=ids, labels=ids).loss
        loss.backward()
        autopar.clip_grad_norm_(engine, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(average(loss, mpu))
    say(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    if reference is not None:
        expected = train_reference(reference.to(mpu.device), batches(data, args.steps, size))
        say(f"one process, batch size {size}: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"largest difference of losses: {largest_difference(losses, expected)}")

    # 3. Generate. Every rank calls generate with the same prompt and gets all tokens.
    model.eval()
    prompt = tokenizer("Fellow-Citizens", return_tensors="pt")["input_ids"].to(mpu.device)
    length = min(20, args.context - prompt.shape[1])
    options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    tokens = model.generate(prompt, **options)
    say(f"generated: {tokenizer.decode(tokens[0])!r}")

    # 4. Save and merge: every rank calls it, and the result is an ordinary Hugging Face folder.
    folder = args.output / "first-run"
    model.save_parallelized(folder, merge_checkpoints=True, tokenizer=tokenizer)
    if rank == 0:
        merged = AutoModelForCausalLM.from_pretrained(folder).to(mpu.device).eval()
        say(f"transformers generates the same tokens: {torch.equal(merged.generate(prompt, **options), tokens)}")
    finish()


if __name__ == "__main__":
    main()
