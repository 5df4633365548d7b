"""The versions that the changelog names are those of the package, of its files and of the tests."""

import json
import re
import tomllib

import yaml
from packaging.requirements import Requirement

import autopar
from autopar.checkpoint.format import FORMAT_VERSION, versions
from tests.docs.pages import CHANGELOG, ROOT
from tests.versions import LIBRARIES, RECORDED

TEXT = CHANGELOG.read_text()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)


def row(name: str) -> list[str]:
    """The cells of a row of the table of versions."""
    (line,) = re.findall(rf"^\| {name}\b(.*)\|$", TEXT, re.MULTILINE)
    return [cell.strip() for cell in line.split(" | ")[1:]]


def test_the_version_is_in_one_place_and_the_other_places_repeat_it() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert SETTINGS["tool"]["hatch"]["version"] == {"path": "autopar/__init__.py"}
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == versions()["autopar"] == autopar.__version__
    ((version, date), *_) = re.findall(r"^## ([\d.]+) \(([\d-]+)\)$", TEXT, re.MULTILINE)
    assert (version, date) == (autopar.__version__, str(cited["date-released"]))
    assert f"version = {{{version}}}" in TEXT and f"year    = {{{date[:4]}}}" in TEXT


def test_what_it_works_with_is_what_the_package_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(text for listed in extras.values() for text in listed)]
    needs = {one.name: one.specifier for one in map(Requirement, wanted)}
    pythons = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert row("Python")[0] == f"{pythons[0]} to {pythons[-1]}" and PROJECT["requires-python"] == f">={pythons[0]}"
    for package, name in LIBRARIES.items():
        ends = {one.operator: one.version for one in needs[package]}
        first, (major, minor) = ends[">="], ends["<"].split(".")
        last = f"{major}.{int(minor) - 1}"
        assert row(name)[0].split(";")[0] == (first if first == last else f"{first} to {last}"), "what nobody ran"
        ran = re.findall(r"[\d.]+", row(name)[1])
        assert {version.rpartition(".")[0] for version in ran} >= {last} and all(map(needs[package].contains, ran))
    for package in ("torch", "transformers", "accelerate", "peft", "bitsandbytes"):
        assert needs[package].contains(PINNED[package]) and any(one.operator == "<" for one in needs[package])


def test_what_the_tests_run_with_is_what_is_pinned() -> None:
    assert row("torch")[1].split("; ")[0] == PINNED["torch"]
    oldest = json.loads(RECORDED.read_text())["oldest"]["versions"]
    assert row("transformers")[1] == f"{PINNED['transformers']}; {oldest['transformers']}"
    assert row("accelerate")[1] == PINNED["accelerate"] and row("PEFT")[1] == PINNED["peft"]
    (deepspeed,) = re.findall(r"deepspeed==([\d.]+)", (ROOT / "Makefile").read_text())
    assert row("DeepSpeed") == [deepspeed, f"{deepspeed}, on CPUs"]


def test_the_format_of_checkpoints_is_the_one_that_is_read() -> None:
    assert f"a `format_version`, {FORMAT_VERSION} in this version" in TEXT
