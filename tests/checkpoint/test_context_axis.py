"""Checkpoints of a mesh with context parallelism: its ranks are replicas, and any other mesh reads them."""

from pathlib import Path

import pytest
import torch

import autopar
from autopar.checkpoint import Manifest
from autopar.checkpoint.random_states import choose
from autopar.cli.checkpoints import _summary
from tests.exchange import same_random_states
from tests.harness.worlds import pooled
from tests.parity import all_close, language_batches, whole
from tests.small import gpt2

Sizes = tuple[int, int, int]  # tp, cp, stage of ZeRO


def _start(sizes: Sizes) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    tp, cp, stage = sizes
    model = gpt2().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {
        "model_parallelism": {"tensor_parallel_size": tp, "context_parallel_size": cp},
        "zero": {"stage": stage},
    }
    return autopar.initialize(model, config, optimizer=optimizer)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).loss.backward()
    if hasattr(model, "mpu") and model._autopar.config.zero_stage != 3:
        autopar.average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.tier("test", only=("saved0-loaded0",))
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((1, 2, 1), (2, 1, 1)), ((2, 2, 1), (1, 4, 3)), ((1, 4, 3), (2, 2, 0))],
)
@pooled(world_size=4)
def test_training_goes_on_on_another_mesh(tmp_path: Path, saved: Sizes, loaded: Sizes) -> None:
    first, second = language_batches(131, count=2)
    plain = gpt2().train()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for batch in (first, second):
        _step(plain, reference, batch)
    model, optimizer = _start(saved)
    _step(model, optimizer, first)
    model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer, async_save=True)
    model.wait_for_save()
    tp, cp, stage = saved
    manifest = Manifest.read(tmp_path / "ckpt")
    assert (manifest.sizes, manifest.cp) == ((tp, 1, 4 // tp, 1), cp)
    assert _summary(manifest, [])["mesh"].get("context_parallel_size", 1) == cp
    files = [path.name for path in (tmp_path / "ckpt").glob("model-*")]
    assert sorted(files) == [f"model-tp{place}-pp0.safetensors" for place in range(tp)]  # each shard once
    assert len(list((tmp_path / "ckpt").glob("optimizer-*"))) == (4 if stage == 1 else tp)
    model.mpu.destroy()
    model, optimizer = _start(loaded)
    model.from_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    same_random_states(model.mpu.model.group)
    _step(model, optimizer, second)
    full = (lambda p: p.full_tensor()) if loaded[2] == 3 else (lambda p: p.data)
    all_close(whole(model, full), dict(plain.named_parameters()), "{} after another step")
    model.mpu.destroy()


def test_random_states_of_context_ranks() -> None:
    def entry(dp: int, state: str, **more: int) -> dict[str, object]:
        return {"tp": 0, "pp": 0, "dp": dp, "cp": 0, "state": state, **more}

    new = [entry(0, "a", cp=0), entry(0, "a1", cp=1), entry(1, "b", cp=0), entry(1, "b1", cp=1)]
    assert [choose(new, 0, 0, dp, cp) for dp in (0, 1) for cp in (0, 1, 2)] == ["a", "a1", "a", "b", "b1", "b"]
    assert choose(new[:2], 0, 0, 1) == "a"  # one replica was there: another one draws like it
