"""Tutorial 12: parallelize a model class that autopar does not know: derive a policy, check it, and train with it.

torchrun --nproc-per-node 2 tutorials/12_unknown_model.py

It prints the derived policy, the result of its checks, and the losses. On the command line the three steps are
`autopar policy new`, `autopar policy check` and `autopar verify`.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from offline import Blocks, arguments, finish, load_text, load_tokenizer, mesh, say, start
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import autopar
from autopar.tools.commands.policy_check import check_policy
from autopar.tools.derivation.derive import derive
from autopar.tools.derivation.policy_tree import yaml_text


class TinyConfig(PretrainedConfig):
    """Five heads, which two ranks cannot divide evenly."""

    model_type = "tiny"

    def __init__(self, vocab_size: int = 300, width: int = 60, heads: int = 5, depth: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.width, self.heads, self.depth = vocab_size, width, heads, depth


class Block(nn.Module):
    """Attention and a gated MLP. Two matrices are fused in an unusual order.

    ``fused_qkv`` has query, key and value of the first head, then of the second head, and so on. ``gate_up`` has gate
    and up of the first feature, then of the second feature, and so on.
    """

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fused_qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.slope = nn.Parameter(torch.linspace(0.1, 0.5, config.heads))  # ALiBi: one slope for each head
        self.gate_up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        position = torch.arange(length, device=x.device)
        q, k, v = self.fused_qkv(self.norm1(x)).view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        distance = (position[:, None] - position).to(x.dtype) * self.slope[:, None, None]  # [heads, length, length]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 - distance
        scores = scores.masked_fill(position[:, None] < position, -torch.inf)
        attended = scores.softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.norm2(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return x + self.down(F.silu(gate) * up)


class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


def main() -> None:
    args = arguments(__doc__, steps=10, batch_size=4).parse_args()
    if args.model is not None:
        raise SystemExit("error: this tutorial defines its model; omit --model")
    rank, world = start()
    tokenizer = load_tokenizer(args)
    torch.manual_seed(0)
    model = TinyForCausalLM(TinyConfig(vocab_size=len(tokenizer)))
    try:
        autopar.initialize(model, {"tp": 2})
    except autopar.UnsupportedModelError as error:
        say(f"without a policy: {str(error).splitlines()[0]}")

    # 1. Derive a policy: one forward on tensors without data, which follows every feature through every layer.
    derived = derive(model)
    path = args.output / "tiny.yaml"
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml_text(derived.tree, ["Derived from the modules and a forward of TinyForCausalLM."]))
    dist.barrier()
    say(path.read_text().rstrip())

    # 2. Check the policy: the plan, the shards and a dry run on tensors without data.
    report = check_policy(model, path, tp=2)
    say(f"policy check: {'passed' if report['holds'] else 'failed'}; dry run: {report['dry_run']}")
    for entry in report["ranks"]:
        say(f"rank {entry['tp']} of 2 would hold {entry['parameters']:,} of {report['parameters']:,} parameters")

    # 3. Verify it: outputs and gradients of the parallel model against the single-process model.
    proof = autopar.verify(model, {"tp": max(2, world), "policy": str(path)}, checks=["forward", "backward"])
    passed = sum(row.holds is True for row in proof.rows)
    say(f"verify: {passed} comparisons passed, {sum(row.holds is False for row in proof.rows)} failed")
    proof.raise_if_failed()

    # 4. Train with it. `policy: derive` in the config derives it at this point, without a file.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = autopar.initialize(model, {"tp": world, "policy": str(path)}, optimizer=optimizer)
    say(f"{mesh(model.mpu)}: {model.layers[0].heads} heads on rank 0")
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, shuffle=True, mpu=model.mpu)
    losses = []
    for batch in islice(cycle(loader), args.steps):
        ids = batch["input_ids"].to(model.mpu.device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    say(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    model.save_parallelized(args.output / "tiny", merge_checkpoints=True)
    with torch.no_grad():
        logits = model(ids).logits.cpu()
        merged = TinyForCausalLM.from_pretrained(args.output / "tiny")(ids.cpu()).logits
    say(f"merged checkpoint on one process: logits differ by {(merged - logits).abs().max():.2e}")
    finish()


if __name__ == "__main__":
    main()
