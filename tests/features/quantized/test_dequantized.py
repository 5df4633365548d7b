"""Checkpoints that transformers dequantizes while it loads them: plain models, also for autopar; others are refused."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AwqConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import autopar
from autopar.errors import ConfigError
from autopar.features.quantized.files import Mxfp4
from autopar.storage.lazy_tensor import InMemory
from tests.exchange import raises_everywhere
from tests.features.quantized.folders import say, write_fp8, write_mxfp4
from tests.features.quantized.models import FAMILIES, batches, write
from tests.features.quantized.test_loading import MESHES
from tests.harness.worlds import pooled
from tests.parity import close


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
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and found[name] is not None
        close(found[name], parameter.grad, name)
    merged = folder / f"merged {how is None}"
    autopar.initialize(model, {"tp": 2}).save_parallelized(str(merged), merge_checkpoints=True)
    dist.barrier()
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    again = kind.from_pretrained(merged, dtype=torch.float32).state_dict()
    assert set(again) == set(state) and all(torch.equal(again[name], state[name]) for name in state)
    return merged


@pooled(world_size=2)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_fine_grained_fp8(family: str, tmp_path: Path) -> None:
    kind = write_fp8(tmp_path, family)
    check_plain(kind, tmp_path, None)  # without a GPU transformers dequantizes by itself
    merged = check_plain(kind, tmp_path, FineGrainedFP8Config(dequantize=True))
    names = set(load_file(merged / "model.safetensors"))
    assert family == "llama" or any(name.endswith("experts.0.w1.weight") for name in names)


@pooled(world_size=2)
def test_mxfp4(tmp_path: Path) -> None:
    check_plain(write_mxfp4(tmp_path), tmp_path, Mxfp4Config(dequantize=True))


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
    if dist.get_rank() == 0:
        write(tmp_path)
    dist.barrier()
    instead = "Load the original weights, and quantize them with BitsAndBytesConfig or TorchAoConfig."
    for method in ("gptq", "awq", "hqq", "quanto"):
        if dist.get_rank() == 0:
            say(tmp_path, {"quant_method": method, "bits": 4})
        dist.barrier()
        with raises_everywhere(
            ConfigError, f"has weights quantized by {method}, which autopar does not shard.", instead
        ):
            autopar.from_pretrained(AutoModelForCausalLM, tmp_path, {"tp": 2})
        dist.barrier()
    if dist.get_rank() == 0:
        say(tmp_path, None)
    dist.barrier()
    for settings, advice in (
        (GPTQConfig(bits=4), instead),
        (AwqConfig(), instead),
        (FineGrainedFP8Config(), "quantization_config=FineGrainedFP8Config(dequantize=True))."),
        (Mxfp4Config(), "quantization_config=Mxfp4Config(dequantize=True))."),
    ):
        for mesh in ({"tp": 2}, {"pp": 2}, {}):
            model = FAMILIES["llama"][0].from_pretrained(tmp_path)
            model.hf_quantizer = SimpleNamespace(quantization_config=settings, pre_quantized=True)
            text = f"LlamaForCausalLM has weights quantized by {settings.quant_method.value}, which autopar does not sh"
            with raises_everywhere(ConfigError, text, advice):
                autopar.initialize(model, mesh)
