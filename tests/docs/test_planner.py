"""docs/planner.md: what its command prints is what is printed there.

UPDATE_DOCS=1 python -m pytest tests/docs/test_planner.py      writes the output into the page
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from tests.docs.pages import DOCS, codes, same

PAGE = DOCS / "planner.md"


@pytest.mark.tier("all")
def test_the_command_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    text = PAGE.read_text()
    (shell,), (shown,) = codes(text, "bash"), codes(text, "text")
    result = CliRunner().invoke(app, shlex.split(shell.text)[1:])
    assert result.exit_code == 0, result.output
    same(PAGE, text.replace(f"```text\n{shown.text}```", f"```text\n{result.stdout}```"))
    assert autopar.ParallelConfig.parse(tmp_path / "config.yaml", 16)


def test_the_page_lists_every_argument() -> None:
    command = get_command(app).commands["plan"]  # type: ignore[attr-defined]
    options = {max(parameter.opts, key=len) for parameter in command.params if parameter.name != "model"}
    table = "".join(line for line in PAGE.read_text().splitlines() if line.startswith("| `-"))
    named = {"--output" if name == "-o" else name for name in re.findall(r"`(--?[a-z-]+)", table)}
    assert named - {"--no-checkpointing", "--no-sequence-parallel"} == options
