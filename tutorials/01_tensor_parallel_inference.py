"""Tutorial 1: tensor-parallel inference. Logits and generated tokens of a shared-out model equal the plain one's.

python tutorials/01_tensor_parallel_inference.py
torchrun --nproc-per-node 2 tutorials/01_tensor_parallel_inference.py
torchrun --nproc-per-node 4 tutorials/01_tensor_parallel_inference.py --model gpt2 --steps 50
"""

from __future__ import annotations

import copy
import time

import torch
import torch.distributed as dist
from offline import arguments, load_model, load_text, load_tokenizer, mesh, say, start

import autopar


def main() -> None:
    args = arguments(__doc__, steps=20, batch_size=2).parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    model = load_model(args, tokenizer).eval()
    reference = copy.deepcopy(model) if rank == 0 else None
    whole = sum(parameter.numel() for parameter in model.parameters())

    # The one line. Each rank keeps its share of every layer; on GPUs the share moves to this rank's GPU.
    size = args.tensor_parallel_size or world
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": size}})

    device = model.mpu.device
    prompts = [" ".join(text.split()[:6]) for text in load_text(args.dataset)[: args.batch_size]]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"  # generated tokens follow the prompt
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(device)
    began = time.perf_counter()
    with torch.no_grad():
        logits = model(**batch).logits
        # Every rank calls generate() and every rank gets all tokens.
        tokens = model.generate(
            **batch, max_new_tokens=args.steps, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    seconds = time.perf_counter() - began

    held = sum(parameter.shape.numel() for parameter in model.parameters())
    shares: list[int] = [0] * world
    dist.all_gather_object(shares, held)
    say(f"{type(model).__name__}, {whole:,} parameters, {mesh(model.mpu)}")
    say("parameters per rank: " + ", ".join(f"{share:,}" for share in shares))
    made = tokens.shape[1] - batch["input_ids"].shape[1]
    say(f"generated {made} tokens for {len(prompts)} prompts in {seconds:.2f} s")
    if reference is not None:
        reference.to(device)
        with torch.no_grad():
            expected = reference(**batch).logits
            plain = reference.generate(
                **batch, max_new_tokens=args.steps, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        say(f"largest difference of logits: {(logits - expected).abs().max().item():.2e}")
        say(f"same tokens as the plain model: {torch.equal(tokens, plain)}")
        say(f"first text: {tokenizer.decode(tokens[0], skip_special_tokens=True)!r}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
