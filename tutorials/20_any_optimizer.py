"""Tutorial 20: an optimizer that looks at whole matrices, on shards of them, with the weights of one process.

python tutorials/20_any_optimizer.py
torchrun --nproc-per-node 2 tutorials/20_any_optimizer.py
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start
from torch import nn

import autopar


class Orthogonal(torch.optim.Optimizer):
    """Muon in a few lines: the momentum of a matrix with all its singular values near 1 (Newton-Schulz)."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                p.sub_(group["lr"] * (orthogonal(buffer) if p.ndim == 2 else buffer))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix.double() / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.to(matrix.dtype)


def main() -> None:
    args = arguments(__doc__, steps=6, batch_size=4).parse_args()
    _, world = start()
    tokenizer = load_tokenizer(args)
    plain = load_model(args, tokenizer)
    model = copy.deepcopy(plain)

    # Given to initialize, the optimizer is asked how it works: a copy of it steps a small matrix, whole and in halves.
    # It is not element by element, so a rank steps whole matrices: each rank some of them.
    optimizer = Orthogonal(model.parameters())
    model, optimizer = autopar.initialize(model, {"tp": world}, optimizer=optimizer)
    reference = Orthogonal(plain.parameters())

    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, shuffle=True, mpu=model.mpu)
    for batch in islice(cycle(loader), args.steps):
        ids = batch["input_ids"]
        for each, stepping in ((plain, reference), (model, optimizer)):
            loss = each(ids.to(each.device), labels=ids.to(each.device)).loss
            loss.backward()
            stepping.step()
            stepping.zero_grad()
    say(f"{mesh(model.mpu)}, {args.steps} steps, loss {loss.item():.4f}")

    # The state is that of whole matrices, and lies where they are stepped.
    matrix = max(optimizer.state, key=lambda p: p.shape.numel(), default=None)
    if matrix is not None and world > 1:
        say(f"a shard of {list(matrix.shape)}, its momentum {list(optimizer.state[matrix]['momentum'].shape)}")

    # So it goes on with another number of ranks: here each rank takes the whole model.
    model.save_parallelized(args.output / "any-optimizer", optimizer=optimizer)
    alone = copy.deepcopy(plain)
    alone, alone_optimizer = autopar.initialize(alone, {}, optimizer=Orthogonal(alone.parameters()))
    alone.from_parallelized(args.output / "any-optimizer", optimizer=alone_optimizer)
    momenta = zip(alone.parameters(), plain.parameters(), strict=True)
    worst = max(
        float((alone_optimizer.state[a]["momentum"].cpu() - reference.state[b]["momentum"]).abs().max())
        for a, b in momenta
        if "momentum" in reference.state[b]
    )
    say(f"momenta on 1 rank, from {world}: at most {worst:.1e} from those of one process")

    weights = dict(autopar.deparallelize(model).named_parameters())
    worst = max(
        float((weights[name].detach().cpu() - p).abs().max())
        for name, p in plain.state_dict().items()
        if name in weights
    )
    say(f"weights: at most {worst:.1e} from those of one process")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
