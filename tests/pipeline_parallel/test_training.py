"""Longer runs, other meshes, and what surrounds a step: ragged batches, ties, recomputation, taking back."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from tests.compare import same_gradients, same_weights
from tests.exchange import raises_everywhere, same_random_states
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.pipeline_parallel.deep import deep
from tests.pipeline_parallel.oracle import check_pipeline
from tests.small import gpt2


def _config(pp: int = 2, tp: int = 1, **pipeline: Any) -> dict[str, Any]:
    return {"pp": pp, "tp": tp, "pipeline": pipeline}


def _full(count: int, batch: int) -> list[dict[str, Any]]:
    made = language_batches(131, count=count, batch=batch)
    return [{**each, "labels": each["input_ids"].clone()} for each in made]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
@pooled(world_size=8)
def test_three_axes(name: str) -> None:
    check_pipeline(lambda: deep(name, 2), _full(2, 4), tp=2, pp=2).mpu.destroy()


@pytest.mark.tier("test", only=("zbv",))
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
@pooled(world_size=2)
def test_twenty_steps(schedule: str) -> None:
    """Losses stay equal, and tied weights stay bitwise equal on both ends."""
    plain = gpt2(n_layer=4)
    piped = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3) for model in (plain, piped)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, total_iters=10) for o in optimizers]
    piped = autopar.initialize(piped, _config(schedule=schedule, microbatch_size=1))
    batches = iter(language_batches(131, count=20, batch=5))
    for batch in language_batches(131, count=20, batch=5):
        loss = plain(**batch).loss
        loss.backward()
        out = piped.execute_pipeline(batches, optimizer=optimizers[1], broadcast_loss=True)
        close(out.loss, loss.detach(), "loss")
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    same_weights(piped, plain)  # asserts that stages hold the same bits
    piped.mpu.destroy()


@pytest.mark.tier("test", only=("gpt2-1f1b",))
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pooled(world_size=2)
def test_ragged_batches_and_micro_batches_without_labels(name: str, schedule: str) -> None:
    """The whole batch's mean over labels, though micro-batches have between none and all of them."""
    (batch,) = language_batches(131, count=1, batch=5)
    batch["labels"][1, 1:] = -100
    batch["labels"][3] = -100
    for size in (1, 2, 5):
        settings = {"microbatch_size": size, "schedule": schedule}
        check_pipeline(lambda: deep(name, 4), [batch, batch], pipeline=settings).mpu.destroy()


@pooled(world_size=1)
def test_one_stage_accumulates_over_micro_batches() -> None:
    for settings in ({}, {"microbatch_size": 2}, {"num_microbatches": 3}):
        piped = check_pipeline(gpt2, language_batches(131, batch=5), pp=1, pipeline=settings)
        out = piped.execute_pipeline(language_batches(131, count=1, batch=3)[0], return_outputs=True)
        assert out.loss is not None
        assert out.outputs.logits.shape[:2] == (3, 7)
        with pytest.raises(ConfigError, match="must contain a loss"):
            piped.execute_pipeline({"input_ids": torch.zeros(2, 3, dtype=torch.long)})
        piped.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_criterion_scaled_loss_and_results() -> None:
    class Optimizer:
        def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * 8

    (batch,) = language_batches(131, count=1, batch=2)
    plain = gpt2()
    plain(**batch).loss.mul(24).backward()
    piped = autopar.initialize(copy.deepcopy(plain), _config(num_microbatches=2))
    out = piped.execute_pipeline(batch, lambda outputs, inputs: outputs.loss * 3, Optimizer())
    last = piped.mpu.is_pipeline_last_stage()
    assert (out.loss is not None) == last
    assert out.outputs is None
    if last:
        close(out.loss, 3 * plain(**batch).loss.detach(), "the loss is not scaled")
    same_gradients(piped, plain, 1e-4)
    assert piped.execute_pipeline(batch, return_loss=False).loss is None
    assert piped.execute_pipeline(batch, forward_only=True, broadcast_loss=True).loss is not None
    with torch.no_grad():
        piped.execute_pipeline(batch)
    del batch["labels"]
    assert piped.execute_pipeline(batch, forward_only=True).loss is None
    piped.mpu.destroy()


@pytest.mark.tier("test", only=("1f1b-gpt2",))
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "dualpipev"])
@pooled(world_size=2)
def test_activation_checkpointing(name: str, schedule: str) -> None:
    settings = {"activation_checkpointing": {}, "pipeline": {"schedule": schedule}}
    check_pipeline(lambda: deep(name, 4), language_batches(131, batch=5), **settings).mpu.destroy()


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zbv", "dualpipev"])
@pooled(world_size=2)
def test_activations_are_recomputed_once(schedule: str) -> None:
    piped = autopar.initialize(deep("gpt2", 4), {**_config(schedule=schedule), "activation_checkpointing": {}})
    forwards = []
    for block in piped.transformer.h:
        block.mlp.register_forward_pre_hook(lambda module, *_: forwards.append(module))
    (batch,) = language_batches(131, count=1, batch=5)
    piped.execute_pipeline(batch)
    assert sorted(forwards.count(module) for module in set(forwards)) == [10, 10]
    piped.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_dropout_recomputes_its_masks_with_tensor_parallelism() -> None:
    _recompute_with_dropout(tp=2)


def _recompute_with_dropout(tp: int) -> None:
    gradients = []
    for recompute in (False, True):
        model = gpt2(n_layer=2, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
        config = {**_config(tp=tp), "activation_checkpointing": {"enable": recompute}}
        piped = autopar.initialize(model, config)
        torch.manual_seed(1)
        for batch in _full(2, 3):  # gradients accumulate
            piped.execute_pipeline(batch)
        gradients.append([parameter.grad for parameter in piped.parameters()])
        same_random_states()  # afterwards all stages draw the same again
        piped.mpu.destroy()
    for first, second in zip(*gradients, strict=True):
        close(second, first, "gradient with recomputed activations", 1e-6)
    undropped = autopar.initialize(gpt2(n_layer=2), _config(tp=tp))
    for batch in _full(2, 3):
        undropped.execute_pipeline(batch)
    pairs = zip(gradients[1], undropped.parameters(), strict=True)
    assert any((gradient - parameter.grad).abs().max() > 1e-3 for gradient, parameter in pairs)  # it did drop
    undropped.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_gradients_of_several_calls_accumulate() -> None:
    _accumulate(tp=1)


def _accumulate(tp: int) -> None:
    """Three calls make one step, twice: gradients, also of the tied embedding, and weights equal the plain model's."""
    plain = gpt2(n_layer=4)
    piped = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3) for model in (plain, piped)]
    piped, _ = autopar.initialize(piped, _config(tp=tp, microbatch_size=1), optimizer=optimizers[1])
    dp = piped.mpu.dp
    batches = _full(6, 4)
    for number, batch in enumerate(batches):
        plain(**batch).loss.backward()
        mine = {name: tensor.chunk(dp.size)[dp.rank] for name, tensor in batch.items()}
        with nullcontext() if number % 3 == 2 or number < 3 else piped.no_sync():
            piped.execute_pipeline(mine, optimizer=optimizers[1])
        if number % 3 == 2:
            same_gradients(piped, plain, when=f"after {number + 1} calls")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    same_weights(piped, plain)
    piped.mpu.destroy()


@pooled(world_size=2)
def test_what_is_collected_from_all_layers_is_refused() -> None:
    (batch,) = _full(1, 2)
    model = gpt2()
    model.config.output_hidden_states = True
    with raises_everywhere(ConfigError, "stages: it collects from every layer of GPT2LMHeadModel"):
        autopar.initialize(model, _config())
    for name in ("output_hidden_states", "output_attentions"):
        piped = autopar.initialize(gpt2(), _config())
        with raises_everywhere(ConfigError, f"{name}=True is not supported with"):
            piped.execute_pipeline({**batch, name: True})
        piped.mpu.destroy()


@pytest.mark.tier("test", only=("gpt2",))
@pytest.mark.parametrize("name", ["gpt2", "bart", "llama"])
@pooled(world_size=4)
def test_deparallelize_gives_the_plain_model_back(name: str) -> None:
    plain = deep(name, 2)
    piped = copy.deepcopy(plain)
    names = [key for key, _ in piped.named_parameters()]
    identities = [id(parameter) for parameter in piped.parameters()]
    (batch,) = _full(1, 2)
    plain(**batch).loss.backward()
    piped = autopar.initialize(piped, _config(tp=2, microbatch_size=2))
    assert sum(p.numel() for p in piped.parameters()) < 0.6 * sum(p.numel() for p in plain.parameters())
    piped.execute_pipeline(batch)
    back = autopar.deparallelize(piped)
    assert [key for key, _ in back.named_parameters()] == names
    assert [id(parameter) for parameter in back.parameters()] == identities
    for (key, parameter), expected in zip(back.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, expected), key
        close(parameter.grad, expected.grad, key)
    assert type(back) is type(plain)
    assert {type(m) for m in back.modules()} == {type(m) for m in plain.modules()}
    assert not hasattr(back, "execute_pipeline")
    assert torch.equal(back.eval()(**batch).logits, plain.eval()(**batch).logits)
    autopar.initialize(back, _config(pp=2)).mpu.destroy()


@pooled(world_size=2)
def test_a_changed_sequence_length_and_batch() -> None:
    plain = gpt2()
    piped = autopar.initialize(copy.deepcopy(plain), _config())
    for batch, seq in ((2, 7), (3, 4), (1, 12), (2, 7)):
        (inputs,) = language_batches(131, count=1, batch=batch, seq=seq)
        close(piped.execute_pipeline(inputs, broadcast_loss=True).loss, plain(**inputs).loss.detach(), "loss")
    piped.mpu.destroy()


@pooled(world_size=2)
def test_a_model_inside_the_users_own() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, **inputs: Any) -> Any:
            outputs = self.model(**inputs)
            outputs["loss"] = outputs.loss * self.scale
            return outputs

    check_pipeline(Wrapped, language_batches(131, batch=2)).mpu.destroy()


@pooled(world_size=2)
def test_configs_that_do_not_fit() -> None:
    with raises_everywhere(ConfigError, "microbatch_size=1 and pipeline.num_microbatches=2 are both given"):
        autopar.initialize(gpt2(), _config(microbatch_size=1, num_microbatches=2))
    with raises_everywhere(ConfigError, "num_microbatches=1 is less than pipeline_parallel_size=2"):
        autopar.initialize(gpt2(), _config(num_microbatches=1))
    with raises_everywhere(ConfigError, "pipeline_parallel_size=2 does not fit GPT2LMHeadModel", "1 blocks"):
        autopar.initialize(gpt2(n_layer=1), _config())
    with raises_everywhere(ConfigError, "pipeline.schedule must be 1f1b, gpipe,", "or dualpipev, not 1f2b"):
        autopar.initialize(gpt2(), _config(schedule="1f2b"))
    with raises_everywhere(ConfigError, "chunks=2 does not fit schedule 1f1b"):
        autopar.initialize(gpt2(), _config(chunks=2))
    for schedule in ("zbv", "dualpipev"):
        with raises_everywhere(ConfigError, f"chunks=3 does not fit schedule {schedule}, which has 2 stages on each"):
            autopar.initialize(gpt2(), _config(schedule=schedule, chunks=3))
    too_few = "num_microbatches=3 is less than twice pipeline_parallel_size=2, which schedule dualpipev needs"
    with raises_everywhere(ConfigError, too_few, "use at least 4, or schedule zbv"):
        autopar.initialize(gpt2(), _config(schedule="dualpipev", num_microbatches=3))
