"""``autopar.latest`` finds the checkpoint that was saved last, and nothing that is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar import latest
from autopar.errors import CheckpointError
from tests.checkpoint.test_rotation import merged, saved, sharded


def test_there_is_none_yet(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "run") is None
    assert latest(tmp_path / "run" / "step-") is None
    merged(tmp_path / "step-3")
    (tmp_path / ".step-7.tmp-0123456789abcdef").mkdir()
    (tmp_path / "step-8").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert latest(tmp_path) is None


def test_the_order_of_saves_counts(tmp_path: Path) -> None:
    saved(tmp_path / "step-200")
    assert latest(tmp_path) == tmp_path / "step-200"
    saved(tmp_path / "step-400")
    saved(tmp_path / "step-300", follows=tmp_path / "step-200")  # went back
    assert latest(tmp_path) == latest(tmp_path / "step-") == tmp_path / "step-300"
    assert latest(os.fspath(tmp_path / "step-400")) == tmp_path / "step-400"  # it is one itself


def test_checkpoints_that_were_not_counted_go_by_their_numbers(tmp_path: Path) -> None:
    sharded(tmp_path / "9")
    sharded(tmp_path / "10")
    sharded(tmp_path / "final")
    assert latest(tmp_path) == tmp_path / "10"


def test_several_series_are_told_apart_by_the_user(tmp_path: Path) -> None:
    saved(tmp_path / "step-1")
    saved(tmp_path / "best-2")
    with pytest.raises(CheckpointError) as caught:
        latest(tmp_path)
    assert str(caught.value) == (
        f'{tmp_path} holds checkpoints of 2 series: best-*, step-*\n  Say which: autopar.latest("{tmp_path}/best-")'
    )
    assert latest(tmp_path / "best-") == tmp_path / "best-2"
