"""Checkpoints with their quantized weights: written by ranks and stages, merged, and read on any mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from tests.features.quantized.models import FORMS, batches, how, quantized
from tests.features.quantized.test_loading import MESHES, same, written
from tests.features.quantized.test_use import let_pack
from tests.harness.worlds import pooled


def equal_files(folder: Path, due: Path) -> None:
    """Compare the tensors of two folders that transformers could read."""
    files = [
        {k: v for file in sorted(x.glob("*.safetensors")) for k, v in load_file(file).items()} for x in (folder, due)
    ]
    assert set(files[0]) == set(files[1])
    for name, tensor in files[1].items():
        one = files[0][name]
        assert one.dtype == tensor.dtype and one.shape == tensor.shape, name
        assert torch.equal(
            one.view(torch.uint8) if one.ndim else one, tensor.view(torch.uint8) if one.ndim else tensor
        ), name


@pytest.mark.tier("all")
@pooled(world_size=2)
@pytest.mark.parametrize("form", FORMS)
def test_any_mesh(form: str, tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        quantized(form).save_pretrained(tmp_path / "due")
    for number, config in enumerate(MESHES):
        model: Any = autopar.initialize(quantized(form), config)
        model.save_parallelized(str(tmp_path / f"merged {number}"), merge_checkpoints=True, max_shard_size="200KB")
        model.save_parallelized(str(tmp_path / f"{number}"))
        dist.barrier()
        equal_files(tmp_path / f"merged {number}", tmp_path / "due")
        if dist.get_rank() == 0:
            done = CliRunner().invoke(app, ["merge", str(tmp_path / f"{number}"), str(tmp_path / f"by hand {number}")])
            assert done.exit_code == 0, done.output
            equal_files(tmp_path / f"by hand {number}", tmp_path / "due")
        dist.barrier()
    for number in range(len(MESHES)):
        for config in MESHES:
            other: Any = quantized(form)
            for parameter in other.parameters():
                parameter.data.zero_()
            model = autopar.initialize(other, config)
            model.from_parallelized(str(tmp_path / f"{number}"))
            same(model, autopar.initialize(quantized(form), config))


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_groups_of_scales_that_have_two_dims(tmp_path: Path) -> None:
    for number, config in enumerate(({}, {"pp": 2})):
        autopar.initialize(quantized("nf4 nested", "even"), config).save_parallelized(str(tmp_path / f"{number}"))
        model: Any = autopar.initialize(quantized("nf4 nested", "even"), {"tp": 2})
        for parameter in model.parameters():
            parameter.data.zero_()
        model.from_parallelized(str(tmp_path / f"{number}"))
        same(model, autopar.initialize(quantized("nf4 nested", "even"), {"tp": 2}))


@pooled(world_size=2)
def test_after_an_evaluation_on_a_cpu_that_packs_weights(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        quantized("nf4 nested").save_pretrained(tmp_path / "due")
    model: Any = autopar.initialize(let_pack(quantized("nf4 nested")), {"pp": 2})
    with torch.no_grad():
        model.eval()(batches(1)[0]["input_ids"])
    model.save_parallelized(str(tmp_path / "merged"), merge_checkpoints=True)
    dist.barrier()
    equal_files(tmp_path / "merged", tmp_path / "due")


@pooled(world_size=2)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_weights_that_were_quantized_as_shards(form: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "plain")
    kept: dict[str, Any] = {"quantization_config": how(form), "dtype": torch.float32}
    if dist.get_rank() == 0:
        quantized(form).save_pretrained(tmp_path / "due")
    model: Any = autopar.from_pretrained(AutoModelForCausalLM, folder, {"tp": 2}, **kept)
    model.save_parallelized(str(tmp_path / "merged"), merge_checkpoints=True)
    dist.barrier()
    equal_files(tmp_path / "merged", tmp_path / "due")
