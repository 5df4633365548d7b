"""Tutorial 13: context parallelism: every rank holds the whole model, and its rows of each sequence.

python tutorials/13_long_sequences.py
torchrun --nproc-per-node 2 tutorials/13_long_sequences.py
torchrun --nproc-per-node 4 tutorials/13_long_sequences.py --length 16384 --steps 2
torchrun --nproc-per-node 4 tutorials/13_long_sequences.py --tensor-parallel-size 2 --method gather
"""

from __future__ import annotations

import argparse
import copy
import time
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, say, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar


class PeakMemory(TorchDispatchMode):
    """Counts bytes of the tensors that are made inside: the most that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given | self.alive.keys():
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            del self.alive[key]
            self.now -= size

        self.alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


class Run(NamedTuple):
    losses: list[float]
    mib: float  # at most, besides the weights
    speed: float  # tokens a second


def train(model: Any, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> Run:
    """One step for each batch: the first tells the memory, the others the time."""
    losses, seconds = [], []
    memory = PeakMemory()
    for ids in batches:
        begin = time.perf_counter()
        if not losses:
            with memory:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
        else:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    timed = seconds[1:] or seconds
    return Run(losses, memory.most / 2**20, batches[0].numel() * len(timed) / sum(timed))


def plot(rows: list[tuple[str, float]]) -> str:
    """Draw a bar for each."""
    most = max(value for _, value in rows)
    return "\n".join(f"{name:>24} {'#' * max(1, round(40 * value / most))} {value:.2f} MiB" for name, value in rows)


def main() -> None:
    parser = arguments(__doc__, steps=3, batch_size=1)
    parser.add_argument("--length", dest="context", type=int, help="longest sequence; the same as --context")
    parser.set_defaults(context=1024)
    parser.add_argument(
        "--method", default="auto", choices=("auto", "ulysses", "gather"), help="of attention over rows"
    )
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train the plain model on rank 0, which must be able to hold whole sequences",
    )
    args = parser.parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    model = load_model(args, tokenizer).eval()  # see tutorial 2
    plain = copy.deepcopy(model) if args.compare and rank == 0 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Every rank is given the same whole sequences; the blocks of the model work on this rank's rows of them.
    tp = args.tensor_parallel_size or 1
    parallelism: dict[str, Any] = {"tensor_parallel_size": tp, "context_parallel_size": world // tp}
    parallelism["context_parallel_method"] = args.method
    model = autopar.initialize(model, {"model_parallelism": parallelism})
    mpu = model.mpu
    say(f"tensor parallel {tp} x context parallel {mpu.cp.size} on {mpu.device.type}")

    # Each rank has the gradients of its rows. DDP averages over replicas and rows; here there is one replica.
    group = mpu.dp_cp.group
    engine = DistributedDataParallel(model, process_group=group)
    texts = load_text(args.dataset)
    if plain is not None:
        plain.to(mpu.device)
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    bars, worst = [], 0.0
    for length in (args.context // 4, args.context // 2, args.context):
        data = Blocks(texts, tokenizer, length)
        numbers = [number % len(data) for number in range(args.steps * args.batch_size)]
        batches = list(data.ids[numbers].to(mpu.device).split(args.batch_size))
        runs = {f"context parallel {mpu.cp.size}": train(engine, optimizer, batches)}
        dist.barrier()
        if plain is not None:
            runs["plain"] = train(plain, plain_optimizer, batches)
            cut, whole = (run.losses for run in runs.values())
            worst = max(worst, *(abs(a - b) for a, b in zip(cut, whole, strict=True)))
        dist.barrier()
        for name, run in runs.items():
            losses = f"loss {run.losses[0]:.6f} -> {run.losses[-1]:.6f}"
            say(f"{length} tokens, {name}: {losses}, at most {run.mib:.2f} MiB on rank 0, {run.speed:,.0f} tokens/s")
            bars.append((f"{length}, {name}", run.mib))
    say(f"activations and gradients\n{plot(bars)}")
    if plain is not None:
        say(f"largest difference of losses: {worst:.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
