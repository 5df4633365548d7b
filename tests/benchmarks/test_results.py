"""A result knows the code that it measured, and says so when that has changed."""

import argparse
import importlib
from pathlib import Path

import pytest

from benchmarks import __main__, machine, results, tables


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "autopar" / "plan").mkdir(parents=True)
    (tmp_path / "autopar" / "api.py").write_text("a = 1\n")
    (tmp_path / "autopar" / "plan" / "rules.py").write_text("b = 2\n")
    return tmp_path


def test_the_digest_follows_contents_names_and_policies(tree: Path) -> None:
    seen = {machine.code_digest(tree)}

    def changed() -> bool:
        before = len(seen)
        seen.add(machine.code_digest(tree))
        return len(seen) > before

    assert not changed()
    (tree / "autopar" / "plan" / "rules.py").write_text("b = 3\n")
    assert changed()
    (tree / "autopar" / "plan" / "rules.py").rename(tree / "autopar" / "rules.py")
    assert changed()
    (tree / "policies").mkdir()
    (tree / "policies" / "llama.yaml").write_text("match: {}\n")
    assert changed()
    (tree / "autopar" / "rules.py").write_text('"""Rules."""\n\nb = 3  # three\n')
    assert not changed(), "words"
    (tree / "autopar" / "tools").mkdir()
    (tree / "autopar" / "tools" / "planner.py").write_text("c = 4\n")
    assert not changed(), "no measurement runs it"
    (tree / "autopar" / "__pycache__").mkdir()
    (tree / "autopar" / "__pycache__" / "api.pyc").write_text("")
    (tree / "tests").mkdir()
    (tree / "tests" / "test_api.py").write_text("")
    assert not changed()


def test_a_result_of_other_code_says_so(tmp_path: Path) -> None:
    result = results.make("checks", {"rounds": 1}, [{"row": "tiny", "on, ms": 1.5}], 2.0)
    assert not results.is_stale(result)
    assert results.STALE not in tables.section(result)
    assert results.is_stale(result, "another")
    assert f"code `{result['code']}` **older than the code**" in tables.section(result, "another")
    assert results.is_stale({**result, "code": None})
    results.write(result, tmp_path)
    assert results.read_all(tmp_path) == {"checks": result}
    assert not list(tmp_path.glob("*.partial"))


def test_a_short_run_of_all_does_not_touch_the_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, list[str], Path]] = []

    def fake(name: str, arguments: list[str], folder: Path) -> None:
        ran.append((name, arguments, folder))
        if name == "loading":
            raise RuntimeError("no disk")

    monkeypatch.setattr(__main__, "run", fake)
    monkeypatch.setattr(tables, "update", lambda: None)
    assert __main__.main([]) == 1  # one failed, all others ran
    assert "loading failed: no disk" in capsys.readouterr().err
    assert [name for name, _, _ in ran] == list(__main__.NAMES)
    assert {folder for _, _, folder in ran} == {__main__.OUT}
    ran.clear()
    __main__.main(["--full"])
    assert {tuple(arguments) for _, arguments, _ in ran} == {()}
    assert {folder for _, _, folder in ran} == {results.FOLDER}


@pytest.mark.parametrize("name", __main__.NAMES)
def test_every_benchmark_takes_the_arguments_of_the_short_run(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    parser.parse_args(__main__.SHORT.get(name, []))
    assert f"python -m benchmarks {name}" in module.__doc__
    assert callable(module.measure)


@pytest.mark.tier("sweep")
def test_a_benchmark_runs_from_its_arguments_to_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["step", "--folder", str(tmp_path), "--rows", "tiny", "--rounds", "1", "--decode-rounds", "1"]
    assert __main__.main([*arguments, "--decode-tokens", "3"]) == 0
    (result,) = results.read_all(tmp_path).values()
    assert [row["kind"] for row in result["rows"]] == ["step", "forward", "prefill", "decode"]
    for row in result["rows"]:
        assert {"plain", "autopar", "limit", "DTensor", "collectives, gloo"} <= set(row["variants"])
        assert set(row["missing"]) | set(row["variants"]) >= {"transformers", "autopar, shm"}
    assert "**tiny, decode**" in capsys.readouterr().out
    tables.step_chart(result)
