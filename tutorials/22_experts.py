"""Tutorial 22: a mixture of experts whose experts lie on the ranks of several replicas; resumed on fewer, and merged.

python tutorials/22_experts.py
torchrun --nproc-per-node 4 tutorials/22_experts.py
"""

from __future__ import annotations

from itertools import cycle, islice

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_text, load_tokenizer, say, start
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import autopar


def mixture(vocabulary: int) -> Qwen3MoeForCausalLM:
    """A small Qwen3-MoE with six experts, of which each token chooses two."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        output_router_logits=True,  # adds the loss that balances the experts
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    args = arguments(__doc__, steps=6, batch_size=4).parse_args()
    _, world = start()
    tokenizer = load_tokenizer(args)
    tensor_parallel = 2 if world % 2 == 0 else 1

    # Experts lie on all ranks, whichever replica they belong to; the other layers are cut over two of them.
    model = mixture(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sizes = {"tp": tensor_parallel, "ep": world}
    model, optimizer = autopar.initialize(model, sizes, optimizer=optimizer)
    mpu = model.mpu
    say(f"tp {mpu.tp.size} x dp {mpu.dp.size}, experts over {mpu.ep.size} ranks")

    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size // mpu.dp.size, shuffle=True, mpu=mpu)
    for batch in islice(cycle(loader), args.steps):
        ids = batch["input_ids"].to(mpu.device)
        out = model(ids, labels=ids)
        out.loss.backward()
        autopar.average_gradients(model)  # experts, too: over the ranks that hold the same ones
        optimizer.step()
        optimizer.zero_grad()
    say(f"after {args.steps} steps: auxiliary loss of all replicas' tokens {out.aux_loss.item():.4f}")
    if world > 1:
        for path, tokens in autopar.expert_load(model).items():
            idle = int((tokens == 0).sum())
            say(f"{path}: the busiest has {tokens.max() / tokens.sum():.2f} of the tokens, {idle} have none")

    # The checkpoint goes on with experts on half of the ranks, or on one.
    model.save_parallelized(args.output / "experts", optimizer=optimizer)
    fewer = mixture(len(tokenizer))
    steps = torch.optim.AdamW(fewer.parameters(), lr=3e-3)
    fewer, steps = autopar.initialize(fewer, {"ep": max(world // 2, 1)}, optimizer=steps)
    fewer.from_parallelized(args.output / "experts", optimizer=steps)
    with autopar.full_params(model), autopar.full_params(fewer):
        pairs = zip(model.parameters(), fewer.parameters(), strict=True)
        same = all(torch.equal(one, other) for one, other in pairs)
    say(f"experts over {fewer.mpu.ep.size} ranks: {'the same weights' if same else 'other weights'}")

    # Merged, it is a folder of Hugging Face, with each expert by itself.
    model.save_parallelized(args.output / "experts-merged", merge_checkpoints=True, tokenizer=tokenizer)
    whole = AutoModelForCausalLM.from_pretrained(args.output / "experts-merged")
    say(f"merged: {sum(p.numel() for p in whole.parameters()):,} parameters, {type(whole).__name__}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
