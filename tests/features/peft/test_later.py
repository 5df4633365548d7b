"""Adapters after ``initialize``, what PEFT offers on sharded ones, and what is refused by its name."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

import autopar
from autopar.errors import ConfigError
from autopar.integrations import add_adapter, get_peft_model
from autopar.plan.make_plan import make_plan
from autopar.plan.stages import make_stages
from autopar.policy.match import find_policy
from tests.exchange import everyones, raises_everywhere, same_random_states
from tests.features.peft.adapted import batch, peft, two_adapters, whole_of, with_lora
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2, llama

TP = {"tp": 2}


def _config(**changes: Any) -> Any:
    settings = {"r": 4, "target_modules": "all-linear", "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**settings, **changes})


def _same(model: Any, plain: Any) -> None:
    weights = whole_of(model, dict(model.named_parameters()))
    assert weights.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        close(weights[name], parameter.detach(), name)


def _steps(model: Any, count: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    losses = []
    for step in range(count):
        loss = model.train()(**batch(step)).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pooled(world_size=2)
def test_get_peft_model_on_a_parallelized_model(tmp_path: Path):
    """Bit for bit the adapters of one process, also random ones; trained, saved, and read by plain PEFT."""
    plain = llama()
    model = autopar.initialize(copy.deepcopy(plain), TP)
    _steps(model, 1)
    _steps(plain, 1)
    torch.manual_seed(5)
    expected = peft.get_peft_model(plain, _config())
    state = torch.get_rng_state()
    torch.manual_seed(5)
    model = get_peft_model(model, _config())
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model) is peft.PeftModelForCausalLM and model.mpu.tp.size == 2
    drawn = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for name, weight in whole_of(model, drawn).items():
        assert torch.equal(weight, expected.get_parameter(name)), name
    close(torch.stack(_steps(model, 3)), torch.stack(_steps(expected, 3)), "losses")
    _same(model, expected)

    torch.manual_seed(6)
    expected.add_adapter("second", _config(r=3, target_modules=["q_proj"], modules_to_save=None))
    torch.manual_seed(6)
    add_adapter(model, "second", _config(r=3, target_modules=["q_proj"], modules_to_save=None))
    _same(model, expected)
    for one in (model, expected):
        one.set_adapter("second")
    close(torch.stack(_steps(model, 2)), torch.stack(_steps(expected, 2)), "losses of the second adapter")
    _same(model, expected)

    model.save_pretrained(tmp_path)  # PEFT's files, on a parallelized model that has no adapters yet
    dist.barrier()
    base = autopar.deparallelize(model).unload()
    model = get_peft_model(autopar.initialize(base, TP), peft.LoraConfig.from_pretrained(tmp_path))
    late, refusal = autopar.initialize(llama(), TP), "PEFT cannot add adapters to LlamaForCausalLM"
    takes_peft = Version(peft.__version__) >= Version(MIN_PEFT_VERSION)  # 5.24 wants a release that is not out
    for call in (
        lambda: peft.get_peft_model(late, _config()),
        lambda: peft.PeftModel.from_pretrained(late, tmp_path),
        *[lambda: late.add_adapter(_config())] * takes_peft,  # transformers' own
        lambda: late.load_adapter(tmp_path),
    ):
        with raises_everywhere(ConfigError, refusal, "autopar.integrations.get_peft_model(", "model.load_adapter(dir"):
            call()
    losses = [one(**batch()).loss for one in (late, llama())]  # nothing has changed
    close(losses[0].detach(), losses[1].detach(), "loss after the refusals")
    losses[0].backward()
    assert all(parameter.grad is not None for parameter in late.parameters())
    assert get_peft_model(late, _config())(**batch()).loss.detach().isfinite()
    model.load_adapter(tmp_path, "default")
    expected.set_adapter("default")
    close(model.eval()(**batch()).logits[:], expected.eval()(**batch()).logits, "logits of adapters from files")


@pooled(world_size=2)
def test_other_models_and_what_is_refused():
    with raises_everywhere(ConfigError, "add_adapter expected a PeftModel, got GPT2LMHeadModel", "get_peft_model"):
        add_adapter(gpt2(), "second", _config())
    staged = autopar.initialize(llama(), {"pp": 2})
    torch.manual_seed(5)
    staged = get_peft_model(staged, _config())
    torch.manual_seed(5)
    plain = peft.get_peft_model(llama(), _config())
    loss = staged.execute_pipeline(batch(), broadcast_loss=True).loss
    close(loss.detach(), plain(**batch()).loss.detach(), "loss through stages")

    model = autopar.initialize(llama(), TP)
    model.lm_head.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with raises_everywhere(ConfigError, "tensor_parallel_size=2 is not supported with lora_dropout of the DoRA adap"):
        get_peft_model(model, _config(use_dora=True, lora_dropout=0.5))
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    with pytest.raises(ValueError, match="nothing"):
        get_peft_model(model, _config(target_modules=["nothing"], modules_to_save=None))
    close(model(**batch()).logits[:], llama()(**batch()).logits, "logits of the model that stays as it was")

    model = autopar.initialize(with_lora(llama(), target_modules=["q_proj"]), TP)
    with raises_everywhere(ConfigError, "the adapter 'default' already exists"):
        add_adapter(model, "default", _config())
    with raises_everywhere(ConfigError, "add_adapter is not supported on a parallelized", "integrations.add_adapter"):
        model.add_adapter("second", _config())
    model = llama()
    model, _ = autopar.initialize(model, TP, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with raises_everywhere(ConfigError, "not supported on a model that was initialized with an optimizer", "first"):
        get_peft_model(model, _config())


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
@pooled(world_size=2)
def test_prompts_and_prefixes_after_initialize(kind: str):
    settings = {"encoder_hidden_size": 8} if kind == "PromptEncoderConfig" else {}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings)
    model, plain = autopar.initialize(llama(), TP), llama()
    with raises_everywhere(ConfigError, "PEFT cannot add adapters to Llama", "integrations.get_peft_model("):
        peft.get_peft_model(model, config)
    torch.manual_seed(5)
    plain = peft.get_peft_model(plain, config)
    torch.manual_seed(5)
    model = get_peft_model(model, config)
    close(torch.stack(_steps(model, 2)), torch.stack(_steps(plain, 2)), "losses")


def _same_logits(model: Any, plain: Any, when: str) -> torch.Tensor:
    with torch.no_grad():
        expected = plain(input_ids=batch()["input_ids"]).logits
        close(model(input_ids=batch()["input_ids"]).logits[:], expected, f"logits {when}")
    return expected


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_switching_merging_generating_and_back():
    plain = two_adapters().eval()
    model = autopar.initialize(copy.deepcopy(plain), TP)
    assert model.get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()
    first = _same_logits(model, plain, "with the first adapter")
    with model.disable_adapter(), plain.disable_adapter():
        assert not torch.allclose(_same_logits(model, plain, "without adapters"), first, atol=1e-3)
    for each in (model, plain):
        each.set_adapter("second")
    assert not torch.allclose(_same_logits(model, plain, "with the second adapter"), first, atol=1e-3)
    for each in (model, plain):
        each.base_model.set_adapter(["default", "second"])
    _same_logits(model, plain, "with both adapters")
    for change in ("merge_adapter", "unmerge_adapter"):
        for each in (model, plain):
            getattr(each, change)()
        _same_logits(model, plain, f"after {change}")
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
    model = autopar.initialize(plain.eval(), TP)
    ids = batch()["input_ids"]
    with pytest.raises(ConfigError, match=r"adapter_names is not supported with tensor.*\n.*set_adapter"):
        model(input_ids=ids, adapter_names=["default", "second"])
    for name, *given in (["merge_and_unload"], ["unload"], ["delete_adapter", "second"]):
        with pytest.raises(ConfigError, match=rf"{name} is not .*\n  Call autopar.deparallelize\(model\).{name}"):
            getattr(model, name)(*given)
    model(input_ids=ids)
    assert set(autopar.deparallelize(model).merge_and_unload().state_dict()) == set(llama().state_dict())


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_dropout_in_front_of_adapters_is_that_of_one_model():
    """The same mask where the input is whole, another one on each rank where it is sharded."""
    plain = with_lora(llama(), target_modules=["q_proj", "o_proj"], lora_dropout=0.5)
    model = autopar.initialize(plain, TP).train()
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


pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # PEFT reads it

_LINEAR = ["q_proj", "o_proj"]
METHODS = {
    "DoRA and dropout": (
        lambda: peft.LoraConfig(target_modules=_LINEAR, use_dora=True, lora_dropout=0.1),
        r"lora_dropout of the DoRA adapter 'default' \(at .*q_proj\)",
    ),
    "aLoRA": (
        lambda: peft.LoraConfig(target_modules=_LINEAR, alora_invocation_tokens=[1], task_type="CAUSAL_LM"),
        r"PEFT's ALoraLinear of adapter 'default' \(at .*q_proj\), a variant of LoRA",
    ),
    "AdaLoRA": (lambda: peft.AdaLoraConfig(target_modules=_LINEAR, total_step=9), r"PEFT's ADALORA \(adapter 'defau"),
    "LoHa": (lambda: peft.LoHaConfig(target_modules=_LINEAR), r"PEFT's LOHA"),
    "VeRA": (lambda: peft.VeraConfig(target_modules=_LINEAR), r"PEFT's VERA"),
    "LayerNorm": (lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]), r"PEFT's LN_TUNING"),
    "tokens": (
        lambda: peft.LoraConfig(target_modules=_LINEAR, trainable_token_indices=[1, 2]),
        r"PEFT's trainable_tokens layer TrainableTokensLayer on a Embedding",
    ),
    "tied": (
        lambda: peft.LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True),
        r"ensure_weight_tying=True of PEFT's LORA",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METHODS)
def test_other_methods_are_refused_by_name_over_tensor_parallel_ranks(name: str):
    config, text = METHODS[name]
    model = peft.get_peft_model(llama(), config())
    names = list(model.state_dict())
    policy = find_policy(model)
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size=2 is not supported with {text}(.|\n)*LoRA"):
        make_plan(model, policy, 2)
    make_plan(model, policy, 1)  # one rank computes what PEFT has
    assert list(model.state_dict()) == names


def test_prompts_through_stages_and_quantized_layers_of_other_libraries_are_refused():
    for config in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        model = peft.get_peft_model(llama(), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
        with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 is not supported with PEFT's P"):
            make_stages(model, find_policy(model), 2)
    model = with_lora(llama(), target_modules=_LINEAR)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.__class__ = type("HqqLoraLinear", (type(layer),), {"__module__": "peft.tuners.lora.hqq"})
    with pytest.raises(ConfigError, match=r"PEFT's lora layer HqqLoraLinear on a Linear \(at .*layers.0.self_attn.q_p"):
        make_plan(model, find_policy(model), 2)
