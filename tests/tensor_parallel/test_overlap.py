"""The input gradient of a region is summed while a weight gradient is computed: the same gradients, in that order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.distributed.axis import Axis
from autopar.tensor_parallel import regions
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import check, language_batches
from tests.small import gpt2, llama, parallel

GLOO = {"tensor_parallel_size": 2, "cpu_transport": "gloo"}
IDS = torch.arange(16).view(2, 8)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in a backward pass: ``launch``, ``weight``, ``wait``."""
    seen: list[str] = []
    start, weight = regions.start_all_reduce, regions.LateWeight.backward

    def started(x: torch.Tensor, axis: Axis) -> Callable[[], None]:
        seen.append("launch")
        wait = start(x, axis)

        def waited() -> None:
            seen.append("wait")
            wait()

        return waited

    def computed(*args: Any) -> Any:
        seen.append("weight")
        return weight(*args)

    monkeypatch.setattr(regions, "start_all_reduce", started)
    monkeypatch.setattr(regions.LateWeight, "backward", staticmethod(computed))
    return seen


@pooled(world_size=2)
@pytest.mark.parametrize("build", [llama, gpt2])
def test_weight_gradients_are_computed_between_launch_and_wait(build: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = recorded(patch)
        model = parallel(build(), 2, model_parallelism=GLOO)
        model(input_ids=IDS, labels=IDS).loss.backward()
        plain = build()
        plain(input_ids=IDS, labels=IDS).loss.backward()
        same_gradients(model, plain)
        # two regions in each of 2 blocks, and the head
        assert seen == ["launch", "weight", "wait"] * 5


@pytest.mark.tier("test", only=("-llama", "checkpointing-llama"))
@pooled(world_size=2)
@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("extra", [{}, {"activation_checkpointing": {"enable": True}}], ids=["", "checkpointing"])
def test_equal_to_the_plain_model(build: Any, extra: dict[str, Any]) -> None:
    check(build, language_batches(131), 2, config={"model_parallelism": GLOO, **extra})


@pooled(world_size=2)
def test_what_autograd_is_asked_for() -> None:
    model, plain = parallel(llama(), 2, model_parallelism=GLOO), llama()
    loss, expected = (each(input_ids=IDS, labels=IDS).loss for each in (model, plain))
    for each in (loss, expected):
        each.backward(retain_graph=True)
        each.backward()
    same_gradients(model, plain, when="after two passes through a graph")

    for each in (model, plain):
        each.zero_grad()
        frozen = each.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
        each(input_ids=IDS, labels=IDS).loss.backward()
        assert frozen.grad is None
        frozen.grad = torch.zeros_like(frozen)
    same_gradients(model, plain, when="with a frozen layer")

    asked = model.model.layers[1].self_attn.q_proj.weight
    (found,) = torch.autograd.grad(model(input_ids=IDS, labels=IDS).loss, [asked])
    torch.testing.assert_close(found, asked.grad)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_layers_of_one_input_share_one_sum_and_a_changed_input_gets_its_own() -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = recorded(patch)
        model = parallel(llama(), 2, model_parallelism=GLOO)
        attention = model.model.layers[0].self_attn
        x = torch.randn(2, 3, 24, requires_grad=True)
        y = x * 1
        first = attention.q_proj(y)
        second = attention.k_proj(y)
        y.mul_(2)
        third = attention.v_proj(y)
        with pytest.raises(RuntimeError, match=r"modified.*inplace"):
            (first.sum() + second.sum() + third.sum()).backward()  # as plain layers would
        assert seen.count("launch") <= 2
        seen.clear()
        a, b = attention.q_proj(x), attention.k_proj(x)
        a.mul_(3)  # the layer's output may be changed in place
        (a.sum() + b.sum()).backward()
        assert seen == ["launch", "weight", "wait"]


@pooled(world_size=2)
def test_nothing_is_overlapped_where_it_could_not_be_right_or_would_not_pay() -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = recorded(patch)
        model = parallel(llama(), 2, model_parallelism=GLOO)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=IDS, labels=IDS).loss.backward()
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            model(input_ids=IDS, labels=IDS).loss.backward()
        patch.setattr(regions, "_LEAST", 1 << 16)
        model(input_ids=IDS, labels=IDS).loss.backward()
        model.requires_grad_(False)
        embeddings = torch.randn(2, 8, 24, requires_grad=True)
        model(inputs_embeds=embeddings, labels=IDS).loss.backward()
        assert not seen
        shared = parallel(llama(), 2, model_parallelism={"tensor_parallel_size": 2, "cpu_transport": "shm"})
        shared(input_ids=IDS, labels=IDS).loss.backward()
        assert not seen
