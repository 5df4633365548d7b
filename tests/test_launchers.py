"""Processes that something else than torchrun has started: accelerate's launchers, torch.multiprocessing."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRAIN = """
    import os, sys
    import torch
    import torch.distributed as dist
    import autopar
    from tests.parity import language_batches
    from tests.small import gpt2

    def train():
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
"""


def run(folder: Path, script: str, *before: str) -> str:
    (folder / "script.py").write_text(textwrap.dedent(TRAIN) + textwrap.dedent(script))
    known = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in known}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *before, str(folder / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=240)
    assert done.returncode == 0, done.stderr[:4000]  # the ranks' own lines come first, the launcher's last
    return done.stdout


@pytest.mark.tier("all")
def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    script = "train()\ndist.destroy_process_group()"
    printed = run(tmp_path, script, *launch, "--mixed_precision", "no", "--main_process_port", "0")
    assert all(f"rank {rank} of 2 is right" in printed for rank in range(2)), printed
