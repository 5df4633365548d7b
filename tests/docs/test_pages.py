"""Links, headings, files, commands, figures and versions of the pages are right."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.main import get_command

import autopar
from autopar.checkpoint.format import FORMAT_VERSION
from autopar.cli import app
from autopar.pipeline_parallel.schedule import make_schedule
from tests.docs.pages import DOCS, PAGES, README, ROOT, anchors, codes
from tests.test_version_ends import OLDEST

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert other.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(other.read_text()), target


def test_files_in_backticks_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w./-]+)`", prose(page)))
    top = {
        name for name in named if re.match(r"(autopar|docs|tests|policies|tutorials|benchmarks|\.ci)/(?!out\b)", name)
    }
    inside = {name for name in named - top if re.search(r"/|\.py$", name)} if page.name == "design.md" else set()
    missing = {name for name in top if not (ROOT / name).exists()}
    missing |= {name for name in inside if not (ROOT / "autopar" / name).exists()}
    assert not missing


def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *(block.text for block in codes(text, "bash"))])
    assert set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)) <= targets
    command = get_command(app)
    known = set(command.commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"^autopar ([a-z]+)", code, re.MULTILINE)) <= known
    for script in re.findall(r"(?<!tests/)tutorials/[\w./]+\.py", text):
        assert (ROOT / script).exists(), script


def test_the_readme_is_short_and_links_to_every_page() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    for page in DOCS.glob("*.md"):
        assert f"](docs/{page.name}" in text, page.name


def test_the_figures_are_up_to_date() -> None:
    drawing = runpy.run_path(str(DOCS / "figures" / "draw.py"))
    for name, draw in drawing["FIGURES"].items():
        assert (DOCS / "figures" / f"{name}.svg").read_text() == draw().svg(), "run: python docs/figures/draw.py"
    actions = [[f"{each.kind}{each.microbatch}" for each in rank] for rank in make_schedule("1f1b", range(2), 4)]
    assert drawing["one_f_one_b"](2, 4) == actions


def test_anchors_of_headings() -> None:
    text = "# One `two`: three\n\n```python\n# no heading\n```\n\n### 2. Check it, now\n"
    assert anchors(text) == {"one-two-three", "2-check-it-now"}


CHANGELOG = (DOCS / "changelog.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)


def row(name: str) -> list[str]:
    (line,) = re.findall(rf"^\| {name}\b(.*)\|$", CHANGELOG, re.MULTILINE)
    return [cell.strip() for cell in line.split(" | ")[1:]]


def test_the_version_is_that_of_the_package() -> None:
    assert PROJECT["version"] == autopar.__version__
    assert set(re.findall(r"\b0\.1\.\d+\b", CHANGELOG)) == {autopar.__version__}


def test_what_it_works_with_is_what_the_package_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(text for listed in extras.values() for text in listed)]
    needs = {one.name: one.specifier for one in map(Requirement, wanted)}
    pythons = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert row("Python")[0] == f"{pythons[0]} to {pythons[-1]}" and PROJECT["requires-python"] == f">={pythons[0]}"
    rows = {"torch": "torch", "transformers": "transformers", "accelerate": "accelerate", "TRL": "trl", "PEFT": "peft"}
    for name, package in rows.items():
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
    assert row("transformers")[1] == f"{PINNED['transformers']}; {OLDEST}"
    assert row("accelerate")[1] == PINNED["accelerate"] and row("PEFT")[1] == PINNED["peft"]
    (deepspeed,) = re.findall(r"deepspeed==([\d.]+)", (ROOT / "Makefile").read_text())
    assert row("DeepSpeed") == [deepspeed, f"{deepspeed}, on CPUs"]


def test_the_format_of_checkpoints_is_the_one_that_is_read() -> None:
    assert f"a `format_version`, {FORMAT_VERSION} in this version" in CHANGELOG
