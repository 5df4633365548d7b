"""Processes that accelerate's launcher has started."""

from pathlib import Path

import pytest

from tests.scripts import printed

TRAIN = """
import torch
import torch.distributed as dist
import autopar
from tests.parity import language_batches
from tests.small import gpt2

torch.set_num_threads(1)
plain = gpt2().train()
model = autopar.initialize(gpt2().train(), {"model_parallelism": {"tensor_parallel_size": 2}})
for one in (plain, model):
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for batch in language_batches(131):
        loss = one(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    one.loss_value = loss.item()
assert abs(model.loss_value - plain.loss_value) < 1e-5
print(f"rank {model.mpu.rank} of {model.mpu.world_size} is right", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.tier("all")
def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(TRAIN)
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    said = printed(*launch, "--mixed_precision", "no", "--main_process_port", "0", tmp_path / "train.py")
    assert all(f"rank {rank} of 2 is right" in said for rank in range(2)), said
