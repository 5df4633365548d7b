"""What a stage holds: only its own parameters, and activations of as many micro-batches as its schedule promises."""

from __future__ import annotations

import weakref
from typing import Any

import torch

import autopar
from autopar.pipeline_parallel.pipeline import pipeline_of
from tests.parity import language_batches
from tests.pool import pooled
from tests.small import gpt2, llama


class _Saved:
    """A tensor that the backward pass will need."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # it may be the output of the node that keeps this


def _peak_of_a_step(schedule: str, microbatches: int) -> int:
    """The most elements that were saved for backward at one time."""
    config = {
        "model_parallelism": {"pipeline_parallel_size": 2},
        "pipeline": {"schedule": schedule, "microbatch_size": 1},
    }
    piped = autopar.initialize(gpt2(n_layer=4), config)
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
    most = 0

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal most
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        saved = _Saved(tensor)
        alive.add(saved)
        most = max(most, sum(each.tensor.numel() for each in alive))
        return saved

    def unpack(saved: Any) -> torch.Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        piped.execute_pipeline(language_batches(131, count=1, batch=microbatches)[0])
    assert not alive
    p2p = pipeline_of(piped).p2p
    assert not p2p._sent
    piped.mpu.destroy()
    return most


@pooled(world_size=2)
def test_activations_follow_the_schedule() -> None:
    single = _peak_of_a_step("gpipe", 1)
    for microbatches in (6,):
        assert abs(_peak_of_a_step("gpipe", microbatches) / single - microbatches) < 0.1
        here = torch.distributed.get_rank()
        assert abs(_peak_of_a_step("1f1b", microbatches) / single - (2 - here)) < 0.2
    # Both stages of a rank, each with one micro-batch. Of four or five forwards that wait, more are of the lighter one.
    both = _peak_of_a_step("zbv", 1)
    for schedule, most in (("zbv", 4), ("dualpipev", 5)):
        few, many = (_peak_of_a_step(schedule, microbatches) for microbatches in (4, 7))
        assert few == many
        assert 0.75 * most / 2 < many / both <= most / 2


@pooled(world_size=2)
def test_a_stage_holds_only_its_own_parameters() -> None:
    model = llama(num_hidden_layers=4)
    storages = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    total = sum(parameter.numel() for parameter in model.parameters())
    piped = autopar.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2}})
    held = sum(parameter.numel() for parameter in piped.parameters())
    assert 0.4 * total < held < 0.6 * total
    alive = sum(storage.nbytes() // 4 for ref in storages if (storage := ref()) is not None)
    assert alive <= held
    names = [name for name, _ in piped.named_parameters()]
    assert names == [n for n in piped.state_dict() if not n.endswith("inv_freq")]
    assert ("lm_head.weight" in names) == piped.mpu.is_pipeline_last_stage()
    piped.mpu.destroy()


@pooled(world_size=2)
def test_buffers_of_messages_go_while_the_step_runs() -> None:
    config = {"model_parallelism": {"pipeline_parallel_size": 2}, "pipeline": {"microbatch_size": 1}}
    piped = autopar.initialize(gpt2(), config)
    p2p = pipeline_of(piped).p2p
    most = []
    plain_send = p2p.send

    def send(*args: Any, **kwargs: Any) -> None:
        plain_send(*args, **kwargs)
        most.append(len({entry[3] for entry in p2p._sent}))

    p2p.send = send
    piped.execute_pipeline(language_batches(131, count=1, batch=12)[0])
    assert max(most) <= 3
    piped.mpu.destroy()
