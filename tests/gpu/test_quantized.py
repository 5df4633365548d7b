"""QLoRA with the kernels of the device: loss, gradients of the adapters and tokens are those of one process."""

from typing import Any

import pytest
import torch

import autopar
from tests.features.peft.adapted import whole_of
from tests.gpu.device_ranks import on_each, sharing_a_gpu
from tests.gpu.test_one_rank import gradients
from tests.parity import close

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


@on_each
@pytest.mark.tier("all")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_losses_gradients_and_tokens(place: str, tp: int, form: str) -> None:
    (check_on_one if tp == 1 else check_on_two)(place, tp, form)


def check(place: str, tp: int, form: str) -> None:
    from tests.features.quantized.models import adapted, batches

    plain, model = adapted(form).to(place), autopar.initialize(adapted(form), {"tp": tp})
    assert {parameter.device.type for parameter in model.parameters()} == {place}
    parts = [{key: value.to(place) for key, value in part.items()} for part in batches(2)]
    for part in parts:
        losses = [each(**part).loss for each in (plain, model)]
        close(losses[1].detach(), losses[0].detach(), "loss", 1e-3 if form == "int8" else 1e-4)
        losses[0].backward(), losses[1].backward()
    found, due = whole_of(model, gradients(model)), gradients(plain)
    assert set(found) == set(due)
    for name, gradient in due.items():
        close(found[name].cpu(), gradient.cpu(), name, 1e-2 if form == "int8" else 1e-4)
    if form != "int8":
        plain.eval(), model.eval()
        settings: dict[str, Any] = {"input_ids": parts[0]["input_ids"][1:], "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(**settings), plain.generate(**settings))
    model.mpu.destroy()


@sharing_a_gpu(world_size=1)
def check_on_one(place: str, tp: int, form: str) -> None:
    check(place, tp, form)


@sharing_a_gpu(world_size=2)
def check_on_two(place: str, tp: int, form: str) -> None:
    check(place, tp, form)
