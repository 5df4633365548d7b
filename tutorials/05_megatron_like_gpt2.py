"""Tutorial 5: a GPT-2 inside a module of your own, a loss outside, and a policy of your own for every parameter.

python tutorials/05_megatron_like_gpt2.py
torchrun --nproc-per-node 2 tutorials/05_megatron_like_gpt2.py
torchrun --nproc-per-node 4 tutorials/05_megatron_like_gpt2.py --model gpt2 --steps 5
"""

from __future__ import annotations

import copy
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start, whole_world
from torch import nn
from torch.nn.functional import cross_entropy

import autopar

# Other than policies/gpt2.yaml: embeddings by hidden dim, attention projections whose output is gathered at once (so
# that every rank computes all heads), and therefore an output layer, tied to wte, that is cut along its input.
POLICY = """
match:
  model_type: [gpt2]
units:
  heads: num_attention_heads
  ffn: inferred
prefix:
  wte: {embedding: hidden}
  wpe: {embedding: hidden}
  drop: replicated
blocks:
  path: h
  modules:
    ln_1: replicated
    attn.c_attn: {column: [heads, heads, heads], gather_output: true}
    attn.c_proj: {column: heads, gather_output: true}
    ln_2: replicated
    mlp.c_fc: {column: ffn}
    mlp.c_proj: {row: ffn}
suffix:
  ln_f: replicated
head:
  lm_head: {row: hidden, split_input: true}
"""


class GPTLMModel(nn.Module):
    """A module of the user: it holds a Hugging Face model and returns logits only."""

    def __init__(self, gpt2: nn.Module) -> None:
        super().__init__()
        self.model = gpt2

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


class GPTLMLoss(nn.Module):
    """Cross entropy of the next token."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], device: Any) -> list[float]:
    criterion, losses = GPTLMLoss(), []
    for batch in batches:
        ids = batch.to(device)
        loss = criterion(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    args = arguments(__doc__, steps=10, batch_size=4).parse_args()
    rank, _ = start()
    tokenizer = load_tokenizer(args)
    gpt2 = load_model(args, tokenizer)
    if gpt2.config.model_type != "gpt2":
        raise SystemExit(f"error: this tutorial's policy is for gpt2; --model {args.model} is {gpt2.config.model_type}")
    model = GPTLMModel(gpt2).eval()  # no dropout, so that the runs compare; gradients flow all the same
    plain = copy.deepcopy(model) if rank == 0 else None

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size = whole_world(args)
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": size}}, policy=POLICY)
    device = model.mpu.device
    for name in ("transformer.wte", "transformer.wpe", "transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc"):
        weight, whole = gpt2.get_parameter(f"{name}.weight"), plain.model.get_submodule(name).weight if plain else None
        say(f"{name}.weight: {list(whole.shape) if whole is not None else ''} -> {list(weight.shape)} on this rank")

    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, shuffle=True, mpu=model.mpu)
    batches = [batch["input_ids"] for batch in islice(cycle(loader), args.steps)]
    losses = train(model, optimizer, batches, device)
    say(f"{mesh(model.mpu)}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    if plain is not None:
        plain.to(device)
        expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), batches, device)
        say(f"one process: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"largest difference of losses: {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
