"""What a stage holds: only its own parameters, and activations of as many micro-batches as its schedule promises."""

import weakref
from typing import Any

import autopar
from autopar.pipeline_parallel.pipeline import pipeline_of
from tests.parity import language_batches
from tests.pool import pooled
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
