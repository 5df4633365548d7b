"""What PEFT offers on a model with adapters, on a sharded one: switching, disabling, merging, loading, generating."""

import copy
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from tests.exchange import everyones, same_random_states
from tests.features.peft.adapted import batch, peft, randomise_adapters, with_lora
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import llama


def _pair() -> tuple[Any, Any]:
    plain = with_lora(llama(), target_modules=["q_proj", "o_proj", "embed_tokens"], modules_to_save=["lm_head"])
    plain.add_adapter("second", peft.LoraConfig(r=3, target_modules=["down_proj", "k_proj"], use_rslora=True))
    plain.set_adapter("second")
    randomise_adapters(plain, 5)
    plain.set_adapter("default")
    plain.eval()
    model = copy.deepcopy(plain)
    return plain, autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": 2}})


def _same_logits(model: Any, plain: Any, when: str) -> torch.Tensor:
    with torch.no_grad():
        expected = plain(input_ids=batch()["input_ids"]).logits
        close(model(input_ids=batch()["input_ids"]).logits[:], expected, f"logits {when}")
    return expected


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_switching_merging_generating_and_back():
    plain, model = _pair()
    assert model.get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()
    first = _same_logits(model, plain, "with the first adapter")
    with model.disable_adapter(), plain.disable_adapter():
        assert not torch.allclose(_same_logits(model, plain, "without adapters"), first, atol=1e-3)
    for each in (model, plain):
        each.set_adapter("second")
    second = _same_logits(model, plain, "with the second adapter")
    assert not torch.allclose(second, first, atol=1e-3)
    for each in (model, plain):
        each.base_model.set_adapter(["default", "second"])
    _same_logits(model, plain, "with both adapters")
    for each in (model, plain):
        each.merge_adapter()
    _same_logits(model, plain, "with merged adapters")
    for each in (model, plain):
        each.unmerge_adapter()
    _same_logits(model, plain, "with adapters that are unmerged again")
    ids = batch()["input_ids"]
    words = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(input_ids=ids, **words), plain.generate(input_ids=ids, **words))
    back = autopar.deparallelize(model)
    assert not hasattr(back, "mpu")
    for name, parameter in back.named_parameters():
        close(parameter, plain.get_parameter(name), name)
    _same_logits(back.merge_and_unload(), plain.merge_and_unload(), "after merge_and_unload")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_would_be_wrong_on_shards_is_refused():
    plain = with_lora(llama(), target_modules=["q_proj", "o_proj"])
    plain.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    model = autopar.initialize(plain.eval(), {"model_parallelism": {"tensor_parallel_size": 2}})
    ids = batch()["input_ids"]
    with pytest.raises(ConfigError, match=r"adapter_names is not supported with tensor.*\n.*set_adapter"):
        model(input_ids=ids, adapter_names=["default", "second"])
    for name in ("merge_and_unload", "unload", "delete_adapter"):
        with pytest.raises(ConfigError, match=rf"{name} is not .*\n  Call autopar.deparallelize\(model\).{name}"):
            getattr(model, name)(*(["second"] if name == "delete_adapter" else []))
    model(input_ids=ids)
    assert set(autopar.deparallelize(model).merge_and_unload().state_dict()) == set(llama().state_dict())


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_dropout_in_front_of_adapters_is_that_of_one_model():
    """The same mask where the input is whole, another one on each rank where it is sharded."""
    plain = with_lora(llama(), target_modules=["q_proj", "o_proj"], lora_dropout=0.5)
    model = autopar.initialize(plain, {"model_parallelism": {"tensor_parallel_size": 2}}).train()
    masks: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("lora_dropout.default"):
            module.register_forward_hook(lambda _, x, y, name=name: masks.update({name: (y == 0).long()}))
    model(**batch()).loss.backward()
    for name, mask in masks.items():
        mine = mask[..., :8]  # of 12 features on each rank, or of all 24
        assert 0.3 < mine.float().mean() < 0.7, name
        assert torch.equal(*everyones(mine)) is ("q_proj" in name), name
    assert len(masks) == 4
    same_random_states()
