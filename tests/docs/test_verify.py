"""docs/verify.md: its commands print what is printed there but for rounding and time, and end with these exit codes.

UPDATE_DOCS=1 python -m pytest tests/docs/test_verify.py      writes the outputs into the page
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from autopar.cli import app
from autopar.tools.verification.outputs import TOLERANCES
from autopar.tools.verification.verify import CHECKS
from tests.docs.pages import DOCS, codes
from tests.verification.faults import FAULTS

PAGE = DOCS / "verify.md"


@pytest.mark.tier("all")
def words(printed: str) -> list[str]:
    """The lines without numbers, which of the tensors is the worst, and the widths of columns."""
    text = re.sub(r"(worst [\w ]+): [\w.]+", r"\1", printed)
    text = re.sub(r"\d+(\.\d+)?(e-\d+)?|equal", "#", re.sub(r"─+", "-", text))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if not line.startswith("all-")]  # what carries collectives depends on the machine


def test_the_commands_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    text = PAGE.read_text()
    (policy,) = codes(text, "yaml")
    assert policy.file
    (tmp_path / policy.file).write_text(policy.text)
    right, wrong = codes(text, "bash")
    for number, (code, status) in enumerate(((right, 0), (wrong, 1))):
        result = CliRunner().invoke(app, shlex.split(code.text)[1:])
        assert result.exit_code == status, result.output
        shown, printed = codes(text, "text")[number].text, result.stdout.replace(f"{tmp_path}/", "")
        if os.environ.get("UPDATE_DOCS"):
            before = f"```bash\n{code.text}```\n\n```text\n"
            text = text.replace(f"{before}{shown}```", f"{before}{printed}```")
            PAGE.write_text(text)
        else:
            assert words(printed) == words(shown)


def test_the_page_lists_every_argument_and_check() -> None:
    command = get_command(app).commands["verify"]  # type: ignore[attr-defined]
    options = {max(parameter.opts, key=len) for parameter in command.params if parameter.name != "model"}
    table = "".join(line for line in PAGE.read_text().splitlines() if line.startswith("| `--"))
    assert set(re.findall(r"`(--[a-z-]+)`", table)) == options
    assert [name for name in re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE) if name != "MODEL"] == list(
        CHECKS
    )


def test_the_numbers_of_the_page() -> None:
    text = " ".join(PAGE.read_text().split())
    assert f"plant {len(FAULTS)} faults," in text
    for dtype, allowed in TOLERANCES.items():
        assert f"{allowed:.0e} in {str(dtype).removeprefix('torch.')}".replace("e-0", "e-") in text
