"""Patches of other libraries: installed with the first model, removed with the last one, listed in between."""

import copy
import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad

import autopar
from autopar.compat import patches
from autopar.errors import ConfigError
from tests.small import gpt2, parallel
from tests.worlds import distributed


def test_a_module_is_changed_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given_later").mkdir()
    (tmp_path / "given_later" / "__init__.py").write_text("from given_later.part import name\n")
    (tmp_path / "given_later" / "part.py").write_text("def name(): return 'plain'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    done = []

    def change() -> None:
        patches.patch_member(sys.modules["given_later.part"], "name", _and_ours)
        done.append("changed")

    for _ in range(2):
        patches.when_imported("given_later.part", change)
    assert not done
    package = importlib.import_module("given_later")
    assert package.name() == "plain and ours" and done == ["changed"]
    patches.when_imported("given_later.part", lambda: done.append("at once"))
    assert done == ["changed", "at once"]
    patches.when_imported("given_never", lambda: done.append("never"))
    with pytest.raises(ModuleNotFoundError, match="given_never"):
        importlib.import_module("given_never")
    assert ("given_later.part.name", "unknown", f"{__name__}._and_ours") in patches.patches()
    patches._remove_unheld()
    assert package.part.name() == "plain" and patches.patches() == []
    for name in ("given_later", "given_later.part"):
        del sys.modules[name]


def _and_ours(plain: Callable[[], str]) -> str:
    return plain() + " and ours"


def test_another_version_without_the_function_is_an_error() -> None:
    class Accelerator:
        __module__ = "torch.accelerator"

    with pytest.raises(ConfigError, match=r"torch [\d.]+\S* has no torch.accelerator.Accelerator.gather, which"):
        patches.patch_member(Accelerator, "gather", lambda plain: plain)


_OF_DTENSORS = ("bernoulli_", "data", "item", "normal_", "rand_like", "randn_like", "uniform_")


def _of_torch() -> list[str]:
    return sorted(patch.name for patch in autopar.patches() if patch.name.startswith("torch."))


@pytest.mark.tier("test")
@distributed(world_size=2)
def test_they_are_there_while_a_model_lives() -> None:
    assert autopar.patches() == []
    norms = clip_grad.clip_grad_norm_
    before = [cell.cell_contents for cell in norms.__closure__], torch.amp.GradScaler._unscale_grads_
    first = parallel(gpt2(), 2)
    assert _of_torch() == [
        "torch.amp.grad_scaler.GradScaler._unscale_grads_",
        "torch.autograd.grad",
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler._unscale_grads_",
        *(f"torch.distributed.tensor.DTensor.{name}" for name in _OF_DTENSORS),
        "torch.nn.utils.clip_grad._clip_grads_with_norm_",
        "torch.nn.utils.clip_grad._get_total_norm",
        "torch.nn.utils.clip_grad.clip_grad_norm_",
    ]
    assert {patch.version for patch in autopar.patches() if patch.name in _of_torch()} == {torch.__version__}
    second = parallel(gpt2(), 2)
    autopar.deparallelize(first)
    assert len(_of_torch()) == 6 + len(_OF_DTENSORS)  # the second one needs them
    autopar.deparallelize(second)
    assert autopar.patches() == []
    third = parallel(gpt2(), 2)
    copied = copy.deepcopy(third)
    third.mpu.destroy()
    del third, copied
    gc.collect()
    assert autopar.patches() == []
    assert clip_grad.clip_grad_norm_ is norms
    assert ([cell.cell_contents for cell in norms.__closure__], torch.amp.GradScaler._unscale_grads_) == before
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.full((2,), 3.0)
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0).item() == pytest.approx(18**0.5)
