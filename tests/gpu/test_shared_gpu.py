"""Ranks that share one GPU over nccl: three training steps on every kind of mesh are the plain model's."""

import copy
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.config.sections import SCHEDULES
from tests.gpu.device_ranks import on_each, sharing_a_gpu
from tests.parity import close
from tests.small import gpt2, llama
from tests.three_steps import IDS, TOLERANCE, Case, case, mixtral, trained

ZERO_1: dict[str, Any] = {"zero": {"stage": 1}, "gradient_clipping": 1.0}


def staged(zero: int = 0, **pipeline: Any) -> Case:
    config = {"pipeline": {"microbatch_size": 1, **pipeline}, "zero": {"stage": zero}}
    return case(lambda: llama(num_hidden_layers=4), config, pipeline_parallel_size=2)


ON_TWO: dict[str, Case] = {
    "tp": case(tensor_parallel_size=2),
    "tp of GPT-2": case(gpt2, tensor_parallel_size=2),
    "sequence": case(tensor_parallel_size=2, sequence_parallel=True),
    "dp, zero 1": case(extra=ZERO_1),
    "dp, zero 2": case(extra={"zero": {"stage": 2}, "gradient_clipping": 1.0}),
    "dp, zero 3": case(extra={"zero": {"stage": 3}}),
    "dp, optimizer on the host": case(extra={"zero": {"stage": 1, "optimizer_offload": True}}),
    "cp": case(context_parallel_size=2),
    "recomputed": case(extra={"activation_checkpointing": {"enable": True}}, tensor_parallel_size=2),
    "experts of replicas": case(mixtral, expert_parallel_size=2),
    **{schedule: staged(schedule=schedule) for schedule in SCHEDULES},
}
ON_FOUR: dict[str, Case] = {
    "tp x dp, zero 1": case(extra=ZERO_1, tensor_parallel_size=2),
    **{f"pp x dp, zero {stage}": staged(stage) for stage in (2, 3)},
    "dp in two parts, zero 3": case(extra={"zero": {"stage": 3, "shard_size": 2}}),
    "tp x pp": case(tensor_parallel_size=2, pipeline_parallel_size=2),
    "tp x cp": case(tensor_parallel_size=2, context_parallel_size=2),
    "tp x cp, gathered": case(tensor_parallel_size=2, context_parallel_size=2, context_parallel_method="gather"),
    "tp x ep": case(mixtral, tensor_parallel_size=2, expert_parallel_size=4),
}


COMPILED = case(extra={"compile": {"enable": True}}, tensor_parallel_size=2)


def all_of(place: str, cases: dict[str, Case]) -> None:
    """Run all, then fail with every case that did."""
    failed = []
    for number, (name, (build, config)) in enumerate(cases.items()):
        try:
            trained(place, build, config, moved=number % 2 == 0)
        except Exception:
            failed.append(f"{name}: {traceback.format_exc()[-1500:]}")
    assert not failed, "\n".join(failed)


@pytest.mark.tier("all")
@on_each
@sharing_a_gpu(world_size=2)
def test_three_steps_on_two_ranks(place: str) -> None:
    all_of(place, ON_TWO | ({"compiled": COMPILED} if place == "cuda" else {}))


@pytest.mark.tier("sweep")
@on_each
@sharing_a_gpu(world_size=4)
def test_three_steps_on_four_ranks(place: str) -> None:
    all_of(place, ON_FOUR)


@on_each
@sharing_a_gpu(world_size=2)
def test_a_run_goes_on_from_a_checkpoint_on_another_mesh(place: str, tmp_path: Any) -> None:
    def started(model: Any, **config: Any) -> tuple[Any, Any]:
        return autopar.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))

    model, optimizer = started(llama().train(), tp=2)
    other, other_optimizer = started(llama(seed=1).train(), pp=2)
    ids, losses = IDS.to(place), []
    for step in range(3):
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step(), optimizer.zero_grad()
        if step == 1:
            model.save_parallelized(tmp_path, timeout=60, optimizer=optimizer)
            other.from_parallelized(tmp_path, timeout=60, optimizer=other_optimizer)
    loss = other.execute_pipeline({"input_ids": ids, "labels": ids}).loss
    if loss is not None:
        close(loss.detach(), losses[2].detach(), "loss after two steps", TOLERANCE)
    other_optimizer.step()
    weights = {name: value.cpu() for name, value in autopar.deparallelize(other).state_dict().items()}
    for name, value in autopar.deparallelize(model).state_dict().items():
        close(value.cpu(), weights[name], name, TOLERANCE)


@on_each
@sharing_a_gpu(world_size=2)
def test_a_checkpoint_is_loaded_into_shards_and_stages(place: str, tmp_path: Any) -> None:
    from transformers import LlamaForCausalLM

    plain = llama().eval()
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path)
    dist.barrier()
    for config in ({"tp": 2}, {"pp": 2}):
        model = autopar.from_pretrained(LlamaForCausalLM, tmp_path, config).eval()
        settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(IDS.to(place), **settings).cpu(), plain.generate(IDS, **settings))
        model.mpu.destroy()


@on_each
@sharing_a_gpu(world_size=2)
def test_distributed_data_parallel_around_the_model(place: str) -> None:
    plain = llama().train()
    model = autopar.initialize(copy.deepcopy(plain), {}).train()
    devices = [model.mpu.device] if place == "cuda" else None
    group = model.mpu.get_data_parallel_group()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, devices, process_group=group)
    ids = IDS.to(place)
    wrapped(input_ids=ids.chunk(2)[dist.get_rank()], labels=ids.chunk(2)[dist.get_rank()]).loss.backward()
    plain.to(place)(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in plain.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad, name, TOLERANCE)
