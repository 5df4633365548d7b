"""Training in stages equals the plain model: losses, gradients, weights; and what surrounds a step."""

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
from tests.pipeline_parallel.deep import NAMES, deep
from tests.pipeline_parallel.oracle import check_pipeline
from tests.random_models import Case, batches, build
from tests.small import gpt2, llama


def _config(pp: int = 2, tp: int = 1, **pipeline: Any) -> dict[str, Any]:
    return {"pp": pp, "tp": tp, "pipeline": pipeline}


def _full(count: int, batch: int) -> list[dict[str, Any]]:
    made = language_batches(131, count=count, batch=batch)
    return [{**each, "labels": each["input_ids"].clone()} for each in made]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
@pooled(world_size=8)
def test_three_axes(name: str) -> None:
    check_pipeline(lambda: deep(name, 2), _full(2, 4), tp=2, pp=2)


@pooled(world_size=1)
def test_one_stage_accumulates_over_micro_batches() -> None:
    for settings in ({}, {"microbatch_size": 2}, {"num_microbatches": 3}):
        piped = check_pipeline(gpt2, language_batches(131, batch=5), pp=1, pipeline=settings)
        out = piped.execute_pipeline(language_batches(131, count=1, batch=3)[0], return_outputs=True)
        assert out.loss is not None
        assert out.outputs.logits.shape[:2] == (3, 7)
        with pytest.raises(ConfigError, match="must contain a loss"):
            piped.execute_pipeline({"input_ids": torch.zeros(2, 3, dtype=torch.long)})


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


@pytest.mark.tier("test", only=("1f1b-gpt2",))
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zbv", "dualpipev"])
@pooled(world_size=2)
def test_activation_checkpointing(name: str, schedule: str) -> None:
    settings = {"activation_checkpointing": {}, "pipeline": {"schedule": schedule}}
    (batch,) = batches_of_five = language_batches(131, count=1, batch=5)
    piped = check_pipeline(lambda: deep(name, 4), batches_of_five * 2, **settings)
    forwards = []
    for block in piped.transformer.h if name == "gpt2" else ():
        block.mlp.register_forward_pre_hook(lambda module, *_: forwards.append(module))
    piped.execute_pipeline(batch)  # activations are recomputed once
    assert name != "gpt2" or sorted(forwards.count(module) for module in set(forwards)) == [10, 10]


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_dropout_recomputes_its_masks_with_tensor_parallelism() -> None:
    gradients = []
    for recompute in (False, True):
        model = gpt2(n_layer=2, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
        config = {**_config(tp=2), "activation_checkpointing": {"enable": recompute}}
        piped = autopar.initialize(model, config)
        torch.manual_seed(1)
        for batch in _full(2, 3):  # gradients accumulate
            piped.execute_pipeline(batch)
        gradients.append([parameter.grad for parameter in piped.parameters()])
        same_random_states()  # afterwards all stages draw the same again
    for first, second in zip(*gradients, strict=True):
        close(second, first, "gradient with recomputed activations", 1e-6)
    undropped = autopar.initialize(gpt2(n_layer=2), _config(tp=2))
    for batch in _full(2, 3):
        undropped.execute_pipeline(batch)
    pairs = zip(gradients[1], undropped.parameters(), strict=True)
    assert any((gradient - parameter.grad).abs().max() > 1e-3 for gradient, parameter in pairs)  # it did drop


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_gradients_of_several_calls_accumulate() -> None:
    plain = gpt2(n_layer=4)
    piped = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3) for model in (plain, piped)]
    piped, _ = autopar.initialize(piped, _config(microbatch_size=1), optimizer=optimizers[1])
    for number, batch in enumerate(_full(6, 4)):
        plain(**batch).loss.backward()
        with nullcontext() if number % 3 == 2 or number < 3 else piped.no_sync():
            piped.execute_pipeline(batch, optimizer=optimizers[1])
        if number % 3 == 2:
            same_gradients(piped, plain, when=f"after {number + 1} calls")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    same_weights(piped, plain)


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
    autopar.initialize(back, _config(pp=2))


@pooled(world_size=2)
def test_a_changed_sequence_length_and_batch() -> None:
    plain = gpt2()
    piped = autopar.initialize(copy.deepcopy(plain), _config())
    for batch, seq in ((2, 7), (3, 4), (1, 12), (2, 7)):
        (inputs,) = language_batches(131, count=1, batch=batch, seq=seq)
        close(piped.execute_pipeline(inputs, broadcast_loss=True).loss, plain(**inputs).loss.detach(), "loss")


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

    check_pipeline(Wrapped, language_batches(131, batch=2))


@pooled(world_size=2)
def test_configs_that_do_not_fit() -> None:
    two_chunks = "chunks=3 does not fit schedule {}, which has 2 stages on each"
    too_few = "num_microbatches=3 is less than twice pipeline_parallel_size=2, which schedule dualpipev needs"
    for layers, pipeline, *said in (
        (
            2,
            {"microbatch_size": 1, "num_microbatches": 2},
            "microbatch_size=1 and pipeline.num_microbatches=2 are",
        ),
        (2, {"num_microbatches": 1}, "num_microbatches=1 is less than pipeline_parallel_size=2"),
        (1, {}, "pipeline_parallel_size=2 does not fit GPT2LMHeadModel", "1 blocks"),
        (2, {"schedule": "1f2b"}, "pipeline.schedule must be 1f1b, gpipe,", "or dualpipev, not 1f2b"),
        (2, {"chunks": 2}, "chunks=2 does not fit schedule 1f1b"),
        *((2, {"schedule": name, "chunks": 3}, two_chunks.format(name)) for name in ("zbv", "dualpipev")),
        (2, {"schedule": "dualpipev", "num_microbatches": 3}, too_few, "use at least 4, or schedule zbv"),
    ):
        with raises_everywhere(ConfigError, *said):
            autopar.initialize(gpt2(n_layer=layers), _config(**pipeline))


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]


@pytest.mark.tier(
    "test", only=("gpt2-gpipe", "llama-1f1b", "gpt2-interleaved", "llama-zero-bubble", "gpt2-zbv", "llama-dualpipev")
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [gpt2, llama])
@pooled(world_size=2)
def test_every_schedule(make: Any, schedule: str) -> None:
    """Five micro-batches, then three (fewer than dualpipev needs); the last one is smaller."""
    check_pipeline(
        lambda: make(**{"n_layer" if make is gpt2 else "num_hidden_layers": 5}),
        [*language_batches(131, count=1, batch=9), *language_batches(131, count=1, batch=5)],
        pipeline={"schedule": schedule, "microbatch_size": 2},
    )


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5"])
@pooled(world_size=3)
def test_three_ranks_in_a_v(name: str, schedule: str) -> None:
    _in_a_v(name, 3, schedule, microbatches=(7, 2))


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pooled(world_size=4)
def test_four_ranks_in_a_v(name: str) -> None:
    _in_a_v(name, 4, "dualpipev", microbatches=(8, 11))


def _in_a_v(name: str, pp: int, schedule: str, microbatches: tuple[int, ...]) -> None:
    """The last micro-batch of each batch is smaller, and one has no label."""
    made = []
    for count in microbatches:
        (batch,) = language_batches(131, count=1, batch=2 * count - 1)
        batch["labels"][2:4] = -100
        made.append(batch)
    settings = {"schedule": schedule, "microbatch_size": 2}
    check_pipeline(lambda: deep(name, 2 * pp), made, pp=pp, pipeline=settings)


@pytest.mark.tier(
    "test", only=("bert-BertForSequenceClassification", "t5-T5ForConditionalGeneration", "mixtral-MixtralForCausalLM")
)
@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("bert", "BertForSequenceClassification"),
        ("bert", "BertForMaskedLM"),
        ("mixtral", "MixtralForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration"),
        ("gpt2", "GPT2ForSequenceClassification"),
    ],
)
@pooled(world_size=2)
def test_families(model_type: str, head: str) -> None:
    case = Case(model_type, head)
    model = build(case, 6, 3)
    check_pipeline(lambda: model, batches(case, model.config))


@pytest.mark.tier("test", only=("2-2-gpt2", "1-4-gpt2", "2-2-bert"))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 4), pytest.param(1, 2, marks=pytest.mark.tier("sweep"))])
@pooled(world_size=4)
def test_meshes(name: str, tp: int, pp: int) -> None:
    batches_ = language_batches(131, count=2, batch=4)
    for batch in batches_:
        batch["labels"] = batch["input_ids"].clone()  # replicas whose labels count alike: the mean of means is the mean
    check_pipeline(lambda: deep(name, 4), batches_, tp=tp, pp=pp)
