"""Runs several tutorials one after another in one process, so that torch and transformers are imported once.

    python run_scripts.py JOBS       or under torchrun

JOBS is a JSON file: ``{name: [script, argument, ...]}``. What rank 0 prints goes to NAME.out beside it.
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist


def _keep(*_: Any) -> None:
    """In place of ``destroy_process_group``: the next script goes on with the same group."""


def run_script(script: str, arguments: list[str]) -> str:
    """Runs one as ``python script argument ...`` would; returns what this rank printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        start_script(script, arguments)
    return printed.getvalue()


def start_script(script: str, arguments: list[str]) -> None:
    """Runs one in this process."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as python does for a script
    runpy.run_path(script, run_name="__main__")


def main(jobs: Path) -> None:
    destroy, dist.destroy_process_group = dist.destroy_process_group, _keep
    for name, (script, *arguments) in json.loads(jobs.read_text()).items():
        printed = run_script(script, arguments)
        if dist.get_rank() == 0:
            jobs.with_name(f"{name}.out").write_text(printed)
    dist.destroy_process_group = destroy
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
