"""Tutorial 11: a model class that nobody has a policy for, and the policy, with two mistakes on the way.

python tutorials/11_first_policy.py
torchrun --nproc-per-node 2 tutorials/11_first_policy.py
torchrun --nproc-per-node 4 tutorials/11_first_policy.py --no-compare
"""

from __future__ import annotations

import copy
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from offline import Blocks, arguments, load_text, load_tokenizer, mesh, say, start, whole_world
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import autopar
from autopar.tools.commands.policy_check import check_policy


class ScribeConfig(PretrainedConfig):
    """Five heads on purpose: they need not divide by the ranks."""

    model_type = "scribe"

    def __init__(self, vocab_size: int = 2048, width: int = 120, heads: int = 5, depth: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.width, self.heads, self.depth = vocab_size, width, heads, depth


class Layer(nn.Module):
    """Query, key and value in one matrix, one beside the other; a gated MLP with gate and up in one."""

    def __init__(self, config: ScribeConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.head_width = config.heads, width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate_up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, self.heads, self.head_width)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, length, head_width]
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class ScribeForCausalLM(PreTrainedModel):
    """Without a base model of its own: all paths of the policy start here."""

    config_class = ScribeConfig

    def __init__(self, config: ScribeConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


# What is forgotten here: the norm behind the layers, and that forward() reads ``self.heads``.
FIRST = """
match:
  model_type: [scribe]
units:
  heads: heads
  ffn: inferred
  vocab: vocab_size
prefix:
  embed: {embedding: vocab}
blocks:
  path: layers
  modules:
    norm1: replicated
    qkv: {column: [heads, heads, heads]}
    out: {row: heads}
    norm2: replicated
    gate_up: {column: [ffn, ffn]}
    down: {row: ffn}
head:
  head: {column: vocab, gather_output: true}
"""
SECOND = FIRST + "suffix:\n  norm: replicated\n"
THIRD = SECOND.replace("head:\n", "  attributes:\n    heads: heads\nhead:\n", 1)


def train(model: nn.Module, batches: list[torch.Tensor], device: Any) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch in batches:
        ids = batch.to(device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = arguments(__doc__, steps=10, batch_size=4)
    parser.add_argument("--no-compare", action="store_true", help="do not train the plain model as well")
    args = parser.parse_args()
    if args.model is not None:
        raise SystemExit("error: this tutorial has a model of its own; leave --model out")
    rank, _ = start()
    tokenizer = load_tokenizer(args)
    model = ScribeForCausalLM(ScribeConfig(vocab_size=len(tokenizer)))
    plain = copy.deepcopy(model) if rank == 0 and not args.no_compare else None

    config = {"model_parallelism": {"tensor_parallel_size": whole_world(args)}}
    try:
        autopar.initialize(model, config)
    except autopar.UnsupportedModelError as error:
        say(f"without a policy: {str(error).splitlines()[0]}")
    for name, policy in (("first", FIRST), ("second", SECOND), ("third", THIRD)):
        report = check_policy(model, policy, tp=2)  # what `autopar policy check` prints; the model stays as it is
        say(f"{name} policy: {'holds' if report['holds'] else 'does not hold'}; dry run: {report['dry_run']}")
        for error in report["errors"]:
            say(f"  {error.splitlines()[0]}")
    for entry in report["ranks"]:
        say(f"tp rank {entry['tp']} of 2 would hold {entry['parameters']:,} parameters")

    model = autopar.initialize(model, config, policy=THIRD)
    say(f"{mesh(model.mpu)}: heads on rank 0: {model.layers[0].heads}, qkv {list(model.layers[0].qkv.weight.shape)}")
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, shuffle=True, mpu=model.mpu)
    batches = [batch["input_ids"] for batch in islice(cycle(loader), args.steps)]
    losses = train(model, batches, model.mpu.device)
    say(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    if plain is not None:
        expected = train(plain.to(model.mpu.device), batches, model.mpu.device)
        say(f"largest difference of losses: {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.2e}")

    merged = args.output / "first-policy"
    model.save_parallelized(merged, merge_checkpoints=True)
    ids = batches[0][:1]
    with torch.no_grad():
        logits = model(ids.to(model.mpu.device)).logits.cpu()
        again = ScribeForCausalLM.from_pretrained(merged)(ids).logits  # the plain class reads what was merged
    say(f"merged checkpoint, plain model: logits differ by {(again - logits).abs().max():.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
