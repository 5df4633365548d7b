"""Find and read the files of policies: those that come with autopar, each once in a process, and the user's."""

from __future__ import annotations

import functools
from pathlib import Path

from autopar.errors import PolicyError
from autopar.policy.yaml_reader import Fail, Node, Where, read_text, yaml_tree

__all__ = [
    "comes_with_autopar",
    "compose",
    "fail_in",
    "policy_files",
    "policy_folder",
    "policy_text",
    "policy_tree",
    "reference",
]


@functools.cache
def policy_folder() -> Path:
    """Return the folder of the policies that come with autopar: in the wheel, or beside the package in a checkout."""
    inside = Path(__file__).resolve().parents[1] / "_policies"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "policies"


def reference() -> Path:
    """Return the page on the form of a policy, where this installation has it."""
    return policy_folder() / "README.md"


@functools.lru_cache(maxsize=8)
def policy_files(folder: Path | None = None) -> tuple[Path, ...]:
    """List all policy files (not fragments), sorted by name."""
    return tuple(sorted((folder or policy_folder()).glob("*.yaml")))


@functools.cache
def policy_text(path: Path) -> str:
    """Return the text of a file that comes with autopar; empty if it cannot be read (whoever parses it says why)."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


@functools.cache
def comes_with_autopar(path: Path) -> bool:
    """Return whether the file is one of those that come with autopar."""
    return path.resolve().is_relative_to(policy_folder().resolve())


def policy_tree(path: Path) -> Node:
    """Read a file; one that comes with autopar once in a process."""
    return _own_tree(path) if comes_with_autopar(path) else _read_file(path)


def _read_file(path: Path) -> Node:
    own = comes_with_autopar(path)
    shown = str(Path("policies") / path.resolve().relative_to(policy_folder().resolve()) if own else path)
    return compose(read_text(path, fail_in(shown)), shown)


_own_tree = functools.cache(_read_file)


def compose(text: str, file: str) -> Node:
    """Read a policy from its text. ``file`` stands in messages."""
    tree = yaml_tree(text, file, fail_in(file))
    if tree.value is None:
        raise PolicyError("is empty", tree.where)
    return tree


def fail_in(file: str) -> Fail:
    """Make the errors of one file."""

    def fail(problem: str, line: int | str | None) -> PolicyError:
        return PolicyError(problem, Where(file, line)) if line else PolicyError(f"policy file '{file}' {problem}")

    return fail
