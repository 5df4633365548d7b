"""Tutorial 21: look inside a sharded model and change it: a logit lens, steering, an ablated head, a probe.

python tutorials/21_look_inside.py
torchrun --nproc-per-node 2 tutorials/21_look_inside.py
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from offline import arguments, load_model, load_text, load_tokenizer, mesh, say, start
from torch import nn

import autopar


def lens(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the logits of the last position after each block."""
    found: list[torch.Tensor] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append(model.lm_head(model.transformer.ln_f(hidden[:, -1:])).detach().cpu())

    handles = [block.register_forward_hook(look) for block in model.transformer.h]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


def steered(model: Any, ids: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Return the logits with a direction added after the first block, at position 3 only."""

    def steer(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        hidden[:, 3] += direction.to(hidden.device)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = model.transformer.h[0].register_forward_hook(steer)
    logits: torch.Tensor = model(ids).logits.detach().cpu()
    handle.remove()
    return logits


def ablated(model: Any, ids: torch.Tensor, head: int) -> torch.Tensor:
    """Return the logits without one head of the last block: its part of what goes into the output projection is 0."""
    size = model.config.n_embd // model.config.n_head

    def ablate(module: nn.Module, args: Any) -> Any:
        heads = args[0].clone()  # [batch, seq, heads * size], of all heads
        heads[..., head * size : (head + 1) * size] = 0
        return (heads,)

    handle = model.transformer.h[-1].attn.c_proj.register_forward_pre_hook(ablate)
    logits: torch.Tensor = model(ids).logits.detach().cpu()
    handle.remove()
    return logits


def made_by(module: nn.Module, model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs of a module in a forward of the model."""
    read: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: read.append(output))
    model(ids)
    handle.remove()
    return read


def probe(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Train a linear probe on the neurons of the first MLP for some steps; return its weights."""
    width = 4 * model.config.n_embd
    weights = nn.Parameter(torch.zeros(width, device=ids.device))
    target = torch.linspace(0, 1, ids.shape[1], device=ids.device)
    for _ in range(5):
        (neurons,) = made_by(model.transformer.h[0].mlp.act, model, ids)
        loss = (neurons @ weights - target).square().mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        weights.data -= 0.1 * gradient
    return weights.detach().cpu()


def main() -> None:
    args = arguments(__doc__, steps=1, batch_size=2).parse_args()
    _, world = start()
    tokenizer = load_tokenizer(args)
    plain = load_model(args, tokenizer).eval()
    model = autopar.initialize(copy.deepcopy(plain), {"tp": world}).eval()
    say(mesh(model.mpu))
    ids = tokenizer("\n".join(load_text(args.dataset)[:5]), return_tensors="pt")["input_ids"][:, : args.context]
    there = ids.to(model.mpu.device)
    direction = torch.linspace(-1, 1, plain.config.n_embd)

    # The same functions, on the plain model and on the sharded one: hooks see whole tensors.
    pairs = zip(lens(plain, ids), lens(model, there), strict=True)
    say(f"logit lens of {len(plain.transformer.h)} blocks: at most {max(far(*pair) for pair in pairs):.1e} apart")
    say(f"steering at position 3: {far(steered(plain, ids, direction), steered(model, there, direction)):.1e} apart")
    effects = [far(ablated(model, there, head), model(there).logits.detach().cpu()) for head in range(2)]
    say(f"ablated head 0: {far(ablated(plain, ids, 0), ablated(model, there, 0)):.1e} apart, effect {effects[0]:.2f}")
    say(f"probe of {4 * plain.config.n_embd} neurons: {far(probe(plain, ids), probe(model, there)):.1e} apart")

    # An edit of a whole matrix; afterwards each rank has its shards of the new one.
    for each in (plain, model):
        with autopar.full_params(each, "transformer.h.0.mlp") if each is model else torch.no_grad():
            weight = each.transformer.h[0].mlp.c_proj.weight
            weight.data += 0.1 * torch.outer(torch.linspace(0, 1, len(weight)), direction).to(weight.device)
    say(f"edited: {far(plain(ids).logits.detach(), model(there).logits.detach().cpu()):.1e} apart")
    dist.barrier()
    dist.destroy_process_group()


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


if __name__ == "__main__":
    main()
