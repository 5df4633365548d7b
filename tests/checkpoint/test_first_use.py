"""The first use of a model whose weights lie in maps of files: after it they may change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import autopar
from autopar.errors import CheckpointError, ConsistencyError
from autopar.storage.private_map import pages_can_be_replaced
from tests.checkpoint.loading import on_rank_0, overwrite, same, shared, shifted, small_maps, tp
from tests.pool import pooled
from tests.small import llama

pytestmark = pytest.mark.skipif(not pages_can_be_replaced(), reason="Linux since 5.7 replaces the pages of a map")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_loaded_model_does_not_follow_its_file(tmp_path):
    plain = llama(num_hidden_layers=2)
    folder = Path(shared(tmp_path / "m", plain))
    expected = autopar.initialize(plain, tp(2))
    ids = torch.arange(14).view(2, 7)
    with small_maps():
        loaded = autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(2))
        with autopar.lazy_init():
            lazily = LlamaForCausalLM.from_pretrained(folder)
        lazily = autopar.initialize(lazily, tp(2))
        assert loaded._autopar.takeover.copies and lazily._autopar.takeover.copies
        assert loaded(ids).logits.shape == lazily(ids).logits.shape  # which waits
        dist.barrier()
        if dist.get_rank() == 0:
            for path in folder.glob("*.safetensors"):
                path.write_bytes(bytes(path.stat().st_size))
        dist.barrier()
    same(loaded, expected)
    same(lazily, expected)


@pooled(world_size=2)
def test_a_file_that_changes_on_one_rank_stops_all_of_them(tmp_path):
    """A forward, a state dict, a save and deparallelize; later ones too."""
    folder = Path(shared(tmp_path / "m", llama(num_hidden_layers=2)))
    ids = torch.arange(14).view(2, 7)
    with small_maps():
        model = autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(2))
        if dist.get_rank() == 0:
            model._autopar.takeover.wait()  # before
        on_rank_0(overwrite, folder / "model.safetensors")
        for _ in range(2):
            if dist.get_rank() == 1:
                with pytest.raises(CheckpointError, match="was written to while it was being loaded"):
                    model(ids)
            else:
                with pytest.raises(ConsistencyError, match=r"refused: .*was written to while it was being loaded"):
                    model(ids)
        if dist.get_rank() == 1:
            with pytest.raises(CheckpointError, match="was written to while it was being loaded"):
                model.state_dict()
        with pytest.raises(CheckpointError, match="was written to while it was being loaded"):
            model.save_parallelized(str(tmp_path / "out"))
        with pytest.raises(CheckpointError, match="was written to while it was being loaded"):
            autopar.deparallelize(model)
    assert not (tmp_path / "out").exists()


@pooled(world_size=2)
def test_it_happens_before_a_state_dict_and_before_deparallelize(tmp_path):
    plain = llama(num_hidden_layers=2)
    folder = Path(shared(tmp_path / "m", plain))
    with small_maps():
        for take in (lambda model: model.state_dict(), autopar.deparallelize):
            model = autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(2))
            taken = model._autopar.takeover
            assert not taken._ended
            take(model)
            assert taken._ended
    same(model, plain)


@pooled(world_size=2)
def test_it_happens_in_a_layer_that_is_called_by_itself(tmp_path):
    """And in one that is compiled by itself; afterwards no layer has a hook more than it had."""
    plain = llama(num_hidden_layers=2)
    folder = Path(shared(tmp_path / "m", plain))
    ids = torch.arange(6).view(1, 6)

    def compiled(model):
        return torch.compile(model.get_input_embeddings(), backend="aot_eager", fullgraph=True)

    with small_maps():
        read = autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(1), disable_mmap=True)
        hooks = {path: len(module._forward_pre_hooks) for path, module in read.named_modules()}
        for layer in (lambda model: model.get_input_embeddings(), compiled):
            model = autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(1))
            assert len(model.lm_head._forward_pre_hooks) > hooks["lm_head"]
            found = layer(model)(ids)
            assert model._autopar.takeover._ended and torch.equal(found, plain.get_input_embeddings()(ids))
            model(ids)
            assert {path: len(module._forward_pre_hooks) for path, module in model.named_modules()} == hooks
        model = autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(1))
        on_rank_0(overwrite, folder / "model.safetensors")
        for _ in range(2):
            with pytest.raises(CheckpointError, match="was written to while it was being loaded"):
                model.lm_head(torch.ones(1, 24))


@pooled(world_size=2)
def test_it_happens_in_a_compiled_step_of_replicas(tmp_path):
    """Without tensor parallelism nothing else is checked before a forward inside of a graph."""
    folder = Path(shared(tmp_path / "m", llama(num_hidden_layers=1)))
    ids = torch.arange(14).view(2, 7)
    with small_maps():
        model = autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(1))
        taken = model._autopar.takeover
        step = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, backend="aot_eager")
        with torch.no_grad():
            found = step(ids)
        assert taken._ended
        exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
        assert "begin_forward" not in str(exported.graph)
        assert torch.allclose(found, model(input_ids=ids, use_cache=False).logits, atol=1e-5)


@pooled(world_size=2)
@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_rounds_as_one_that_was_read(tmp_path, dtype, offset):
    """Wherever the file has its weights, also in products with one row: float32 does not lie in maps at 8 mod 16."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    sizes = {"hidden_size": 256, "intermediate_size": 688, "vocab_size": 512, "num_hidden_layers": 1, **heads}
    folder = Path(shared(tmp_path / "m", llama(**sizes).to(dtype)))
    on_rank_0(shifted, folder, offset)
    models = [
        autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(2), dtype=dtype, disable_mmap=disable)
        for disable in (None, True)
    ]
    place = models[0].lm_head.weight.data_ptr()
    mapped = dtype is torch.bfloat16 or offset == 0
    assert models[0]._autopar.takeover.copies == mapped and (not mapped or place % 16 == offset)
    ids = torch.tensor([[17]])
    outputs = [model(ids, labels=ids) for model in models]
    assert models[0].lm_head.weight.data_ptr() == place and torch.equal(*(output.logits for output in outputs))
    for output in outputs:
        output.loss.backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
