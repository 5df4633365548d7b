"""Tutorial 11: expert parallelism. The experts of a mixture-of-experts model are distributed over all ranks.

torchrun --nproc-per-node 4 tutorials/11_mixture_of_experts.py

It trains a small Qwen3-MoE with 6 experts on 4 ranks, prints the load of the experts, loads the checkpoint with the
experts on half of the ranks, and merges it for transformers.
"""

from __future__ import annotations

from itertools import cycle, islice

import torch
from offline import Blocks, arguments, finish, load_text, load_tokenizer, mesh, say, start
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import autopar


def build(vocabulary: int) -> Qwen3MoeForCausalLM:
    """Build a small Qwen3-MoE with 6 experts; the router selects 2 of them for each token."""
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
        output_router_logits=True,  # adds the load balancing loss
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    args = arguments(__doc__, steps=6, batch_size=4).parse_args()
    _, world = start()
    tokenizer = load_tokenizer(args)

    # 1. "ep" distributes the experts over all ranks, "tp" shards the other layers over two.
    model = build(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = {"tp": 2 if world % 2 == 0 else 1, "ep": world}
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    mpu = model.mpu
    say(f"{mesh(mpu)}, experts over {mpu.ep.size} ranks")

    # 2. Train. The load balancing loss counts the tokens of all replicas.
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size // mpu.dp.size, shuffle=True, mpu=mpu)
    for batch in islice(cycle(loader), args.steps):
        ids = batch["input_ids"].to(mpu.device)
        out = model(ids, labels=ids)
        out.loss.backward()
        autopar.average_gradients(model)  # experts too: over the ranks that hold the same experts
        optimizer.step()
        optimizer.zero_grad()
    say(f"load balancing loss after {args.steps} steps: {out.aux_loss.item():.4f}")
    if world > 1:
        for path, tokens in autopar.expert_load(model).items():
            say(f"{path}: the busiest expert gets {tokens.max() / tokens.sum():.0%} of the tokens")

    # 3. Load the checkpoint with the experts on half of the ranks.
    model.save_parallelized(args.output / "experts", optimizer=optimizer)
    other = build(len(tokenizer))
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=3e-3)
    other, other_optimizer = autopar.initialize(other, {"ep": max(world // 2, 1)}, optimizer=other_optimizer)
    other.from_parallelized(args.output / "experts", optimizer=other_optimizer)
    with autopar.full_params(model), autopar.full_params(other):
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        same = all(torch.equal(first, second) for first, second in pairs)
    say(f"loaded with the experts over {other.mpu.ep.size} rank(s): the same weights: {same}")

    # 4. Merge it for transformers.
    model.save_parallelized(args.output / "experts-merged", merge_checkpoints=True, tokenizer=tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(args.output / "experts-merged")
    say(f"merged: {type(merged).__name__} with {sum(p.numel() for p in merged.parameters()):,} parameters")
    finish()


if __name__ == "__main__":
    main()
