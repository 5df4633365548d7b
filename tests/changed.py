"""Which policies a change touches: files of the tree that differ from the branch it began at, and what extends them."""

import functools
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


@functools.cache
def touched_policies() -> frozenset[str]:
    """Return the policies and fragments that the change touches, directly or through what they extend."""
    changed = {match[1] for path in changed_files() if (match := re.fullmatch(r"policies/(.+)\.yaml", path))}
    return frozenset(reached(changed, _extended()) if changed else ())


def _extended() -> dict[str, set[str]]:
    """Return what each policy file extends; a variant counts as one that extends its file."""
    folder, found = ROOT / "policies", dict[str, set[str]]()
    for path in folder.rglob("*.yaml"):
        name, tree = f"{path.relative_to(folder).with_suffix('')}", yaml.safe_load(path.read_text())
        found.setdefault(name, set()).update(_taken(tree))
        for variant in tree.get("variants", ()):
            found.setdefault(variant, set()).add(name)
    return found


def _taken(tree: Any) -> Iterator[str]:
    """Yield the names below every ``extends`` of a policy."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree if isinstance(tree, list) else ()):
        yield from _names(value) if key == "extends" else _taken(value)


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _names(each)


def reached(changed: Iterable[str], uses: dict[str, set[str]]) -> set[str]:
    """Return what has changed and whoever uses it, directly or not."""
    found, new = set[str](), set(changed)
    while new:
        found |= new
        new = {name for name, used in uses.items() if used & new} - found
    return found


def changed_files(root: Path = ROOT) -> set[str]:
    """Return paths that differ from where this branch left the one it follows; without git, or on it, none."""
    base = os.environ.get("AUTOPAR_BASE") or _git(root, "merge-base", "HEAD", "@{upstream}") or "HEAD"
    listed = _git(root, "diff", "--name-only", base.strip()) + _git(root, "ls-files", "--others", "--exclude-standard")
    return set(listed.split("\n")) - {""}


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout
