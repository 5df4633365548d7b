"""Run several tutorials one after the other in one process, which imports torch and transformers once."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist


def _keep(*_: Any) -> None:
    """Replace ``destroy_process_group``: the next script uses the same group."""


def run_script(script: str, arguments: list[str]) -> str:
    """Run a script as ``python script argument ...`` does; return the output of this rank."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as python does for a script
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


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
