"""A checkpoint leaves quantized weights out, and notices a model with other forms of them."""

import contextlib
import dataclasses
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
from tests.exchange import raises_everywhere
from tests.features.quantized.models import adapted, quantized
from tests.harness.worlds import pooled


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
    with raises_everywhere(CheckpointError, "is bitsandbytes nf4 in", "and plain in the model"):
        plain.from_parallelized(str(folder))
    plain.save_parallelized(str(tmp_path / "plain"))
    with raises_everywhere(CheckpointError, "is plain in", "and bitsandbytes nf4 in the model"):
        model.from_parallelized(str(tmp_path / "plain"))
    base = Manifest.read(folder).base
    assert len(base.forms) == 14 and {*base.forms.values()} == {"bitsandbytes nf4"}
    other = autopar.initialize(quantized("fp4"), {"tp": 2})
    with raises_everywhere(CheckpointError, "q_proj.weight is bitsandbytes nf4 in", "and bitsandbytes fp4 in the mod"):
        other.from_parallelized(str(folder))
    with patched_shape(model), raises_everywhere(CheckpointError, "up_proj.weight as bitsandbytes nf4: expected shape"):
        model.from_parallelized(str(folder))
    with raises_everywhere(ConfigError, "holds 14 quantized weights in shards", "autopar merge"):
        autopar.from_pretrained(AutoModelForCausalLM, folder, {"tp": 2})
    autopar.initialize(adapted("nf4"), {"tp": 2}).save_parallelized(str(tmp_path / "adapters"))
    with raises_everywhere(CheckpointError, "weight is bitsandbytes nf4 in", "and bitsandbytes fp4 in the mod"):
        autopar.initialize(adapted("fp4"), {"tp": 2}).from_parallelized(str(tmp_path / "adapters"))
    with pytest.raises(CheckpointError, match="lacks the 14 quantized weights of its base"):
        merge_checkpoint(tmp_path / "adapters", tmp_path / "merged")
