"""The report of a GPU, without one: its sections with tiny models, and sections that fail, hang and die."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.device import mfu, peak_flops
from benchmarks.gpu.report import SECTIONS


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
