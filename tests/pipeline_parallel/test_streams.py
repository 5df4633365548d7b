"""Random numbers of the stages: the default generators are equal on all of them, whatever was done in between."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.distributed.rng import base_seed
from autopar.features.megatron.schedules import get_forward_backward_func
from autopar.pipeline_parallel.stage_forward import Streams
from autopar.tools.verification.session import switching
from tests.compare import same_gradients
from tests.exchange import everyones, same_random_states
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2
from tests.timeouts import told_at_once


def _piped(tp: int = 1, seed: int = 1, **config: Any) -> Any:
    model = gpt2(n_layer=4, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3).train()
    torch.manual_seed(seed)  # what makes the model seeds, too
    return autopar.initialize(model, {"tp": tp, "pp": 2, **config})


@pooled(world_size=4)
def test_initialize_shares_the_generators_of_a_replica_and_replicas_keep_their_own() -> None:
    _piped(tp=2, seed=dist.get_rank())
    same_random_states()
    _piped(seed=dist.get_rank())
    states = everyones(torch.get_rng_state())
    for ranks in ([0, 2], [1, 3]):
        assert torch.equal(states[ranks[0]], states[ranks[1]])
    assert not torch.equal(states[0], states[1])


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_a_model_that_draws_nothing_trains_beside_a_rank_that_draws() -> None:
    """A stage switches streams in its forward, which is no draw: the generators of its ranks may differ."""
    plain, piped = gpt2(n_layer=4).train(), gpt2(n_layer=4).train()
    piped = autopar.initialize(piped, {"tp": 2, "pp": 2, "pipeline": {"microbatch_size": 2}})
    for batch in language_batches(131, count=2, batch=4):
        if dist.get_rank() == 1:
            torch.rand(3)
        loss = plain(**batch).loss
        loss.backward()
        close(piped.execute_pipeline(batch, broadcast_loss=True).loss, loss, "loss")
    same_gradients(piped, plain)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
@pooled(world_size=2)
def test_training_mode_keeps_the_stages_alike(schedule: str) -> None:
    piped = _piped(pipeline={"schedule": schedule})
    (batch,) = language_batches(131, count=1, batch=4)
    before = torch.get_rng_state()
    for step in range(2):  # the first one of a mode compares batches, too
        piped.execute_pipeline(batch)
        same_random_states()
        piped.execute_pipeline(batch, forward_only=True)
        same_random_states()
        with torch.no_grad():
            piped(**batch)
            same_random_states()
            piped.transformer(input_ids=batch["input_ids"])  # the head's stage draws nothing
            same_random_states()
        assert not torch.equal(before, torch.get_rng_state()), step


@pytest.mark.tier("test")
@pooled(world_size=2)
@told_at_once
def test_a_plain_call_in_training_mode_drops_other_elements_each_time() -> None:
    piped = _piped(pipeline={"timeout": 6})
    (batch,) = language_batches(131, count=1)
    with torch.no_grad():
        assert not torch.equal(piped(**batch).logits, piped(**batch).logits)
        torch.manual_seed(3)
        first = piped(**batch).logits
        torch.manual_seed(3)
        assert torch.equal(first, piped(**batch).logits)
    before = torch.get_rng_state()

    def fail(*_: Any) -> torch.Tensor:
        raise ValueError("something broke")

    with pytest.raises(Exception, match="something broke"):
        piped.execute_pipeline(batch, criterion=fail)
    piped.eval()
    with torch.no_grad():
        assert torch.equal(piped(**batch).logits, piped(**batch).logits)
    assert torch.equal(before, torch.get_rng_state())  # neither a step that fails draws, nor an evaluation


@pooled(world_size=2)
def test_a_shuffling_loader_of_the_megatron_loop_gives_all_stages_the_same() -> None:
    piped = _piped()
    rows = language_batches(131, count=1, batch=16)[0]["input_ids"]
    seen = []

    def forward_step(data_iterator: Any, model: Any) -> Any:
        (ids,) = next(data_iterator)
        seen.append(ids)
        return model(input_ids=ids, labels=ids), lambda outputs: (outputs.loss, None)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2, shuffle=True)
    for _ in range(2):
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(loader), model=piped, num_microbatches=8
        )
    assert torch.equal(*everyones(torch.cat(seen)))
    same_random_states()


def test_streams_of_a_pass() -> None:
    torch.manual_seed(0)
    drawn = []
    with base_seed() as seed:
        for number in (0, 1, 0):
            streams = Streams(seed, 3, number)
            with streams.front():
                drawn.append(torch.rand(4))
                for switch in (lambda: streams.stage(1), lambda: streams.stage(2), streams.decoder):  # noqa: B023
                    switch()
                    drawn.append(torch.rand(4))
        outside = torch.rand(4)
    assert len({tuple(x.tolist()) for x in drawn}) == 8 and torch.equal(torch.cat(drawn[:4]), torch.cat(drawn[8:]))
    torch.manual_seed(0)
    with base_seed():
        assert torch.equal(outside, torch.rand(4))
    before = torch.get_rng_state()
    with base_seed(needed=False) as seed, Streams(seed, 2).front():
        Streams(seed, 2).stage(1)
        assert seed is None
    assert torch.equal(before, torch.get_rng_state())


def _jittered(model: Any) -> Any:
    """A GPT-2 that draws a number in front of its blocks, and reads it in all of them and behind."""
    drawn: dict[str, torch.Tensor] = {}
    model.transformer.wte.register_forward_pre_hook(lambda *_: drawn.update(noise=torch.rand(())))
    for module in (*model.transformer.h, model.lm_head):
        module.register_forward_pre_hook(lambda _, args: (args[0] * (0.5 + drawn["noise"]), *args[1:]))
    return model


@pytest.mark.parametrize("backward", [True, False])
@pooled(world_size=2)
def test_what_is_drawn_in_front_of_the_blocks_is_the_same_on_all_stages(backward: bool) -> None:
    rates = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    plain = _jittered(gpt2(n_layer=4, **rates).train())
    section = {"model_parallelism": {"pipeline_parallel_size": 2}, "pipeline": {"num_microbatches": 2}}
    piped = _jittered(autopar.initialize(gpt2(n_layer=4, **rates).train(), section))
    (batch,) = language_batches(131, count=1, batch=4)
    torch.manual_seed(5 + dist.get_rank())  # each rank for itself: the first stage's seed counts
    seeds = everyones(base_seed().__enter__())
    torch.manual_seed(5 + dist.get_rank())
    out = piped.execute_pipeline(batch, forward_only=not backward, return_outputs=True)
    logits = []
    for number in range(2):
        streams = Streams(seeds[0], 2, number)
        rows = {name: value[2 * number : 2 * number + 2] for name, value in batch.items()}
        with switching(plain, piped._autopar.stages, streams):
            logits.append(plain(**rows).logits)
    if dist.get_rank() == 1:
        close(out.outputs.logits, torch.cat(logits), "logits")
        assert not torch.allclose(logits[0], plain(**{n: v[:2] for n, v in batch.items()}).logits)
