"""Policies that tests write: whole folders, the right texts that mistakes are made in, and exact messages."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.errors import PolicyError

MISTAKES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted(Path(__file__).with_name("mistakes").glob("*.yaml"))
}
RIGHT: dict[str, str] = {kind: mistakes["right"] for kind, mistakes in MISTAKES.items()}
MORE = "blocks: {modules: {gate: {column: ffn}}}\n"
MODULE = """\
units: {heads: block.num_heads}
blocks:
  modules:
    q: {column: heads * block.width}
    o: {row: heads}
    norm?: {replicated: heads}
  attributes: {num_heads: heads}
  inputs: {alibi: {sharded: heads, dim: 0}}
"""
TOWER = """\
match: {model_type: inner}
units: {ffn: inferred}
prefix: {embed: replicated}
every_stage: {rotary: replicated}
blocks: {path: layers, modules: {fc: {column: ffn}, out: {row: ffn}}}
suffix: {norm: replicated}
attributes: {width: ffn}
inputs: {bias: {sharded: ffn, dim: 0}}
"""


def write(folder: Path, **files: str) -> Path:
    """``name="text"`` becomes name.yaml; returns the path of the first."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def family(folder: Path, text: str = RIGHT["variants"]) -> Path:
    """Write a file of several policies, and the fragment that one of them extends."""
    return write(folder, kin=text, more=MORE)


def mounting(folder: Path, text: str) -> Path:
    """Write a policy behind its match, and beside it what it may mount."""
    return write(folder, mine=RIGHT["mounts"] + text, module=MODULE, tower=TOWER, whole=TOWER + "models: [image?]\n")


@contextlib.contextmanager
def refused(text: str, kind: type[Exception] = PolicyError) -> Iterator[None]:
    """Assert that what is done inside is refused with exactly this text."""
    with pytest.raises(kind) as info:
        yield
    assert str(info.value) == text
