"""Weights of torchao, int8 and float8: cut and joined, loaded, and trained over ranks with adapters."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

import autopar
from autopar.checkpoint.offline import merge_checkpoint
from autopar.errors import ConfigError
from autopar.layout import Layout
from autopar.stored import stored_weight, stored_weights
from tests.exchange import by_rank_0, raises_everywhere
from tests.features.quantized import test_folders, test_training
from tests.features.quantized.models import FAMILIES, OF_TORCHAO, adapted, batches, loaded, quantized
from tests.features.quantized.test_stored import units
from tests.fetched_packages import with_package
from tests.parity import close

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.tier("all")
SCALES = ("row", "group", "tensor")
IDS = batches(1)[0]["input_ids"]


def kind_of(form: str) -> Any:
    from torchao import quantization

    return quantization.Int8WeightOnlyConfig if form == "torchao int8" else quantization.Float8WeightOnlyConfig


def config(form: str, scales: str) -> Any:
    """The configuration of a form with one scale for each row, for 64 inputs of one, or for the whole weight."""
    from torchao.quantization import PerGroup, PerRow, PerTensor

    return kind_of(form)(granularity={"row": PerRow(), "group": PerGroup(64), "tensor": PerTensor()}[scales])


def layer(form: str, scales: str, rows: int = 96, columns: int = 320) -> Any:
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    made = nn.Linear(columns, rows)
    quantize_(made, config(form, scales))
    return made


def held(made: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a weight; float8 numbers as bytes, which can be compared."""
    stored: Any = stored_weight(made)
    return {name: x.view(torch.uint8) if x.itemsize == 1 else x for name, x in stored.beside().items()}


def same(model: Any, other: Any) -> None:
    """All weights are equal, and so are those of torchao to the bit, with their settings."""
    for (name, one), (also, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == also and type(one) is type(two) and one.shape == two.shape
        if hasattr(one, "qdata"):
            assert one.__tensor_flatten__()[1] == two.__tensor_flatten__()[1], name
        else:
            assert torch.equal(one, two), name
    ours, theirs = stored_weights(model), stored_weights(other)
    assert ours and set(ours) == set(theirs)
    for path in ours:
        mine, due = held(model.get_submodule(path)), held(other.get_submodule(path))
        assert set(mine) == set(due) and all(torch.equal(mine[name], due[name]) for name in due), path


@with_package("torchao", world_size=1)
def test_shards() -> None:
    for form in OF_TORCHAO:
        for scales in SCALES:
            for dim in (0, 1):
                for ranks in (2, 3, 5):
                    check_shards(form, scales, dim, units(dim, (96, 320)[dim], ranks, 64 if dim else 16))


def check_shards(form: str, scales: str, dim: int, layout: Layout) -> None:
    plain, shards = layer(form, scales), []
    whole: Any = stored_weight(plain)
    x, columns = torch.randn(3, 320), torch.arange(320)
    parts = []
    for rank in range(layout.axis_size):
        made = layer(form, scales)
        stored: Any = stored_weight(made)
        parameter = made.weight
        stored.shard(layout, rank)
        stored = stored_weight(made)
        assert made.weight is parameter and stored.shape == layout.local_shape((96, 320), rank) == made.weight.shape
        assert torch.equal(stored.dequantized(), layout.shard(whole.dequantized(), rank))
        assert made.weight.qdata.nbytes * (96, 320)[dim] == plain.weight.qdata.nbytes * layout.local_size(rank)
        assert sum(x.nbytes for x in stored.beside().values()) == whole.kind.nbytes((96, 320), layout, rank)
        cut = (scales == "row" and dim == 0) or scales == "group"
        assert made.weight.scale.numel() * (96, 320)[dim] == plain.weight.scale.numel() * (
            layout.local_size(rank) if cut else (96, 320)[dim]
        )
        local = x if dim == 0 else x[:, layout.shard(columns[None], rank)[0]]
        parts.append(nn.functional.linear(local, made.weight))
        shards.append(made)
    y = torch.cat(parts, 1) if dim == 0 else sum(parts[1:], parts[0])
    close(y, nn.functional.linear(x, plain.weight), "product", 1e-6)
    pieces = [stored_weight(made).pieces() for made in shards]  # type: ignore[union-attr]

    def gather(tensor: torch.Tensor, axis: Any, scaled: Layout) -> torch.Tensor:
        (name,) = [name for name, piece in pieces[0].items() if piece.tensor is tensor]
        return scaled.unshard([piece[name].tensor for piece in pieces])

    with mock.patch("autopar.features.quantized.stored.all_gather", gather):
        stored_weight(shards[0]).join(layout, None)  # type: ignore[union-attr]
    same(nn.ModuleList([shards[0]]), nn.ModuleList([plain]))
    assert set(vars(shards[0])) == set(vars(plain))


@with_package("torchao", world_size=2)
@pytest.mark.parametrize("form", OF_TORCHAO)
def test_losses_and_gradients(form: str) -> None:
    for family in FAMILIES:
        plain, model = test_training.check_training(form, family, {"tp": 2})
        here = sum(stored.beside()["qdata"].nbytes for stored in stored_weights(model).values())
        whole = sum(stored.beside()["qdata"].nbytes for stored in stored_weights(plain).values())
        assert whole * 0.3 < here < whole * 0.7 or family == "gpt2"  # 3 heads; Conv1D stays as it is
        for path, stored in stored_weights(model).items():
            layout = model._autopar.plan.tensors[f"{path}.weight"].layout
            due = layout.shard(stored_weights(plain)[path].dequantized(), model.mpu.tp.rank)
            assert torch.equal(stored.dequantized(), due)
        plain.eval(), model.eval()
        with torch.no_grad():
            close(model(IDS).logits[:], plain(IDS).logits, "logits", 1e-6)
            tokens = [each.generate(input_ids=IDS, max_new_tokens=4, do_sample=False) for each in (plain, model)]
        assert torch.equal(*tokens)
    test_training.check_training(form, "llama", {"tp": 2}, use_dora=True)


@with_package("torchao", world_size=2)
@pytest.mark.parametrize("form", OF_TORCHAO)
def test_weights_quantized_while_they_are_loaded(form: str, tmp_path: Path) -> None:
    for family in ("llama", "phi3"):
        folder = test_folders.written(tmp_path, family)
        for scales in SCALES if family == "llama" else ("row",):
            for mesh in test_folders.MESHES:
                given: dict[str, Any] = {"quantization_config": TorchAoConfig(config(form, scales))}
                given["dtype"] = torch.bfloat16 if scales == "tensor" else torch.float32
                model = autopar.from_pretrained(AutoModelForCausalLM, folder, mesh, **given)
                same(model, autopar.initialize(FAMILIES[family][0].from_pretrained(folder, **given), mesh))
                assert model.is_quantized and model.config.quantization_config.quant_method == "torchao"
    test_folders.test_adapters_of_a_model_that_no_process_holds.body(form, tmp_path)  # type: ignore[attr-defined]


def saved(folder: Path, settings: Any, family: str = "llama", **given: Any) -> Any:
    """Write what ``save_pretrained`` of a quantized model does; returns the model's class."""
    import transformers.integrations.torchao as integration
    import transformers.quantizers.quantizer_torchao as quantizer
    from torchao.prototype.safetensors import safetensors_support, safetensors_utils

    for module in (integration, quantizer):  # they were imported before torchao was there
        for name in ("flatten_tensor_state_dict", "unflatten_tensor_state_dict"):
            setattr(module, name, getattr(safetensors_support, name))
        module.is_metadata_torchao = safetensors_utils.is_metadata_torchao  # type: ignore[attr-defined]
    by_rank_0(lambda: loaded(settings, family, **given).save_pretrained(folder))()
    return FAMILIES[family][0]


@pytest.mark.tier("sweep")
@with_package("torchao", world_size=2)
@pytest.mark.parametrize("form", OF_TORCHAO)
def test_folders_that_are_quantized_already(form: str, tmp_path: Path) -> None:
    for family in ("llama", "phi3", "mixtral"):
        for scales in SCALES if family == "llama" else ("row",):
            folder = tmp_path / f"{family} {scales}"
            kind = saved(folder, TorchAoConfig(config(form, scales)), family)
            for mesh in test_folders.MESHES:
                whole = kind.from_pretrained(folder)
                model = autopar.from_pretrained(AutoModelForCausalLM, folder, mesh)
                test_folders.same_numbers(model, whole)
                same(model, autopar.initialize(whole, mesh))
            merged = folder / "merged"
            model.save_parallelized(str(merged), merge_checkpoints=True)  # of replicas
            autopar.from_pretrained(AutoModelForCausalLM, folder, {"tp": 2}).save_parallelized(str(folder / "shards"))
            by_rank_0(merge_checkpoint)(folder / "shards", folder / "by hand")
            for other in (merged, folder / "by hand"):
                same(kind.from_pretrained(other), kind.from_pretrained(folder))
            model.from_parallelized(str(folder / "shards"))
            same(model, autopar.initialize(kind.from_pretrained(folder), {}))


@with_package("torchao", world_size=2)
@pytest.mark.parametrize("form", OF_TORCHAO)
def test_ranks_begin_with_what_the_first_one_has(form: str) -> None:
    for mesh in test_folders.MESHES:
        model: Any = quantized(form)
        for stored in stored_weights(model).values() if dist.get_rank() else ():
            tensors = stored.beside()
            tensors["qdata"].view(torch.uint8).add_(1)
            tensors["scale"].mul_(2)
        same(autopar.initialize(model, mesh), autopar.initialize(quantized(form), mesh))


@with_package("torchao", world_size=2)
def test_refusals(tmp_path: Path) -> None:
    from torchao.quantization import (
        FqnToConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )

    model: Any = autopar.initialize(adapted("torchao int8"), {"tp": 2})
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer"
    with raises_everywhere(ConfigError, f"full_tensor is not supported with quantized weights, got {name}.weight (t"):
        autopar.full_tensor(model.get_submodule(name).weight)
    model.merge_adapter()  # PEFT quantizes each rank's part anew
    with raises_everywhere(ConfigError, ", but has bias, weight", "deparallelize(model), ch"):
        model(IDS)
    fp32: Any = adapted("torchao float8")
    optimizer = torch.optim.AdamW([p for p in fp32.parameters() if p.requires_grad])
    text = "(torchao float8) must be quantized from precision.dtype torch.bfloat16, got torch.float32"
    with raises_everywhere(ConfigError, text):
        autopar.initialize(fp32, {"precision": {"dtype": "bf16"}}, optimizer=optimizer)
    for config, text in (
        (Int8DynamicActivationInt8WeightConfig(), "torchao's Int8Tensor with quantized inputs is not supported"),
        (IntxWeightOnlyConfig(), "torchao's IntxUnpackedToInt8Tensor is not supported as the weight of a Linear"),
    ):
        made: Any = loaded(None)
        quantize_(made.model.layers[1].mlp.up_proj, config)
        with raises_everywhere(ConfigError, text):
            autopar.initialize(made, {"tp": 2})
    of_each = FqnToConfig({"_default": Int8WeightOnlyConfig()})
    untied = TorchAoConfig(Int8WeightOnlyConfig(), untie_embedding_weights=True)
    for settings in (TorchAoConfig(of_each), untied):
        folder = test_folders.written(tmp_path / "plain")
        with raises_everywhere(ConfigError, "TorchAoConfig with FqnToConfig or untie_embedding_weights is not support"):
            autopar.from_pretrained(AutoModelForCausalLM, folder, {"tp": 2}, quantization_config=settings)
