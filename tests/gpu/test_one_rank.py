"""One rank, whose process group ``initialize`` starts: what only a GPU does otherwise than the CPU."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.gpu.device_ranks import GPU, on_each
from tests.parity import all_close, close
from tests.small import gpt2, llama

TP1: dict[str, Any] = {"model_parallelism": {"tensor_parallel_size": 1}}
IDS = torch.randint(0, 131, (3, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def started(model: Any, place: str, **config: Any) -> Any:
    model = autopar.initialize(model, {**TP1, **config})
    assert model.mpu.device.type == place
    assert {parameter.device.type for parameter in model.parameters()} == {place}
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@on_each
def test_outputs_loss_and_gradients_are_the_plain_models(place: str) -> None:
    for build in (gpt2, llama):
        plain, model, ids = build().to(place), started(build(), place), IDS.to(place)
        expected, found = plain(ids, labels=ids), model(ids, labels=ids)
        assert torch.equal(found.logits, expected.logits)
        expected.loss.backward()
        found.loss.backward()
        close(found.loss.detach(), expected.loss.detach(), "loss")
        all_close(gradients(model), gradients(plain), "{}")
        model.mpu.destroy()


@on_each
@pytest.mark.parametrize("on_cpu", [False, True])
def test_recomputed_activations_give_the_same_gradients(place: str, on_cpu: bool) -> None:
    plain = gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3).train()
    section = {"enable": True, "cpu_checkpointing": on_cpu}
    model = started(copy.deepcopy(plain), place, activation_checkpointing=section).train()
    plain, ids = plain.to(place), IDS.to(place)
    for each in (plain, model):
        torch.manual_seed(5)
        each(ids, labels=ids).loss.backward()
    all_close(gradients(model), gradients(plain), "{}")


def learned(place: str, config: dict[str, Any]) -> tuple[Any, Any]:
    """Train 12 steps on one batch, whose loss falls."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = autopar.initialize(model, {**TP1, **config}, optimizer=optimizer)
    ids, found = IDS.to(place), []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        (optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < 0.9 * found[0], found
    return model, optimizer


@on_each
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_with_zero_1_learns(place: str, dtype: str) -> None:
    config = {"precision": {"dtype": dtype}, "zero": {"stage": 1}, "gradient_clipping": 1.0}
    model, optimizer = learned(place, config)
    assert next(model.parameters()).dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    held = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert {value.device.type for value in held if value.dim()} == {place}


@on_each
@pytest.mark.parametrize("offload", [False, True])
def test_fully_sharded_training_learns(place: str, offload: bool) -> None:
    if offload and place == "cpu":
        pytest.skip("cpu_offload is for GPUs")
    model, _ = learned(place, {"zero": {"stage": 3, "cpu_offload": offload}})
    assert {p.to_local().device.type for p in model.parameters()} == {"cpu" if offload else place}


@on_each
def test_a_model_without_memory_is_loaded_onto_the_device(place: str, tmp_path: Any) -> None:
    from transformers import LlamaForCausalLM

    plain = llama()
    plain.save_pretrained(tmp_path)
    model = autopar.from_pretrained(LlamaForCausalLM, tmp_path, TP1)
    assert {parameter.device.type for parameter in model.parameters()} == {place}
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), plain.state_dict()[name]), name
    ids = IDS.to(place)
    close(model(ids).logits.cpu(), plain(IDS).logits, "logits", 1e-4)


@pytest.mark.parametrize("place", [GPU])
@pytest.mark.parametrize("config", [{}, {"zero": {"stage": 1}, "precision": {"dtype": "bf16"}}], ids=["plain", "bf16"])
def test_a_step_does_not_wait_for_the_gpu(place: str, config: dict[str, Any]) -> None:
    model = llama().train()
    settings = {**TP1, **config, "gradient_clipping": 1.0, "consistency_check": {"enable": False}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = autopar.initialize(model, settings, optimizer=optimizer)
    ids = IDS.to(place)
    for number in range(4):
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.tier("all")
@pytest.mark.parametrize("place", [GPU])
def test_decoding_replays_a_graph(place: str) -> None:
    plain = llama().eval()
    model = started(copy.deepcopy(plain), place).eval()
    plain, ids = plain.to(place), IDS[:1].to(place)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = plain.generate(ids, **settings)
    for _ in range(2):  # compiled and recorded in the first
        assert torch.equal(model.generate(ids, cache_implementation="static", **settings), expected)


@pytest.mark.tier("all")
@on_each
def test_a_compiled_model_computes_the_same(place: str) -> None:
    plain = llama()
    model = started(copy.deepcopy(plain), place)
    ids = IDS.to(place)
    compiled = torch.compile(model, backend="inductor" if place == "cuda" else "eager")
    close(compiled(ids).logits, plain.to(place)(ids).logits, "logits", 1e-4)
