"""What a stage holds: only its own parameters, and activations of as many micro-batches as its schedule promises."""

import weakref
from typing import Any

import torch

import autopar
from autopar.pipeline_parallel.p2p import Message
from autopar.pipeline_parallel.pipeline import pipeline_of
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2, llama


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
    piped = autopar.initialize(gpt2(), {"pp": 2, "pipeline": {"microbatch_size": 1}})
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


@pooled(world_size=2)
def test_values_of_any_size_and_dtype_arrive_in_frames_of_the_last_size() -> None:
    piped = autopar.initialize(gpt2(), {"pp": 2})
    p2p = pipeline_of(piped).p2p
    torch.manual_seed(0)
    sizes = [(3,), (700, 1000), (5, 0), (2, 7), (1200, 1000), (), (700, 999)]  # the fifth is too large for a frame
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64)
    values = [[(torch.rand(size) * 9).to(dtype) for dtype in dtypes[: 1 + n % 5]] for n, size in enumerate(sizes)]
    values += [[torch.ones(1).expand(3)[:1], torch.rand(3, dtype=torch.complex64).conj()]]
    kind = Message("a value", 6)
    p2p.begin_actions()
    for value in values if piped.mpu.is_pipeline_first_stage() else []:
        p2p.send({"of": value}, 1, kind)
    for value in [] if piped.mpu.is_pipeline_first_stage() else values:
        found = p2p.receive(0, kind)["of"]
        assert [x.dtype for x in found] == [x.dtype for x in value]
        assert all(map(torch.equal, found, value))
    p2p.end_actions()
    piped.mpu.destroy()
