"""A checkpoint leaves quantized weights out, and notices a model that has other ones."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import autopar
from autopar.checkpoint.format import Manifest
from autopar.checkpoint.offline import merge_checkpoint
from autopar.checkpoint.state import state_of
from autopar.errors import CheckpointError, ConfigError
from tests.pool import pooled
from tests.quantized.models import adapted, quantized
from tests.worlds import raises_everywhere

_CHANGED = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"


def messages(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


@pooled(world_size=2)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
@pytest.mark.tier("test", only=("nf4 nested",))
def test_another_base_is_named(form: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    autopar.initialize(adapted(form), {"tp": 2}).save_parallelized(folder)
    for config in ({"tp": 2}, {"pp": 2}, {}):
        model = autopar.initialize(adapted(form), config)
        said = messages(lambda model=model: model.from_parallelized(folder))
        assert said == [], said
    other = adapted(form)
    weight = other.get_parameter(_CHANGED)
    weight.data[0, 0] += 1 if form == "int8" else 16
    model = autopar.initialize(other, {"tp": 2})
    said = "".join(messages(lambda: model.from_parallelized(folder)))
    if model.mpu.rank:  # rank 0 says it
        assert not said
        return
    assert f"was saved on another base model: 1 of 14 quantized weights differ, {_CHANGED} first" in said
    assert f"It was {model.get_base_model().config._name_or_path.rpartition('/')[0]}" in said


@contextlib.contextmanager
def patched_shape(model: Any) -> Iterator[None]:
    """Let a model of the same names have one wider quantized layer."""
    planned: Any = state_of(model).quantized
    name = "model.layers.1.mlp.up_proj.weight"
    kept = planned[name]
    planned[name] = dataclasses.replace(kept, shape=(384, 192), layout=None)
    try:
        yield
    finally:
        planned[name] = kept


@pooled(world_size=2)
def test_a_plain_model_and_a_merge(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    model = autopar.initialize(quantized("nf4"), {"tp": 2})
    model.save_parallelized(str(folder))
    plain: Any = autopar.initialize(type(model)(model.config), {"tp": 2})
    with raises_everywhere(
        CheckpointError, "The checkpoint was saved on", "(bitsandbytes nf4); the model is not quantized."
    ):
        plain.from_parallelized(str(folder))
    plain.save_parallelized(str(tmp_path / "plain"))
    with raises_everywhere(
        CheckpointError, "holds weights of a model that was not quantized; the model is (14 weights)."
    ):
        model.from_parallelized(str(tmp_path / "plain"))
    base = Manifest.read(folder).base
    assert len(base.digests) == 14 and {*base.forms.values()} == {"bitsandbytes nf4"}
    other = autopar.initialize(quantized("fp4"), {"tp": 2})
    with raises_everywhere(CheckpointError, "q_proj.weight is bitsandbytes nf4 in", "and bitsandbytes fp4 in the mod"):
        other.from_parallelized(str(folder))
    with patched_shape(model), raises_everywhere(CheckpointError, "up_proj.weight as bitsandbytes nf4: it has shape"):
        model.from_parallelized(str(folder))
    with raises_everywhere(ConfigError, "holds 14 quantized weights in shards", "autopar merge"):
        autopar.from_pretrained(AutoModelForCausalLM, folder, {"tp": 2})
    autopar.initialize(adapted("nf4"), {"tp": 2}).save_parallelized(str(tmp_path / "adapters"))
    with pytest.raises(CheckpointError, match="leaves out 14 quantized weights of"):
        merge_checkpoint(tmp_path / "adapters", tmp_path / "merged")
