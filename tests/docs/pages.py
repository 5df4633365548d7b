"""The pages of the documentation, and the code in them."""

import os
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
POLICIES = ROOT / "policies" / "README.md"
CHANGELOG = ROOT / "CHANGELOG.md"
PAGES = [README, CHANGELOG, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("reference/*.md")), POLICIES]
PAGES += [ROOT / "tutorials" / "README.md", ROOT / "benchmarks" / "README.md"]


class Code(NamedTuple):
    """A fenced block: its language, its text, and the file name in its first line, such as ``# my_model.py``."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        named = re.match(r"# ([\w./]+\.(?:py|yaml))\b", self.text)
        return named.group(1) if named else None


def codes(text: str, language: str | None = None) -> list[Code]:
    """Return all blocks, or the blocks of one language, in order."""
    found = [Code(*match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    return [code for code in found if language in (None, code.language)]


def section(page: Path, start: str, end: str | None = None) -> str:
    """Return the text from one heading up to another heading."""
    text = page.read_text()
    text = text[text.index(start) :]
    return text[: text.index(end)] if end else text


def same(page: Path, text: str) -> None:
    """Compare a page with the text that it should have; UPDATE_DOCS=1 writes it."""
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(text)
    assert page.read_text() == text, "write the page: UPDATE_DOCS=1 python -m pytest, with this test"


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
