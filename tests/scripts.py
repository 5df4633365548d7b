"""Python in a process of its own, with the tree on its path."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def python(*arguments: object, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in a folder, with environment variables."""
    known = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**known, "PYTHONPATH": str(ROOT), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def printed(*arguments: object, folder: Path | None = None, **variables: str) -> str:
    """Return what ``python ARGUMENTS`` prints; its last words if it fails."""
    done = python(*arguments, folder=folder, **variables)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[:4000]
    return done.stdout


def torchrun(folder: Path, script: str, ranks: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script on so many ranks, with environment variables."""
    (folder / "train.py").write_text(script)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    return python(*launcher, ranks, folder / "train.py", **variables)
