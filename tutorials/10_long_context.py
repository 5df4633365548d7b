"""Tutorial 10: context parallelism. Each rank computes a shard of every long sequence.

torchrun --nproc-per-node 2 tutorials/10_long_context.py
torchrun --nproc-per-node 4 tutorials/10_long_context.py --length 16384 --steps 2 --no-compare
torchrun --nproc-per-node 4 tutorials/10_long_context.py --tensor-parallel-size 2 --method gather

It trains on sequences of three lengths, prints the peak memory of activations and gradients on rank 0, and compares
memory and losses with one process.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.distributed as dist
from offline import (
    Blocks,
    arguments,
    batches,
    finish,
    largest_difference,
    load_model,
    load_text,
    load_tokenizer,
    mesh,
    say,
    start,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar


class PeakMemory(TorchDispatchMode):
    """Count the bytes of all tensors that are created inside, also on the CPU. ``most`` is the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs | self.alive.keys():
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


def train(model: Any, optimizer: torch.optim.Optimizer, steps: list[torch.Tensor]) -> tuple[list[float], float]:
    """Take one step for each batch; return the losses, and the peak memory of the first step in MiB."""
    losses, memory = [], PeakMemory()
    for ids in steps:
        if losses:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        else:
            with memory:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, memory.most / 2**20


def main() -> None:
    parser = arguments(__doc__, steps=3, batch_size=1, compare=True)
    parser.add_argument("--length", dest="context", type=int, help="longest sequence; the same as --context")
    parser.set_defaults(context=1024)
    parser.add_argument("--method", default="auto", choices=("auto", "ulysses", "gather"), help="method of attention")
    args = parser.parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    model = load_model(args, tokenizer).eval()  # dropout is random: the comparison runs without it
    reference = copy.deepcopy(model) if args.compare and rank == 0 else None

    # 1. Every rank gets the same full sequences. Each computes its shard of them.
    tp = args.tensor_parallel_size or 1
    sizes = {"tensor_parallel_size": tp, "context_parallel_size": world // tp, "context_parallel_method": args.method}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = autopar.initialize(model, {"model_parallelism": sizes})
    mpu = model.mpu
    say(mesh(mpu))

    # 2. Each rank has the gradients of its shard. DDP over mpu.dp_cp averages them over replicas and sequence shards.
    engine = DistributedDataParallel(model, process_group=mpu.dp_cp.group)
    texts = load_text(args.dataset)
    if reference is not None:
        reference.to(mpu.device)
        reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for length in (args.context // 4, args.context // 2, args.context):
        data = Blocks(texts, tokenizer, length)
        steps = [ids.to(mpu.device) for ids in batches(data, args.steps, args.batch_size)]
        losses, peak = train(engine, optimizer, steps)
        say(f"{length} tokens: loss {losses[0]:.6f} -> {losses[-1]:.6f}, peak memory {peak:.2f} MiB on rank 0")
        dist.barrier()
        if reference is not None:
            expected, peak = train(reference, reference_optimizer, steps)
            say(f"  one process: peak memory {peak:.2f} MiB")
            say(f"  largest difference of losses: {largest_difference(losses, expected)}")
        dist.barrier()
    finish()


if __name__ == "__main__":
    main()
