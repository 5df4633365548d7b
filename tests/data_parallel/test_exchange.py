"""What is done to a library as soon as it is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from autopar.data_parallel import exchange


def test_a_module_is_changed_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given_later").mkdir()
    (tmp_path / "given_later" / "__init__.py").write_text("from given_later.part import name\n")
    (tmp_path / "given_later" / "part.py").write_text("def name(): return 'plain'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    done = []

    def change() -> None:
        exchange.exchange_name(sys.modules["given_later.part"], "name", lambda plain: plain() + " and ours")
        done.append("changed")

    for _ in range(2):
        exchange.when_imported("given_later.part", change)
    assert not done
    package = importlib.import_module("given_later")
    assert package.name() == "plain and ours" and done == ["changed"]
    exchange.when_imported("given_later.part", lambda: done.append("at once"))
    assert done == ["changed", "at once"]
    exchange.when_imported("given_never", lambda: done.append("never"))
    with pytest.raises(ModuleNotFoundError, match="given_never"):
        importlib.import_module("given_never")
    for name in ("given_later", "given_later.part"):
        del sys.modules[name]
