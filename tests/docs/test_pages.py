"""Links, headings, files, commands, figures and versions of the pages are right."""

import re
import runpy
from pathlib import Path

import pytest
from typer.main import get_command

from autopar.cli import app
from autopar.pipeline_parallel.schedule import make_schedule
from tests.docs.pages import DOCS, PAGES, README, ROOT, anchors, codes

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
