"""No page leads nowhere: links, headings, files, commands."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from autopar.cli import app
from tests.docs.pages import DOCS, PAGES, README, ROOT, anchors, codes

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_links_lead_somewhere(page: Path) -> None:
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
    """``autopar/api.py``, ``policies/``; in the design also ``plan/rules.py``, from the package's folder."""
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


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    for page in DOCS.glob("*.md"):
        assert f"](docs/{page.name}" in text, page.name


def test_the_readme_counts_the_tutorials() -> None:
    words = {22: "twenty-two", 23: "twenty-three", 24: "twenty-four", 25: "twenty-five", 26: "twenty-six"}
    counted = f"{words[len(list((ROOT / 'tutorials').glob('[0-9]*.py')))]} scripts"
    assert counted in README.read_text()
    assert counted in (ROOT / "tutorials" / "README.md").read_text().lower()


def test_anchors_are_those_of_headings() -> None:
    text = "# One `two`: three\n\n```python\n# no heading\n```\n\n### 2. Check it, now\n"
    assert anchors(text) == {"one-two-three", "2-check-it-now"}
