"""Folders that are quantized already: each rank reads its part of the packed bytes, as if the whole had been cut."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import CheckpointError
from autopar.storage.files import RangeFile
from autopar.stored import stored_weights
from tests.exchange import raises_everywhere
from tests.features.quantized.models import FAMILIES, FORMS, batches, how, quantized
from tests.features.quantized.test_loading import MESHES, same
from tests.harness.worlds import pooled
from tests.parity import close

peft = pytest.importorskip("peft")
FILE = "model.safetensors"


def saved(folder: Path, form: str, family: str = "llama") -> Any:
    """Write what ``save_pretrained`` of a quantized model does; returns the model's class."""
    if dist.get_rank() == 0:
        quantized(form, family).save_pretrained(folder)
    dist.barrier()
    return FAMILIES[family][0]


def same_numbers(model: Any, whole: Any) -> None:
    """The weights of a rank, dequantized, are its part of the whole ones, and its bytes are in proportion."""
    for path, stored in stored_weights(model).items():
        layout, due = model._autopar.plan.tensors[f"{path}.weight"].layout, stored_weights(whole)[path]
        part = due.dequantized() if layout is None else layout.shard(due.dequantized(), model.mpu.tp.rank)
        assert torch.equal(stored.dequantized(), part), path
        held, every = (module.get_submodule(path).weight for module in (model, whole))
        if layout is not None and held.shape[-1] == every.shape[-1]:  # int8 has columns of zeros where inputs are cut
            assert held.nbytes * layout.size == every.nbytes * layout.local_size(model.mpu.tp.rank)


@pooled(world_size=2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.tier("test", only=("nf4-llama",))
def test_shards_are_those_of_the_whole(form: str, family: str, tmp_path: Path) -> None:
    kind = saved(tmp_path, form, family)
    for config in MESHES:
        whole = kind.from_pretrained(tmp_path)
        model = autopar.from_pretrained(AutoModelForCausalLM, tmp_path, config)
        same_numbers(model, whole)
        same(model, autopar.initialize(whole, config))
        assert model.is_quantized and not any(parameter.is_meta for parameter in model.parameters())


@pooled(world_size=2)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_a_rank_reads_its_share_and_no_more(form: str, tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024}
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=100)).save_pretrained(tmp_path / "plain")
        LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=how(form)).save_pretrained(tmp_path)
    dist.barrier()
    read: list[int] = []
    real = RangeFile.read_runs

    def counting(self: RangeFile, target: memoryview, places: Iterable[tuple[int, int]], length: int) -> None:
        places = list(places)
        real(self, target, places, length)
        read.append(len(places) * length)

    for config in ({"tp": 2}, {"pp": 2}):
        read.clear()
        RangeFile.read_runs = counting  # type: ignore[method-assign]
        try:
            model = autopar.from_pretrained(LlamaForCausalLM, tmp_path, config)
        finally:
            RangeFile.read_runs = real  # type: ignore[method-assign]
        assert sum(read) < 0.55 * (tmp_path / FILE).stat().st_size, config
        assert max(read) <= max(parameter.nbytes for parameter in model.parameters())


@pooled(world_size=2)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_copies(form: str, tmp_path: Path) -> None:
    kind = saved(tmp_path, form)
    ids = batches(1)[0]["input_ids"]
    plain, due = kind.from_pretrained(tmp_path).train(), kind.from_pretrained(tmp_path).train()
    model: Any = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, due(ids).logits)  # it has its own weights and scales
    assert model.num_parameters() == plain.num_parameters()
    with autopar.lazy_init():
        lazy = copy.deepcopy(kind.from_pretrained(tmp_path))
    for other in (copy.deepcopy(model), autopar.initialize(lazy, {"tp": 2})):
        same(other, model)
        with torch.no_grad():
            close(other.train()(ids).logits[:], due(ids).logits, "logits of a copy", 1e-6)
    assert all(weight.module is layer for weight, layer in weights_of(lazy))
    copied = copy.deepcopy(model)
    autopar.deparallelize(model)
    state, whole = model.state_dict(), plain.state_dict()
    assert set(state) == set(whole) and all(torch.equal(state[name], whole[name]) for name in whole)
    with torch.no_grad():
        close(copied(ids).logits[:], due(ids).logits, "logits of a copy of what is whole again", 1e-6)


def weights_of(model: Any) -> list[tuple[Any, Any]]:
    layers = [model.get_submodule(path) for path in stored_weights(model)]
    return [(layer.weight, layer) for layer in layers if hasattr(layer.weight, "module")]


@pooled(world_size=2)
def test_files_that_do_not_fit(tmp_path: Path) -> None:
    saved(tmp_path, "nf4 nested")
    name = "model.layers.1.mlp.up_proj.weight"
    for change, said in (
        ({f"{name}.absmax": None, f"{name}.quant_map": None}, f"does not hold {name} as bitsandbytes nf4"),
        ({f"{name}.absmax": torch.zeros(7, dtype=torch.uint8)}, "for a weight of [320, 192], got [7]"),
    ):
        if dist.get_rank() == 0:
            files = load_file(tmp_path / FILE)
            kept = {key: value for key, value in (files | change).items() if value is not None}
            save_file(kept, tmp_path / FILE, {"format": "pt"})
        dist.barrier()
        with raises_everywhere(CheckpointError, said):
            autopar.from_pretrained(AutoModelForCausalLM, tmp_path, {"tp": 2})
        if dist.get_rank() == 0:
            save_file(files, tmp_path / FILE, {"format": "pt"})
        dist.barrier()
