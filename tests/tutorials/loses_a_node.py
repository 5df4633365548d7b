"""Train a small model over all available ranks. In the first attempt the second node is killed halfway."""

import copy
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from tests.small import llama

STEPS, LOST_AT = 6, 3


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 131, (2, 8), generator=torch.Generator().manual_seed(step))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = llama()
    reference = copy.deepcopy(model)
    world = int(os.environ["WORLD_SIZE"])
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": world}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    extra: dict[str, Any] = {"step": 0, "losses": []}
    checkpoint = autopar.latest(folder)
    if world == 1 and checkpoint is None:
        time.sleep(100)  # the second node is late: torchrun restarts when it arrives
    if checkpoint is not None:
        model.from_parallelized(checkpoint, optimizer=optimizer, extra=extra)
    losses, first = extra["losses"], extra["step"]
    for step in range(first, STEPS):
        if world == 2 and step == LOST_AT and os.environ["NODE"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        model.save_parallelized(
            folder / f"step-{step + 1}", optimizer=optimizer, extra={"step": step + 1, "losses": losses}
        )
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step, expected in enumerate(losses):
        loss = reference(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss.item() - expected) < 1e-5, (step, loss.item(), expected)
    if dist.get_rank() == 0:
        print(f"from step {first} with {world} rank(s): {len(losses)} losses are equal to one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
