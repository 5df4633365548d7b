"""Patches of other libraries, swapped classes and bound methods: installed, listed and removed."""

import copy
import gc
import importlib
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

import autopar
from autopar.compat import patches
from autopar.errors import ConfigError
from autopar.swap import bind, mixed_class, plain_class, swap, unbind, unswap
from tests.harness.worlds import distributed
from tests.small import gpt2, parallel


def test_a_module_is_changed_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given_later").mkdir()
    (tmp_path / "given_later" / "__init__.py").write_text("from given_later.part import name\n")
    (tmp_path / "given_later" / "part.py").write_text("def name(): return 'plain'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(patches, "_holders", weakref.WeakSet())  # without models that an earlier test left
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


class _Doubled:
    factor = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)  # type: ignore[misc]


class _Noted:
    pass


def test_a_swapped_module_keeps_its_identity_name_and_type_and_can_be_swapped_back() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    plain, weight = layer(x), layer.weight
    swap(layer, _Doubled, factor=3)
    assert torch.equal(layer(x), 3 * plain)
    assert isinstance(layer, nn.Linear) and layer.weight is weight
    assert type(layer).__name__ == "Linear" and type(layer).__module__ == "torch.nn.modules.linear"
    assert torch.equal(copy.deepcopy(layer)(x), 3 * plain)
    unswap(layer, _Doubled, "factor")
    assert type(layer) is nn.Linear and "factor" not in vars(layer)
    assert torch.equal(layer(x), plain)
    pickle.dumps(layer)


def test_one_class_for_each_pair_and_two_swaps_of_an_object_are_undone_in_reverse() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(4, 5)
    for layer in (first, second, first):
        swap(layer, _Doubled)
    assert type(first) is type(second) is mixed_class(_Doubled, nn.Linear)
    assert plain_class(first, _Doubled) is nn.Linear
    assert plain_class(nn.ReLU(), _Doubled) is nn.ReLU
    layer = second
    swap(layer, _Noted)
    with pytest.raises(TypeError, match="_Doubled must be the last swap of a Linear: undo later swaps first"):
        unswap(layer, _Doubled)
    assert plain_class(layer, _Doubled) is nn.Linear
    unswap(layer, _Noted)
    unswap(layer, _Doubled)
    assert type(layer) is nn.Linear
    unswap(layer, _Doubled)  # nothing left to undo


def _size(self: nn.Module) -> int:
    return sum(parameter.numel() for parameter in self.parameters())


def test_a_method_is_bound_to_the_module_and_to_its_copies_and_each_name_has_one_owner() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    bind(model, "one", size=_size)
    copied = copy.deepcopy(model)
    copied.append(nn.Linear(2, 2))
    assert model.size() == 14 and copied.size() == 20
    unbind(model, "one")
    assert not hasattr(model, "size") and copied.size() == 20
    assert set(vars(model)) == set(vars(nn.Sequential()))
    model = nn.Sequential(nn.Linear(3, 2))
    bind(model, "one", size=_size)
    bind(model, "one", size=lambda self: 0)  # its own it may replace
    with pytest.raises(RuntimeError, match=r"Sequential.size belongs to one; another cannot replace it"):
        bind(model, "another", size=_size)
    bind(model[0], "another", size=_size)
    unbind(model, "one")
    assert not hasattr(model, "size") and model[0].size() == 8
    unbind(model, "another")
    assert not hasattr(model[0], "size")


def test_a_method_hides_the_one_of_the_class_until_it_is_taken_away() -> None:
    model = gpt2()
    count = model.num_parameters()
    bind(model, "one", num_parameters=lambda self: -1)
    assert model.num_parameters() == -1
    unbind(model, "one")
    assert model.num_parameters() == count
    assert torch.equal(model(torch.tensor([[1, 2]])).logits, gpt2()(torch.tensor([[1, 2]])).logits)
