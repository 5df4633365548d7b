"""What is planned of a quantized base with adapters against what ranks hold: equal, byte for byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import autopar
from autopar.errors import ConfigError
from autopar.plan.plan import held
from autopar.tools.commands.models import add_lora, kind_of, mark_quantized
from tests.features.quantized.models import FAMILIES, adapted, quantized
from tests.harness.worlds import pooled
from tests.planner.command import planned, run
from tests.planner.saved_bytes import SavedBytes

SEQUENCE = 15
FORMS = {"nf4": "nf4", "nf4 nested": "nf4-double", "int8": "int8"}


def described(form: str, family: str = "llama") -> Any:
    """The same model, made of its config: no weights, and nothing of bitsandbytes."""
    kind, config = FAMILIES[family]
    with torch.device("meta"):
        model = kind(config())
    mark_quantized(model, kind_of(FORMS[form]))
    return add_lora(model, 4)


def planned_is_held(form: str, family: str, config: dict[str, Any]) -> None:
    sizes = {"sequence": SEQUENCE, "batch": 2, "device": "cpu", "gpus": torch.distributed.get_world_size()}
    model: Any = adapted(form, family)
    plan = autopar.plan_memory(model, config, **sizes)
    without = autopar.plan_memory(described(form, family), config, **sizes)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    ids = torch.randint(1, 131, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    with SavedBytes(model) as saved:
        model.execute_pipeline({"input_ids": ids, "labels": ids, "use_cache": False}, optimizer=optimizer)
    optimizer.step()
    mpu = model.mpu
    place = mpu.pp.rank, mpu.dp.rank, mpu.tp.rank
    gradients = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
    states = [x.nbytes for state in optimizer.state.values() for x in state.values()]
    for due in (plan.ranks[place], without.ranks[place]):
        states_of = due.weights, due.gradients, due.optimizer
        assert states_of == (held(model)[1], sum(gradients), sum(states)), (config, place)
    kept = plan.kept[place], without.kept[place], saved.most
    assert len({*kept}) == 1 and saved.most > 0, (config, place, kept)


@pooled(world_size=2)
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
@pytest.mark.tier("test", only=("llama-nf4 nested",))
def test_two_ranks_hold_what_is_planned(form: str, family: str) -> None:
    pipeline = {"pipeline": {"microbatch_size": 1}}
    for config in ({"tp": 2}, {"pp": 2}, {"zero": {"stage": 1}}):
        planned_is_held(form, family, {**config, **pipeline})


@pytest.mark.tier("test")
def test_the_command(tmp_path: Path) -> None:
    FAMILIES["llama"][1]().save_pretrained(tmp_path)
    sizes = ("--gpus", 2, "--sequence", 16, "--global-batch", 4, "--zero", 0, "--no-checkpointing")
    given = (tmp_path, *sizes, "--lora", 8)
    text = run(*given, "--quantization", "nf4-double").stdout
    assert "763,968 parameters, 49,152 of them trained, the rest in bitsandbytes nf4 with quantized scales" in text
    found = planned(*given, "--quantization", "nf4-double")
    assert found["best"][0]["memory"][0]["weights"] > 0
    refused = run(*given, "--quantization", "nf5")
    assert refused.exit_code == 1
    assert "--quantization nf5 must be one of nf4, nf4-double, fp4, fp4-double, int8. Did you" in refused.stderr
    refused = run(tmp_path, *sizes, "--quantization", "nf4")
    assert "--quantization nf4: quantized weights are frozen; add trained weights with --lora 16" in refused.stderr


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("form", FORMS)
def test_a_folder_that_is_quantized_already(form: str, tmp_path: Path) -> None:
    quantized(form).save_pretrained(tmp_path)
    sizes = ("--gpus", 1, "--sequence", 16, "--global-batch", 4, "--zero", 0, "--precision", "fp32")
    found = planned(tmp_path, *sizes, "--lora", 4)
    assert found["best"][0]["memory"][0]["weights"] == held(adapted(form))[1]
    with autopar.lazy_init():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = add_lora(model, 4)
    plan = autopar.plan_memory(model, sequence=8, device="cpu")
    assert plan.ranks[0, 0, 0].weights == held(adapted(form))[1]
    refused = run(tmp_path, *sizes).stderr
    assert "such weights are frozen; add trained weights with --lora 16" in refused and "is in bitsandbytes" in refused
    refused = run(tmp_path, *sizes, "--lora", 4, "--quantization", "fp4-double").stderr
    assert "--quantization fp4-double: the weights of" in refused


def test_what_does_not_go() -> None:
    with pytest.raises(ConfigError, match=r"not supported with quantized weights, such as base_model.model"):
        autopar.plan_memory(described("nf4"), {"zero": {"stage": 3}}, sequence=8, gpus=2)
    with pytest.raises(ConfigError, match="has no linear layers to quantize"):
        mark_quantized(torch.nn.Embedding(3, 4), kind_of("nf4"))
