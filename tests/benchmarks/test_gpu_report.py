"""The report of a GPU, without one: its sections with tiny models, and sections that fail, hang and die."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command, report
from benchmarks.gpu.device import Notes, mfu, peak_flops
from benchmarks.gpu.report import SECTIONS, Section, run

OPTIONS = {"device": "cpu", "tiny": True, "budget": 300.0}
HERE = "tests.benchmarks.test_gpu_report:"


def _works(options: dict[str, Any], device: Any, notes: Notes) -> None:
    notes("kind", device.kind)
    notes("seconds", device.seconds(lambda: None) < 1)


def _fails_in_a_part(options: dict[str, Any], device: Any, notes: Notes) -> None:
    with notes.part("first"):
        raise ValueError("a part | that fails")
    notes("second", {"plain": {"ms": 1.5}, "autopar": {"ms": 2.5}})


def _hangs(options: dict[str, Any], device: Any, notes: Notes) -> None:
    notes("before", 1)
    time.sleep(600)


def _dies(options: dict[str, Any], device: Any, notes: Notes) -> None:
    notes("before", 2)
    os._exit(7)


@pytest.mark.tier("all")
def test_whatever_becomes_of_a_section_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        "works": Section(HERE + "_works", 60),
        "part": Section(HERE + "_fails_in_a_part", 60),
        "hangs": Section(HERE + "_hangs", 6),
        "dies": Section(HERE + "_dies", 60, 2, "gloo"),
    }
    monkeypatch.setattr(report, "SECTIONS", made)
    run(OPTIONS, list(made), tmp_path, {"available": False, "nvidia_smi": "none"})
    result = json.loads((tmp_path / "gpu-on-cpu.json").read_text())
    found = {name: section["status"] for name, section in result["sections"].items()}
    assert found == {
        "works": "ok",
        "part": "1 parts failed",
        "hangs": "timed out",
        "dies": "failed",
    }
    assert result["sections"]["works"]["notes"] == [{"kind": "cpu", "seconds": True}]
    assert result["sections"]["hangs"]["notes"] == [{"before": 1}]
    assert "in _hangs" in result["sections"]["hangs"]["error"]  # where it was
    assert {"before": 2} in result["sections"]["dies"]["notes"]
    text = (tmp_path / "gpu-on-cpu.md").read_text()
    assert "ValueError: a part \\| that fails" in text and "raise ValueError" in text
    assert "| autopar | 2.5 |" in text
    assert all(f"## {name}: {status}" in text for name, status in found.items())


@pytest.mark.tier("sweep")
def test_the_whole_report_runs_on_the_cpu(tmp_path: Path) -> None:
    code = command.main(["--device", "cpu", "--folder", str(tmp_path)])
    result = json.loads((tmp_path / "gpu-on-cpu.json").read_text())
    assert list(result["sections"]) == list(SECTIONS)
    assert {name: section["status"] for name, section in result["sections"].items()} == dict.fromkeys(SECTIONS, "ok")
    assert code == 0
    notes = {name: section["notes"][0] for name, section in result["sections"].items()}
    assert "skipped" in notes["tests"]["last line"]
    assert notes["overhead"]["large, logits bitwise equal"] is True
    ways = ("", ", shards", ", ZeRO 3")
    assert all(notes["loading"][f"autopar.from_pretrained{way}"]["equal"] for way in ways)
    assert notes["nccl"]["weights are equal after saving and loading"] is True
    loss = notes["tensor parallel, shared"]["loss"]
    assert loss["tp 2"] == pytest.approx(loss["plain"], rel=1e-5)


def test_without_a_gpu_the_command_says_how_to_try_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.machine.gpu_facts", lambda: {"available": False, "nvidia_smi": "none"})
    assert command.main([]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_the_share_of_the_peak_counts_weights_and_attention() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12 and peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("some other") is None and mfu(1, 1, 1, 1, 1.0, None) is None
    # 1e9 weights: 6e9 FLOPs a token; 16 layers of 2048 over 2048 tokens: 0.805e9
    assert mfu(10**9, 16, 2048, 2048, 1e4, 989e12) == pytest.approx((6e9 + 12 * 16 * 2048 * 2048) * 1e4 / 989e12)
