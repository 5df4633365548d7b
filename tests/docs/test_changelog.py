"""The versions that the changelog names are those of the package, of its files and of the tests."""

from __future__ import annotations

import re
import tomllib

import autopar
from autopar.checkpoint.format import FORMAT_VERSION, WITH_EXPERTS
from tests.docs.pages import DOCS, ROOT
from tests.test_oldest import OLDEST

TEXT = (DOCS / "changelog.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)


def row(name: str) -> list[str]:
    """The cells of a row of the table of versions."""
    (line,) = re.findall(rf"^\| {name}\b(.*)\|$", TEXT, re.MULTILINE)
    return [cell.strip() for cell in line.split(" | ")[1:]]


def test_the_version_is_that_of_the_package() -> None:
    assert PROJECT["version"] == autopar.__version__
    assert set(re.findall(r"\b0\.1\.\d+\b", TEXT)) == {autopar.__version__}


def test_what_it_works_with_is_what_the_package_asks_for() -> None:
    needs = {"Python": f"python{PROJECT['requires-python']}"}
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["trainer"]]:
        needs[re.split(r"[<>=]", text)[0]] = text
    needs["PEFT"] = PROJECT["optional-dependencies"]["peft"][0]
    assert row("Python")[0] == "3.11 or newer" and needs["Python"] == "python>=3.11"
    assert row("torch")[0] == "2.13, 2.14" and needs["torch"] == "torch>=2.13,<2.15"
    assert row("transformers")[0].startswith("5.20 or newer, below 6;")
    assert needs["transformers"] == "transformers>=5.20,<6"
    assert row("accelerate")[0] == "1.15 or newer" and needs["accelerate"] == "accelerate>=1.15"
    assert row("PEFT")[0] == "0.21 or newer" and needs["PEFT"] == "peft>=0.21"


def test_what_the_tests_run_with_is_what_is_pinned() -> None:
    assert row("torch")[1] == PINNED["torch"]
    assert row("transformers")[1] == f"{PINNED['transformers']}, and {OLDEST}"
    assert row("accelerate")[1] == PINNED["accelerate"] and row("PEFT")[1] == PINNED["peft"]
    (deepspeed,) = re.findall(r"deepspeed==([\d.]+)", (ROOT / "Makefile").read_text())
    assert row("DeepSpeed") == [deepspeed, f"{deepspeed}, on CPUs"]


def test_formats_of_checkpoints_are_those_that_are_read() -> None:
    assert (FORMAT_VERSION, WITH_EXPERTS) == (2, 5)
    assert "This version writes 2 to 5, the lowest that the content allows, and reads" in TEXT
