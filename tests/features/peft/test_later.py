"""Adapters that come after ``initialize``: the initial values, and then the training, of one process."""

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
from tests.exchange import raises_everywhere
from tests.features.peft.adapted import batch, peft, whole_of, with_lora
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2, llama

TP = {"model_parallelism": {"tensor_parallel_size": 2}}


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
    staged = autopar.initialize(llama(), {"model_parallelism": {"pipeline_parallel_size": 2}})
    torch.manual_seed(5)
    staged = get_peft_model(staged, _config())
    torch.manual_seed(5)
    plain = peft.get_peft_model(llama(), _config())
    loss = staged.execute_pipeline(batch(), broadcast_loss=True).loss
    close(loss.detach(), plain(**batch()).loss.detach(), "loss through stages")

    model = autopar.initialize(llama(), TP)
    model.lm_head.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with raises_everywhere(
        ConfigError, "tensor_parallel_size=2 is not supported with lora_dropout of the DoRA adapter"
    ):
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
