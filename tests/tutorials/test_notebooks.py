"""The notebooks of the tutorials run, and print the losses that are stored in them.

UPDATE_DOCS=1 python -m pytest --tier all tests/tutorials/test_notebooks.py      stores their outputs
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fetched_packages import need_package
from tests.tutorials.test_tutorials import DIFFERENCE, ENVIRONMENT, ROOT, TUTORIALS

NOTEBOOKS = sorted(path.name for path in TUTORIALS.glob("notebooks/*.ipynb"))
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=600, record_timing=False, coalesce_streams=True).execute()
book.metadata.language_info = {"name": "python"}
nbformat.write(book, sys.argv[1])
"""


def numbers(notebook: Path) -> tuple[list[float], list[float], int]:
    """Return the losses and the differences that a notebook shows, and the number of its pictures."""
    outputs = [output for cell in json.loads(notebook.read_text())["cells"] for output in cell.get("outputs", [])]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    losses, differences = re.findall(r"loss (\d+\.\d+)", text), DIFFERENCE.findall(text)
    return [*map(float, losses)], [*map(float, differences)], sum("image/png" in one.get("data", ()) for one in outputs)


@pytest.mark.tier("all")
@pytest.mark.every_case
@pytest.mark.tier("sweep", only=("qlora_on_two_t4.ipynb",))
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_its_stored_losses(name: str, tmp_path: Path) -> None:
    need_package("nbclient")
    stored = TUTORIALS / "notebooks" / name
    copy = shutil.copytree(stored.parent, tmp_path / "notebooks") / name
    (tmp_path / "data").symlink_to(TUTORIALS / "data")
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / '.cache' / 'nbclient'}", "IPYTHONDIR": str(tmp_path)}
    paths["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # torchrun
    command, env = [sys.executable, "-c", EXECUTE, str(copy)], {**os.environ, **ENVIRONMENT, **paths}
    done = subprocess.run(command, env=env, cwd=copy.parent, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    if os.environ.get("UPDATE_DOCS"):
        shutil.copy(copy, stored)
    (losses, differences, pictures), (expected, due, shown) = numbers(copy), numbers(stored)
    assert len(losses) >= 4 and losses == pytest.approx(expected, abs=2e-3)
    assert pictures == shown >= 2 and len(differences) == len(due)
    assert differences[:1] < [1e-5] and max(differences, default=0) < 1e-3  # losses; weights after AdamW


def test_the_readme_lists_every_notebook() -> None:
    assert sorted(re.findall(r"\(notebooks/(\w+\.ipynb)\)", (TUTORIALS / "README.md").read_text())) == NOTEBOOKS
