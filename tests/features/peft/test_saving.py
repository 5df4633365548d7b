"""Adapters in PEFT's own files and in checkpoints of any mesh; adapters of a model without memory."""

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import autopar
from autopar.checkpoint import merge_checkpoint
from autopar.errors import CheckpointError, ConfigError
from tests.exchange import by_rank_0, raises_everywhere
from tests.features.peft.adapted import batch, peft, phi3, two_adapters, whole_of, with_lora
from tests.harness.worlds import pooled
from tests.parity import all_close, close
from tests.random_models import build, cases, kind
from tests.small import gpt2, llama


def _files(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            found[str(path.relative_to(folder))] = load_file(path)
        elif path.suffix == ".json":
            values = json.loads(path.read_text())  # sets are written in any order
            plain = {key: sorted(value) if isinstance(value, list) else value for key, value in values.items()}
            found[str(path.relative_to(folder))] = plain
    return found


@pytest.mark.tier("test")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pooled(world_size=2)
def test_files_are_those_of_peft(tmp_path: Path):
    plain = two_adapters()
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    for folder in ("through peft", "plain"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "README.md").write_text("---\ntags: [mine]\n---\nA card of the user's.\n")
    dist.barrier()
    model.save_pretrained(tmp_path / "through peft")
    model.save_parallelized(tmp_path / "ours", adapter_only=True)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
        expected = _files(tmp_path / "plain")
        cards = [(tmp_path / folder / "README.md").read_text() for folder in ("plain", "through peft")]
        assert "A card of the user's." in cards[0]
        assert cards[0] == cards[1]
        assert {"adapter_config.json", "adapter_model.safetensors", "second/adapter_config.json"} <= expected.keys()
        for folder in ("ours", "through peft"):
            found = _files(tmp_path / folder)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                if name.endswith(".json"):
                    assert found[name] == value, name
                else:
                    assert found[name].keys() == value.keys()
                    assert all(torch.equal(found[name][key], tensor) for key, tensor in value.items())
        again = peft.PeftModel.from_pretrained(llama(), tmp_path / "ours")
        close(again(**batch()).logits, plain(**batch()).logits, "logits of the adapters that were read")
    dist.barrier()


@pooled(world_size=2)
def test_merged_adapters_are_saved_with_the_weights_and_what_saving_refuses(tmp_path: Path):
    """In place, without the whole model on a rank; experts are written one by one, as on the hub."""
    case = next(case for case in cases("mixtral") if kind(case.head) == "causal")
    for number, build_plain in enumerate((phi3, lambda: build(case, 6, 3))):
        plain = with_lora(build_plain(), target_modules="all-linear")
        model = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
        folder = tmp_path / str(number)
        words = r"merge_checkpoints=True is not supported with adapters at .*\n  Use adapter_only=True"
        with pytest.raises(CheckpointError, match=words):
            model.save_parallelized(folder, merge_checkpoints=True)
        model.merge_adapter()
        model.save_parallelized(folder, merge_checkpoints=True)
        if dist.get_rank() == 0:
            merged = plain.merge_and_unload()
            all_close(type(merged).from_pretrained(folder).state_dict(), merged.state_dict(), "{}")

    size = {"tp": 2}
    model = autopar.initialize(with_lora(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True), size)
    with pytest.raises(CheckpointError, match=r"adapter_only=True is not supported with merge_checkpoints=True"):
        model.save_parallelized(tmp_path / "x", adapter_only=True, merge_checkpoints=True)
    with pytest.raises(CheckpointError, match=r"save_pretrained of a parallelized model does not support state_dict="):
        model.save_pretrained(tmp_path / "x", state_dict={"a": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"selected_adapters=\['other'\] must be adapters of the model: default"):
        model.save_pretrained(tmp_path / "x", selected_adapters=["other"])
    with pytest.raises(ConfigError, match=r"push_to_hub: this rank holds only its shards of PeftModel"):
        model.push_to_hub("nobody/nothing")
    with pytest.raises(ConfigError, match=r"save_pretrained: this rank holds only its shards of GPT2LMHeadModel"):
        model.get_base_model().save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    plain = autopar.initialize(gpt2(), size)
    with pytest.raises(CheckpointError, match=r"got GPT2LMHeadModel, which contains none.*\n.*get_peft_model before"):
        plain.save_parallelized(tmp_path / "x", adapter_only=True)
    staged = autopar.initialize(gpt2(), {"pp": 2})
    with pytest.raises(ConfigError, match=r"PEFT cannot add adapters(.|\n)*integrations\.get_peft_model"):
        peft.get_peft_model(staged, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))


def _adam(model: Any) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def _step(*optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pooled(world_size=4)
def test_checkpoints_of_adapted_models_load_on_any_mesh(tmp_path: Path):
    plain = two_adapters()
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    first = copy.deepcopy(plain).train()
    optimizer = _adam(first)
    first, optimizer = autopar.initialize(first, {"model_parallelism": sizes}, optimizer=optimizer)
    expected = _adam(plain.train())
    first.execute_pipeline(batch())
    plain(**batch()).loss.backward()
    _step(optimizer, expected)
    first.save_parallelized(tmp_path / "stages", optimizer=optimizer)
    first.save_parallelized(tmp_path / "adapters", adapter_only=True)
    saved = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(plain).items()}
    del first
    for tp in (1, 4):
        model = copy.deepcopy(plain)
        for parameter in model.parameters():
            parameter.data.zero_()
        optimizer = _adam(model.train())
        model = autopar.initialize(model, {"tp": tp})
        model.from_parallelized(tmp_path / "stages", optimizer=optimizer)
        all_close(whole_of(model, dict(model.named_parameters())), dict(plain.named_parameters()), "{}")
        model(**batch(1)).loss.backward()
        if tp == 4:  # goes on as if it had never stopped
            plain(**batch(1)).loss.backward()
            _step(optimizer, expected)
            held = whole_of(model, dict(model.named_parameters()))
            all_close(held, dict(plain.named_parameters()), "{} after going on")
    if dist.get_rank() == 0:
        found = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
        assert found.keys() == saved.keys()
        assert all(torch.allclose(found[name], weight, atol=1e-5) for name, weight in saved.items())
        with pytest.raises(CheckpointError, match=r"holds a model with PEFT adapters .*\n.*adapter_only=True"):
            merge_checkpoint(tmp_path / "stages", tmp_path / "merged")


_Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _lazy(folder: Path, inside: bool, **settings: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "embed_tokens"], **settings)
    with autopar.lazy_init():
        model = LlamaForCausalLM.from_pretrained(folder)
        if inside:
            return peft.get_peft_model(model, config)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("inside", [True, False])
@pooled(world_size=2)
def test_adapters_begin_as_peft_begins(tmp_path: Path, inside: bool):
    by_rank_0(llama().save_pretrained)(tmp_path)
    size = {"tp": 2}
    with pytest.raises(ConfigError, match=r"adapter 'default' at .*embed_tokens is initialized by False.*\n.*True"):
        autopar.initialize(_lazy(tmp_path, inside, init_lora_weights=False), size)
    if not inside:  # values are for a model that has memory
        model = _lazy(tmp_path, inside)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            peft.set_peft_model_state_dict(model, {f"{_Q}.lora_A.weight": torch.ones(4, 24)})
        with pytest.raises(ConfigError, match=r"1 weights of PeftModel were written into before initialize: .*lora_A"):
            autopar.initialize(model, size)
    model = autopar.initialize(_lazy(tmp_path, inside, modules_to_save=["lm_head"]), size)
    found = whole_of(model, {name: p.data for name, p in model.named_parameters() if p.requires_grad})
    assert len(found) == 2 * 2 * 2 + 2 + 1
    for name, weight in found.items():
        if "lora_B" in name or "embedding_A" in name:
            assert not weight.any(), name
        elif "lora_A" in name:
            bound = 1 / math.sqrt(weight.shape[1])  # of the whole layer's inputs
            assert 0.8 * bound < weight.abs().max() <= bound, name
    plain = llama()
    close(model(**batch()).logits[:], plain(**batch()).logits, "logits")
    name = "base_model.model.lm_head.modules_to_save.default.weight"
    assert torch.equal(found[name], plain.lm_head.weight)


@pooled(world_size=2)
def test_zero_3_keeps_rows_of_the_same_adapters(tmp_path: Path):
    by_rank_0(llama().save_pretrained)(tmp_path)
    models = []
    for config in ({"tp": 1}, {"zero": {"stage": 3}}):
        torch.manual_seed(4)
        models.append(autopar.initialize(_lazy(tmp_path, inside=True, modules_to_save=["lm_head"]), config))
    for (name, mine), whole in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert mine.requires_grad == whole.requires_grad, name
        assert torch.equal(mine.full_tensor(), whole), name
    close(models[1](**batch()).logits, llama()(**batch()).logits, "logits")


@pooled(world_size=2)
def test_files_of_an_adapter_are_for_a_parallelized_model(tmp_path: Path):
    base, folder, size = tmp_path / "base", tmp_path / "adapter", {"tp": 2}
    if dist.get_rank() == 0:
        llama().save_pretrained(base)
        with_lora(LlamaForCausalLM.from_pretrained(base)).save_pretrained(folder)
    dist.barrier()

    def inside(load: Any) -> Any:
        with autopar.lazy_init():
            return load()

    def after() -> Any:
        model = inside(lambda: LlamaForCausalLM.from_pretrained(base))
        model.load_adapter(folder)
        return autopar.initialize(model, size)

    calls = [
        lambda: autopar.from_pretrained(AutoModelForCausalLM, folder, size),
        lambda: autopar.from_pretrained(peft.AutoPeftModelForCausalLM, folder, size),
        lambda: inside(lambda: AutoModelForCausalLM.from_pretrained(folder)),
        lambda: inside(lambda: LlamaForCausalLM.from_pretrained(base).load_adapter(folder)),
        lambda: inside(lambda: peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)),
        lambda: inside(lambda: peft.AutoPeftModelForCausalLM.from_pretrained(folder)),
        after,
    ]
    for call in calls:
        with raises_everywhere(ConfigError, "holds an adapter, which lazy_init does not support", "model.load_adapter"):
            call()
    model = inside(lambda: AutoModelForCausalLM.from_pretrained(base))  # as the error says
    model = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(folder))
    model = autopar.initialize(model, size)
    model.load_adapter(folder, "default")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    close(model.eval()(**batch()).logits[:], plain.eval()(**batch()).logits, "logits")
