"""Checkpoints with quantized weights, and checkpoints that transformers dequantizes while it loads them."""

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AwqConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from typer.testing import CliRunner

import autopar
from autopar.checkpoint.format import Manifest
from autopar.checkpoint.offline import merge_checkpoint
from autopar.checkpoint.state import state_of
from autopar.cli import app
from autopar.errors import CheckpointError, ConfigError
from autopar.features.quantized.files import Mxfp4
from autopar.storage.lazy_tensor import InMemory
from tests.exchange import by_rank_0, raises_everywhere
from tests.features.quantized import models
from tests.features.quantized.models import FAMILIES, FORMS, adapted, batches, quantized, say, write
from tests.features.quantized.test_folders import MESHES, same, saved
from tests.harness.worlds import pooled
from tests.parity import all_close, close


def equal_files(folder: Path, due: Path) -> None:
    """Compare the tensors of two folders that transformers could read."""
    read: list[dict[str, torch.Tensor]] = []
    for each in (folder, due):
        read.append({k: x for file in each.glob("*.safetensors") for k, x in load_file(file).items()})
    assert set(read[0]) == set(read[1])
    for name, tensor in read[1].items():
        one = read[0][name]
        assert one.dtype == tensor.dtype and one.shape == tensor.shape, name
        assert torch.equal(one.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@pytest.mark.tier("all")
@pooled(world_size=2)
@pytest.mark.parametrize(("form", "family"), [("nf4 nested", "even"), *((form, "llama") for form in FORMS)])
def test_any_mesh(form: str, family: str, tmp_path: Path) -> None:
    """Also where groups of scales have two dims: with even sizes."""
    saved(tmp_path / "due", form, family)
    for number, config in enumerate(MESHES):
        model: Any = autopar.initialize(quantized(form, family), config)
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
            other: Any = quantized(form, family)
            for parameter in other.parameters():
                parameter.data.zero_()
            model = autopar.initialize(other, config)
            model.from_parallelized(str(tmp_path / f"{number}"))
            same(model, autopar.initialize(quantized(form, family), config))


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


def check_plain(kind: Any, folder: Path, how: Any) -> Path:
    """Compare what is loaded, by transformers and lazily, trained and saved with the plain model; returns the saved."""
    given: dict[str, Any] = {"dtype": torch.float32} | ({} if how is None else {"quantization_config": how})
    plain = kind.from_pretrained(folder, **given)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    for mesh in MESHES:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the conversion of .* in save_pretrained")
            model = autopar.initialize(kind.from_pretrained(folder, **given), mesh)
            lazy = autopar.from_pretrained(AutoModelForCausalLM, folder, mesh, **given)
        for (name, one), (also, two) in zip(model.named_parameters(), lazy.named_parameters(), strict=True):
            assert name == also and one.dtype == two.dtype and torch.equal(one, two), name
        for each in (model, lazy):
            assert not getattr(each, "is_quantized", False) and not hasattr(each.config, "quantization_config")
    model = autopar.initialize(kind.from_pretrained(folder, **given).train(), {"tp": 2})
    losses = [each(**batches(1)[0]).loss for each in (plain.train(), model)]
    close(losses[1].detach(), losses[0].detach(), "loss")
    for loss in losses:
        loss.backward()
    found = {name: p.grad for name, p in autopar.deparallelize(model).named_parameters()}
    all_close(found, {name: p.grad for name, p in plain.named_parameters()}, "gradient of {}")
    merged = folder / f"merged {how is None}"
    autopar.initialize(model, {"tp": 2}).save_parallelized(str(merged), merge_checkpoints=True)
    dist.barrier()
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    again = kind.from_pretrained(merged, dtype=torch.float32).state_dict()
    assert set(again) == set(state) and all(torch.equal(again[name], state[name]) for name in state)
    return merged


@pooled(world_size=2)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_what_transformers_dequantizes_is_plain(family: str, tmp_path: Path) -> None:
    if family == "gpt_oss":
        check_plain(models.write_mxfp4(tmp_path), tmp_path, Mxfp4Config(dequantize=True))
        return
    kind = models.write_fp8(tmp_path, family)
    check_plain(kind, tmp_path, None)  # without a GPU transformers dequantizes by itself
    merged = check_plain(kind, tmp_path, FineGrainedFP8Config(dequantize=True))
    names = set(load_file(merged / "model.safetensors"))
    assert family == "llama" or any(name.endswith("experts.0.w1.weight") for name in names)


@pytest.mark.parametrize("box", [((0, 3), (0, 64), (0, 5)), ((1, 3), (10, 40), (2, 4)), ((2, 2), (0, 64), (0, 5))])
def test_of_mxfp4_the_blocks_of_a_shard_are_read(box: Any) -> None:
    drawn = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8, generator=drawn)
    scales = torch.randint(120, 130, (3, 5, 2), dtype=torch.uint8, generator=drawn)
    due = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    lazy = Mxfp4(InMemory(blocks), InMemory(scales), torch.bfloat16)
    assert lazy.shape == due.shape and torch.equal(lazy.read(box), due[tuple(slice(*each) for each in box)])


@pooled(world_size=2)
def test_formats_that_are_refused(tmp_path: Path) -> None:
    by_rank_0(write)(tmp_path)
    instead = "Load the original weights, and quantize them with BitsAndBytesConfig or TorchAoConfig."
    for method in ("gptq", "awq", "hqq", "quanto"):
        by_rank_0(say)(tmp_path, {"quant_method": method, "bits": 4})
        with raises_everywhere(ConfigError, f"has weights quantized by {method}, which autopar does not", instead):
            autopar.from_pretrained(AutoModelForCausalLM, tmp_path, {"tp": 2})
        dist.barrier()
    by_rank_0(say)(tmp_path, None)
    for settings, advice in (
        (GPTQConfig(bits=4), instead),
        (AwqConfig(), instead),
        (FineGrainedFP8Config(), "quantization_config=FineGrainedFP8Config(dequantize=True))."),
        (Mxfp4Config(), "quantization_config=Mxfp4Config(dequantize=True))."),
    ):
        for mesh in MESHES:
            model = FAMILIES["llama"][0].from_pretrained(tmp_path)
            model.hf_quantizer = SimpleNamespace(quantization_config=settings, pre_quantized=True)
            text = f"LlamaForCausalLM has weights quantized by {settings.quant_method.value}, which autopar does not sh"
            with raises_everywhere(ConfigError, text, advice):
                autopar.initialize(model, mesh)
