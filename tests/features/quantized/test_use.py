"""What else is done with a quantized model: evaluated, merged, compiled, counted, printed, verified."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cli.split import split_checkpoint
from autopar.errors import ConfigError
from autopar.stored import as_plain
from tests.exchange import raises_everywhere
from tests.features.quantized.models import adapted, batches, bitsandbytes, quantized
from tests.features.quantized.test_training import gradients
from tests.harness.worlds import pooled
from tests.parity import close

IDS = batches(1)[0]["input_ids"]


def packing(model: Any) -> list[bool]:
    kinds = bitsandbytes.nn.Linear4bit
    return [bool(module.support_avx512bf16_for_cpu) for module in model.modules() if isinstance(module, kinds)]


def let_pack(model: Any) -> Any:
    """Let evaluation pack weights, as a model does that was just loaded, on a CPU that has AVX512-BF16."""
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = True
    return model


@pooled(world_size=2)
@pytest.mark.parametrize("config", [{"tp": 2}, {}], ids=str)
def test_weights_are_not_packed_and_go_on_training(config: dict[str, Any]) -> None:
    model = autopar.initialize(let_pack(adapted("nf4 nested")), config)
    assert not any(packing(model))
    with torch.no_grad():
        evaluated = model.eval()(IDS).logits[:]
    plain = adapted("nf4 nested")
    close(evaluated, plain(IDS).logits, "logits")
    model.train()(**batches(1)[0]).loss.backward()
    assert len(gradients(model)) == 28
    autopar.deparallelize(model)
    assert len(set(packing(model))) == 1  # as the machine has it


@pooled(world_size=2)
def test_merged_adapters() -> None:
    plain, model = adapted("nf4"), autopar.initialize(adapted("nf4"), {"tp": 2})
    with raises_everywhere(ConfigError, "deparallelize(model).merge_and_unload(...)", "on the full model."):
        model.merge_and_unload()
    plain.merge_adapter(), model.merge_adapter()
    close(model(IDS).logits[:], plain(IDS).logits, "logits")
    plain.unmerge_adapter(), model.unmerge_adapter()
    logits = autopar.deparallelize(model).merge_and_unload()(IDS).logits  # as the error says
    close(logits, plain.merge_and_unload()(IDS).logits, "logits of the merged model")


@pooled(world_size=2)
def test_half_precision_and_all_parameters_in_the_optimizer() -> None:
    model: Any = adapted("nf4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"tp": 2, "precision": {"dtype": "bf16"}, "gradient_clipping": 1.0}
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    losses = []
    for _ in range(3):
        loss = model(**batches(1)[0]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8


@pooled(world_size=2)
def test_sizes_are_those_of_the_weights() -> None:
    plain, model = quantized("nf4"), autopar.initialize(quantized("nf4"), {"tp": 2})
    assert model.num_parameters() == plain.num_parameters()
    shown = [192, 192] if model.mpu.tp.rank == 0 else [128, 192]
    assert f"weight {shown} of [320, 192]" in repr(model.model.layers[0].mlp.up_proj)
    with contextlib.redirect_stdout(io.StringIO()):
        text = autopar.summary(model)
    held = sum(p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in model.parameters())
    assert f"this rank: {held:,} parameters, 0." in text
    name = "model.layers.0.mlp.up_proj.weight"
    with raises_everywhere(
        ConfigError, f"full_params is not supported with quantized weights, got {name} (bitsandbytes nf4)"
    ):
        autopar.full_params(model, name).__enter__()
    with raises_everywhere(
        ConfigError, f"full_tensor is not supported with quantized weights, got {name} (bitsandbytes nf4)"
    ):
        autopar.full_tensor(model.model.layers[0].mlp.up_proj.weight)
    assert isinstance(model.lm_head, nn.Linear) and autopar.full_tensor(model.lm_head.weight).shape == (131, 192)


def test_a_packed_weight_is_refused() -> None:
    model = let_pack(quantized("nf4"))
    state = model.model.layers[1].mlp.up_proj.weight.quant_state
    state.packing_format_for_cpu = True  # as on a CPU that has AVX512-BF16
    with pytest.raises(ConfigError) as caught, as_plain(model):
        pass
    assert str(caught.value).startswith("a Linear4bit must not be evaluated before initialize, since bitsandbytes")
    assert "Load the model again, and call autopar.initialize before evaluating it" in str(caught.value)


def test_quantized_weights_do_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="cannot send 14 quantized weights to new processes"):
        autopar.verify(quantized("nf4"), {"tp": 2})


@pytest.mark.tier("all")
@pytest.mark.parametrize("form", ["nf4-double", "int8"])
def test_verify_command(form: str) -> None:
    arguments = ["verify", "llama", "--tp", "2", "--quantization", form, "--lora", "4"]
    result = CliRunner().invoke(app, [*arguments, "--checks", "forward,backward,step"])
    assert result.exit_code == 0, result.output
    assert "worst gradient" in result.stdout and "all checks pass" in result.stdout


def test_a_quantized_folder_is_not_split(tmp_path: Path) -> None:
    quantized("nf4").save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match="holds 14 quantized weights, which are not split"):
        split_checkpoint(tmp_path / "saved", tmp_path / "shards", tp=2)


@pooled(world_size=2)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_verify(form: str, tmp_path: Path) -> None:
    report = autopar.verify(
        let_pack(adapted(form)), {"tp": 2}, checks=["forward", "backward", "step"], batches=batches(2)
    )
    assert report.ok, str(report)
    allowed = {"2e-02" if form == "int8" else "1e-04"}  # inputs of int8 layers are rounded
    assert allowed == {line.split()[-2] for line in str(report).splitlines() if line.strip().startswith("forward")}
