"""Tutorial 19: a policy derived from a model of your own, read, checked, proven, and trained with.

python tutorials/19_derived_policy.py
torchrun --nproc-per-node 2 tutorials/19_derived_policy.py
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from offline import Blocks, arguments, load_text, load_tokenizer, mesh, say, start
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import autopar
from autopar.tools.commands.policy_check import check_policy
from autopar.tools.derivation.derive import derive
from autopar.tools.derivation.policy_tree import yaml_text


class QuillConfig(PretrainedConfig):
    model_type = "quill"

    def __init__(self, vocab_size: int = 300, width: int = 60, nibs: int = 5, depth: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.width, self.nibs, self.depth = vocab_size, width, nibs, depth


class Stroke(nn.Module):
    """``q0 k0 v0 q1 k1 v1 ...`` in one matrix, ``gate0 up0 gate1 up1 ...`` in another; a slope for each head."""

    def __init__(self, config: QuillConfig) -> None:
        super().__init__()
        width = config.width
        self.nibs = config.nibs
        self.ink, self.line = nn.LayerNorm(width), nn.LayerNorm(width)
        self.strokes, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.slope = nn.Parameter(torch.linspace(0.1, 0.5, config.nibs))
        self.press, self.lift = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        place = torch.arange(length, device=x.device)
        q, k, v = self.strokes(self.ink(x)).view(batch, length, self.nibs, -1).transpose(1, 2).chunk(3, dim=-1)
        far = (place[:, None] - place).to(x.dtype) * self.slope[:, None, None]  # [nibs, length, length]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 - far
        scores = scores.masked_fill(place[:, None] < place, -torch.inf)
        mixed = scores.softmax(-1) @ v
        x = x + self.join(mixed.transpose(1, 2).flatten(-2))
        gate, up = self.press(self.line(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return x + self.lift(F.silu(gate) * up)


class QuillForCausalLM(PreTrainedModel):
    config_class = QuillConfig

    def __init__(self, config: QuillConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Stroke(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def get_output_embeddings(self) -> nn.Linear:
        return self.logits

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.logits(self.norm(x))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


def main() -> None:
    args = arguments(__doc__, steps=10, batch_size=4).parse_args()
    if args.model is not None:
        raise SystemExit("error: this tutorial has a model of its own; leave --model out")
    rank, _ = start()
    tokenizer = load_tokenizer(args)
    torch.manual_seed(0)
    model = QuillForCausalLM(QuillConfig(vocab_size=len(tokenizer)))

    # What `autopar policy new quill.py:QuillForCausalLM` does: one forward without data, every feature followed.
    derived = derive(model)
    text = yaml_text(derived.tree, ["Quill: derived from its modules and a forward."])
    path = args.output / "quill.yaml"
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    dist.barrier()
    say(text.rstrip())
    say(f"stays whole: {', '.join(derived.whole) or 'nothing'}")

    # What `autopar policy check` prints: plan, shards and a dry run, on tensors without data.
    report = check_policy(model, path, tp=2)
    say(f"check: {'holds' if report['holds'] else 'does not hold'}; dry run: {report['dry_run']}")
    for entry in report["ranks"]:
        say(f"tp rank {entry['tp']} of 2 would hold {entry['parameters']:,} of {report['parameters']:,} parameters")

    # What `autopar verify` does: plain and parallel on the same inputs. Under torchrun the ranks of the job compare.
    config = {"model_parallelism": {"tensor_parallel_size": max(2, dist.get_world_size())}, "policy": str(path)}
    proof = autopar.verify(model, config, checks=["forward", "backward"])
    held = sum(row.holds is True for row in proof.rows)
    say(f"verify: {held} comparisons hold, {sum(row.holds is False for row in proof.rows)} do not")
    proof.raise_if_failed()

    # The policy stands in the config; policy: derive would have derived it here, without the file and the proof.
    config["model_parallelism"]["tensor_parallel_size"] = dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    say(f"{mesh(model.mpu)}: heads on rank 0: {model.layers[0].nibs}, slope {list(model.layers[0].slope.shape)}")
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
    model.save_parallelized(args.output / "quill", merge_checkpoints=True)
    with torch.no_grad():
        logits = model(ids).logits.cpu()
        again = QuillForCausalLM.from_pretrained(args.output / "quill")(ids.cpu()).logits
    say(f"merged checkpoint, plain model: logits differ by less than 1e-5: {(again - logits).abs().max() < 1e-5}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
