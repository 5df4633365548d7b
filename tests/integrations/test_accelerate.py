"""accelerate around a parallelized model without its loaders and DDP: the recipe against one process."""

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.compare import same_weights
from tests.integrations.runs import Sequences
from tests.parity import close
from tests.pool import pooled
from tests.small import grouped


def accelerator_of(**settings: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    assert accelerator.state.num_processes == dist.get_world_size()
    return accelerator


@pooled(world_size=4)
def test_the_recipe_is_the_plain_loop() -> None:
    """At tp 2 x dp 2, in fp32 and in accelerate's bf16: two steps of two micro-batches, clipped."""
    for precision, tolerance in (("no", 1e-5), ("bf16", 0.02)):
        accelerator = accelerator_of(
            gradient_accumulation_steps=2, mixed_precision=precision, step_scheduler_with_optimizer=False
        )
        plain = grouped().train()
        model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loader = autopar.prepare_dataloader(Sequences(), batch_size=2, mpu=model.mpu)
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        norms, losses = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    autopar.average_gradients(model)
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        halving = torch.optim.lr_scheduler.StepLR(reference, 1, 0.5)
        batches = [[*autopar.prepare_dataloader(Sequences(), 2, mpu=Place(rank))] for rank in range(2)]
        for step in range(2):
            for number in (2 * step, 2 * step + 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    both = [plain(**batches[rank][number]).loss for rank in range(2)]
                (sum(both) / 4).backward()
                close(losses[number], both[model.mpu.dp.rank].detach(), f"loss {number} {precision}", tolerance)
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            close(norms[step], norm, f"norm {step} {precision}", tolerance)
            reference.step()
            halving.step()
            reference.zero_grad()
        assert scheduler.get_last_lr() == halving.get_last_lr() == [0.025]
        same_weights(model, plain, tolerance, precision)
        model.mpu.destroy()


class Place:
    """An mpu as far as a loader asks it: replica ``rank`` of two."""

    is_master = False

    def __init__(self, rank: int) -> None:
        self.dp = type("Axis", (), {"rank": rank, "size": 2})
