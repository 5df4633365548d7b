"""The page of the tutorials shows each of them: its command and what it prints."""

from __future__ import annotations

import re
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


def test_every_tutorial_has_its_page_with_a_command_and_an_output() -> None:
    sections = re.split(r"^## ", (TUTORIALS / "README.md").read_text(), flags=re.MULTILINE)
    for script in sorted(TUTORIALS.glob("[0-9]*.py")):
        (section,) = [part for part in sections if f"({script.name})" in part]
        assert re.search(rf"^torchrun .*{re.escape(script.name)}", section, re.MULTILINE)
        assert "```text\n" in section
