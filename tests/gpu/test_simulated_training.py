"""Training steps on the simulated device: what they compute, and where the host waits for the device."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import autopar
from tests.compare import same_weights
from tests.gpu import simulated
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.gpu.host_waits import Wait, waits
from tests.gpu.test_shared_gpu import ON_TWO
from tests.harness.tiers import mainly
from tests.parity import close
from tests.small import llama
from tests.three_steps import mixtral, trained

pytestmark = needs_compiler

IDS = torch.randint(0, 131, (4, 9), generator=torch.Generator().manual_seed(3))
UNCHECKED: dict[str, Any] = {"consistency_check": {"enable": False}}
ZERO: dict[str, Any] = {"zero": {"stage": 1}, "gradient_clipping": 1.0}
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "dp": {"tensor_parallel_size": 1},
    "dp, in the backward": {},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
}

LABELS = "microbatch.py weights_of"  # a pipeline weighs the losses of micro-batches by their labels
SUMS = "digest.py sums_of_bits"  # whether an optimizer changes weights past their fp32 weights; of every tenth forward


def own(found: list[Wait]) -> list[str]:
    return [wait.function for wait in found if wait.own]


def started(optimizer_of: Callable[[Any], torch.optim.Optimizer], **config: Any) -> tuple[Any, Any, Any, Any]:
    """The plain model and the parallel one, each with its optimizer."""
    plain = llama().train()
    model = copy.deepcopy(plain)
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer_of(model.parameters()))
    return plain, optimizer_of(plain.parameters()), model, optimizer


def step(
    model: Any, optimizer: Any, ids: torch.Tensor, *, average: bool = True, early: bool = False
) -> torch.Tensor | None:
    """One step of a loop as users write it. Returns this replica's loss; None in a pipeline, on a stage without it."""
    mpu = model.mpu
    if mpu.pp.size > 1:
        loss = model.execute_pipeline({"input_ids": ids, "labels": ids}).loss
    else:
        loss = model(ids, labels=ids).loss
        with autopar.average_in_backward(model) if early else nullcontext():
            (optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss).backward()
    if average and not early and mpu.dp_cp.size > 1:
        autopar.average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return None if loss is None else loss.detach()


def plain_step(plain: Any, optimizer: torch.optim.Optimizer, clip: bool = True) -> torch.Tensor:
    loss = plain(IDS, labels=IDS).loss
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def share(model: Any) -> torch.Tensor:
    mpu = model.mpu
    return IDS.chunk(mpu.dp.size)[mpu.dp.rank].to(mpu.device)


@pytest.mark.parametrize("mesh", MESHES)
@on_device(world_size=2)
def test_three_steps_are_the_plain_models_and_wait_for_nothing(mesh: str) -> None:
    config = {"model_parallelism": MESHES[mesh], **ZERO, **UNCHECKED}
    plain, reference, model, optimizer = started(lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3), **config)
    ids = share(model)
    for _ in range(3):
        expected = plain_step(plain, reference)
        with waits() as found:
            loss = step(model, optimizer, ids, early="backward" in mesh)
        if loss is not None and not mesh.startswith("dp"):
            close(loss.cpu(), expected, "loss")
        assert [wait.place for wait in found if not wait.own] == []
        assert own(found) == ([LABELS] if mesh == "pp" else [])
    held = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert {value.device for value in (*model.parameters(), *held) if value.dim()} == {model.mpu.device}
    if mesh != "pp":
        same_weights(model, plain, when="after the steps")


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", mainly(*ON_TWO, later="sweep"))
@on_device(world_size=2)
def test_a_model_that_lies_on_the_device_and_differs_between_ranks(name: str) -> None:
    build, config = ON_TWO[name]
    # its kernels are those of the CPU, which counts no integers for the grouped matrix product
    trained(simulated.NAME, functools.partial(mixtral, "eager") if build is mixtral else build, config, moved=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@on_device(world_size=2)
def test_half_precision_learns_as_the_plain_model(dtype: str) -> None:
    config = {"model_parallelism": MESHES["tp"], "precision": {"dtype": dtype}, **ZERO, **UNCHECKED}
    plain, reference, model, optimizer = started(lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3), **config)
    ids = share(model)
    for number in range(3):
        expected = plain_step(plain, reference)
        with waits() as found:
            loss = step(model, optimizer, ids)
        assert loss is not None
        close(loss.float().cpu(), expected, "loss", {"bf16": 2**-8, "fp16": 2**-11}[dtype])
        assert [wait.place for wait in found if not wait.own] == []
        assert own(found) == ["optimizer.py _agree"] * (dtype == "fp16") + [SUMS] * 2 * (number == 0)
    held = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], model.mpu.device
    assert {(parameter.dtype, parameter.device) for parameter in model.parameters()} == {held}


@on_device(world_size=2)
def test_with_checks_only_every_tenth_forward_waits() -> None:
    model_parallelism = MESHES["tp"]
    *_, model, optimizer = started(lambda p: torch.optim.AdamW(p, lr=1e-2), model_parallelism=model_parallelism)
    ids = share(model)
    contents = [*["digest.py of_tensor"] * 2, SUMS]
    last_step = ["forward.py _digest_of"] * 2
    checked = {0: contents, 10: [*contents, *last_step]}
    for number in range(12):
        with waits() as found:
            step(model, optimizer, ids)
        expected = checked.get(number, [])
        waited = own(found)
        if number == 0:  # then the shards of all weights are compared, once
            assert set(waited[len(expected) :]) == {"forward.py first_elements", "digest.py of_tensor"}
            waited = waited[: len(expected)]
        assert waited == expected, f"step {number}: {[wait.place for wait in found]}"


@on_device(world_size=2)
def test_replicas_compare_their_first_steps_and_a_sample_later() -> None:
    config = {"model_parallelism": MESHES["dp"], **ZERO}
    *_, model, optimizer = started(lambda p: torch.optim.AdamW(p, lr=1e-2), **config)
    ids, waited = share(model), []
    for _ in range(10):
        with waits() as found:
            step(model, optimizer, ids)
        assert set(own(found)) <= {"digest.py of_tensor", "step.py digest_step", SUMS}
        waited.append(len(own(found)))
    assert waited[:3] == [1, 1, 1] and sum(waited[3:]) <= 2, waited


@on_device(world_size=2)
def test_decoding_waits_only_where_generate_of_transformers_does() -> None:
    for check in (UNCHECKED, {}):
        model = autopar.initialize(llama().eval(), {"model_parallelism": MESHES["tp"], **check})
        ids = share(model)
        settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        model.generate(ids, **settings)  # with checks its first forward is compared
        with waits() as found:
            model.generate(ids, **settings)
        assert found and own(found) == []
        model.mpu.destroy()
