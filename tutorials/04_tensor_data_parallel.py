"""Tutorial 4: tensor and data parallelism together: replicas of a model, each sharded over some ranks.

python tutorials/04_tensor_data_parallel.py
torchrun --nproc-per-node 4 tutorials/04_tensor_data_parallel.py --tensor-parallel-size 2
torchrun --nproc-per-node 8 tutorials/04_tensor_data_parallel.py --model gpt2 --tensor-parallel-size 4 --no-compare
"""

from __future__ import annotations

import argparse
import copy
from itertools import islice

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import autopar


def main() -> None:
    parser = arguments(__doc__, steps=20, batch_size=4)
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train the plain model with the batches of all replicas, on rank 0, which must be able to hold it",
    )
    args = parser.parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    model = load_model(args, tokenizer)
    model.train(not args.compare)  # see tutorial 2
    plain = copy.deepcopy(model) if args.compare and rank == 0 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # The data-parallel size is what remains of the world: 4 processes and tensor_parallel_size 2 make 2 replicas.
    size = args.tensor_parallel_size or (2 if world % 2 == 0 else 1)
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": size}})
    mpu = model.mpu
    coordinates = [""] * world
    dist.all_gather_object(
        coordinates,
        f"rank {rank}: replica {mpu.dp.rank}, part {mpu.tp.rank} of the model",
    )
    say("\n".join(coordinates))

    # DDP averages gradients over the ranks that hold the same share of different replicas.
    engine = DistributedDataParallel(model, process_group=mpu.dp.group)
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, shuffle=True, seed=0, drop_last=True, mpu=mpu)
    losses, whole_batches = [], []
    with tqdm(total=args.steps, desc="parallel", disable=rank > 0) as bar:
        epoch = 0
        while len(losses) < args.steps:
            loader.set_epoch(epoch)  # another order in each epoch
            for batch in islice(loader, args.steps - len(losses)):
                ids = batch["input_ids"].to(mpu.device)
                loss = engine(input_ids=ids, labels=ids).loss
                loss.backward()
                autopar.clip_grad_norm_(engine, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                parts: list[tuple[float, torch.Tensor]] = [(0.0, ids)] * mpu.dp.size
                dist.all_gather_object(parts, (loss.item(), batch["input_ids"]), group=mpu.dp.group)
                losses.append(sum(part[0] for part in parts) / len(parts))
                whole_batches.append(torch.cat([part[1] for part in parts]))
                bar.update()
            epoch += 1
    say(f"{mesh(mpu)}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")

    if plain is not None:
        plain.to(mpu.device)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        expected = []
        for ids in tqdm(whole_batches, "plain"):
            loss = plain(input_ids=ids.to(mpu.device), labels=ids.to(mpu.device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
        say(f"one process on the whole batch of {len(ids)}: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"largest difference of losses: {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
