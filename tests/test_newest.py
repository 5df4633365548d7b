"""The list of model types that ``make newest`` does not print, and what it prints of the others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import transformers

from autopar.errors import UnsupportedModelError
from tests import newest

PINS = Path(__file__).parents[1] / "constraints.txt"


def test_the_known_types_are_those_of_the_pinned_version() -> None:
    pinned = re.search(r"^transformers==(\S+)", PINS.read_text(), re.MULTILINE)
    if pinned is None or transformers.__version__ != pinned[1]:
        pytest.skip("another version of transformers has other model types")
    assert sorted(newest.without_policy() - newest.known_without_policy()) == [], "make newest lists these"
    assert sorted(newest.known_without_policy() - newest.without_policy()) == [], f"remove these from {newest.KNOWN}"


def test_only_new_types_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    known = tmp_path / "known.txt"
    known.write_text("".join(f"{name}\n" for name in newest.without_policy() - {"convnext", "resnet"}))
    monkeypatch.setattr(newest, "KNOWN", known)
    monkeypatch.setattr(newest, "outcome", lambda model_type: "derived")
    monkeypatch.setattr(sys, "argv", ["newest"])
    newest.main()
    first, *listed = capsys.readouterr().out.splitlines()
    assert first.endswith(": 2 new model types without a policy")
    assert [line.split() for line in listed] == [["convnext", "derived"], ["resnet", "derived"]]


def test_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: object) -> None:
        raise UnsupportedModelError("no policy can be derived\n  More lines follow.")

    assert newest.outcome("llama") == "derived"
    assert newest.outcome("no such type").startswith("fails    KeyError")
    monkeypatch.setattr(newest, "derive", refuse)
    assert newest.outcome("llama") == "refused  no policy can be derived"
