"""What the planner counts on the meta device against what waits for backwards in real steps: equal, on every rank."""

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AlbertForMaskedLM, BertForMaskedLM

import autopar
from autopar.pipeline_parallel.engine import Engine
from autopar.tools.planner.candidate import Rows
from autopar.tools.planner.planned_model import PlannedModel
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled
from tests.pipeline_parallel.deep import deep
from tests.planner.saved_bytes import SavedBytes, mixtral
from tests.random_models import small
from tests.small import gpt2, llama

BATCH, SEQUENCE = 4, 15
_deep_gpt2, _deep_llama = functools.partial(gpt2, n_layer=4), functools.partial(llama, num_hidden_layers=4)
_few_keys = functools.partial(llama, num_hidden_layers=4, num_key_value_heads=1)


_bert = functools.partial(small, "bert", "BertForMaskedLM")
_albert = functools.partial(small, "albert", "AlbertForMaskedLM")  # one block stands for all layers
_bart = functools.partial(small, "bart", "BartForConditionalGeneration")
_phi3 = functools.partial(small, "phi3", "Phi3ForCausalLM")  # fused q|k|v, of which attention keeps a view


def _t5(layers: int = 2) -> Any:
    """Eager: torch's fused attention on the CPU takes no mask that has a gradient, as a learned bias has."""
    model = deep("t5", layers)
    model.set_attn_implementation("eager")
    return model


def _inputs(model: Any, batch: int) -> dict[str, Any]:
    ids = torch.randint(2, 131, (batch, SEQUENCE), generator=torch.Generator().manual_seed(1))
    found = {"input_ids": ids, "labels": ids.clone()}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = ids.clone()
    return found if isinstance(model, (BertForMaskedLM, AlbertForMaskedLM)) else {**found, "use_cache": False}


def _kept_is_as_planned(build: Any, batch: int = BATCH, schedule: str = "1f1b", **sections: Any) -> None:
    config = {"pipeline": {"microbatch_size": 1, "schedule": schedule}, **sections}
    world = torch.distributed.get_world_size()
    plan = autopar.plan_memory(build(), config, sequence=SEQUENCE, batch=batch, gpus=world, device="cpu")
    model = build().train()
    model, optimizer = autopar.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters()))
    mpu = model.mpu
    saved = SavedBytes(model)
    with saved:
        model.execute_pipeline(_inputs(model, batch), optimizer=optimizer)
    assert plan.kept[mpu.pp.rank, mpu.dp_cp.rank, mpu.tp.rank] == saved.most > 0, (build, config)
    mpu.destroy()


RECOMPUTED = {"activation_checkpointing": {"enable": True}}
MODELS = [gpt2, llama, _bert, _albert, _bart, _t5, mixtral, _phi3]
TP: dict[str, Any] = {"tp": 2}
CP: dict[str, Any] = {"cp": 2}
PP: dict[str, Any] = {"pp": 2}
ROWS: dict[str, Any] = {"model_parallelism": {"sequence_parallel": True}}


@pytest.mark.parametrize("build", MODELS)
def test_in_one_process(build: Any) -> None:
    plan = autopar.plan_memory(build(), sequence=SEQUENCE, batch=BATCH, device="cpu")
    model = build().train()
    saved = SavedBytes(model)
    with saved:
        loss = model(**_inputs(model, BATCH)).loss
    assert saved.now() == plan.kept[0, 0, 0] == plan.peak.activations + plan.peak.logits
    del loss
    assert saved.now() == 0


@pytest.mark.tier("test", only=("gpt2",))
@pytest.mark.parametrize("build", MODELS)
@pooled(world_size=2)
def test_of_tensor_parallel_ranks(build: Any) -> None:
    _kept_is_as_planned(build, **TP)


@pooled(world_size=2)
def test_of_tensor_parallel_ranks_in_parts() -> None:
    for build in (gpt2, llama):
        _kept_is_as_planned(build, **TP, loss={"chunk": 8})
        _kept_is_as_planned(build, **PP, loss={"chunk": 8})
        _kept_is_as_planned(build, **TP, **RECOMPUTED)
    _kept_is_as_planned(functools.partial(_t5, 6), **TP, **RECOMPUTED)  # all blocks share one bias
    _kept_is_as_planned(llama, **TP, **ROWS)
    _kept_is_as_planned(mixtral, **TP, precision={"dtype": "bf16"})


SAVES = [["attention"], ["matmuls"], ["collectives"], ["attention", "collectives", "matmuls"]]


@pytest.mark.tier("test", only=("save3-llama",))
@pytest.mark.parametrize("build", mainly(llama, gpt2, _bert, _phi3, mixtral, later="sweep"))
@pytest.mark.parametrize("save", SAVES)
@pooled(world_size=2)
def test_of_blocks_that_keep_some_of_their_forward(save: list[str], build: Any) -> None:
    section = {"activation_checkpointing": {"save": save}}
    if build is not mixtral or "collectives" not in save:
        _kept_is_as_planned(build, **PP, **section)
    _kept_is_as_planned(build, **TP, **section)
    if build is llama:
        _kept_is_as_planned(build, **TP, **ROWS, **section)
        _kept_is_as_planned(build, **CP, **section)


@pytest.mark.tier("sweep")
@pooled(world_size=2)
def test_of_every_second_and_every_third_block() -> None:
    """Of the stages of ``zbv`` some recompute and some do not: there a backward has two halves."""
    for build in (_deep_llama, _deep_gpt2):
        for every in (2, 3):
            section = {"activation_checkpointing": {"every": every}}
            _kept_is_as_planned(build, **TP, **section)
            for schedule in ("1f1b", "zbv"):
                _kept_is_as_planned(build, **PP, schedule=schedule, **section)


def test_attention_that_drops_weights_is_computed_again() -> None:
    def kept(save: list[str], **settings: Any) -> int:
        config = {"activation_checkpointing": {"save": save}}
        return autopar.plan_memory(gpt2(**settings), config, sequence=SEQUENCE, device="cpu").kept[0, 0, 0]

    assert kept(["attention"]) > kept([])
    assert kept(["attention"], attn_pdrop=0.1) == kept([], attn_pdrop=0.1)


@pytest.mark.tier("test", only=("gpt2",))
@pytest.mark.parametrize("build", [gpt2, llama, _bert, _bart, _t5, mixtral])
@pooled(world_size=2)
def test_of_stages(build: Any) -> None:
    _kept_is_as_planned(build, **PP)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"])
@pooled(world_size=2)
def test_over_a_schedule(schedule: str) -> None:
    for build in (_deep_gpt2, _deep_llama):
        _kept_is_as_planned(build, **PP, schedule=schedule)
    _kept_is_as_planned(_deep_llama, **PP, schedule=schedule, **RECOMPUTED)


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pooled(world_size=2)
def test_of_rows(method: str) -> None:
    for build, more in ((llama, {}), (_few_keys, {}), (gpt2, RECOMPUTED)):
        _kept_is_as_planned(build, **CP, model_parallelism={"context_parallel_method": method}, **more)


@pytest.mark.tier("sweep")
@pooled(world_size=4)
def test_of_four_ranks() -> None:
    for build in (gpt2, _t5):
        _kept_is_as_planned(build, tp=4)
    for schedule in ("1f1b", "zbv"):
        _kept_is_as_planned(_deep_gpt2, **TP, **PP, schedule=schedule)
    _kept_is_as_planned(_deep_llama, **TP, **PP, **ROWS)
    _kept_is_as_planned(_deep_llama, **CP, **PP)
    _kept_is_as_planned(mixtral, **TP, **CP)
    _kept_is_as_planned(_deep_llama, batch=8, pp=4, schedule="zero-bubble")


def _waiting_between_halves(model: Any) -> dict[int, int]:
    """Stage -> bytes of the gradients that wait for the second half of a backward, each storage once."""
    waiting: dict[int, int] = {}
    backward = Engine._backward

    def counted(engine: Engine, stage: int, microbatch: int, step: Any, *, full: bool = True) -> None:
        backward(engine, stage, microbatch, step, full=full)
        if full:
            return
        rest = engine._open[stage, microbatch].rest
        arrived = [gradient for each in rest.arrived.values() for gradient in each] if rest is not None else []
        waiting[stage] = sum({x.data_ptr(): x.nbytes for x in arrived if x is not None}.values())

    with patch.object(Engine, "_backward", counted):
        model.execute_pipeline(_inputs(model, BATCH))
    return waiting


@pooled(world_size=2)
def test_gradients_between_the_halves_of_a_backward() -> None:
    config = {**PP, "pipeline": {"schedule": "zbv", "microbatch_size": 1}}
    for build in (_deep_gpt2, _deep_llama):
        count = PlannedModel(build(), sequence=SEQUENCE, precision="fp32").count(Rows(1), 1)
        model = autopar.initialize(build(), config).train()
        stages, waiting = model._autopar.stages, _waiting_between_halves(model)
        for stage, size in waiting.items():
            places = range(stages.bounds[stage], stages.bounds[stage + 1])
            units = count.of_stage(places, first=False, last=stage == stages.stages - 1)
            assert size == (sum(unit.gradients for unit in units) if stage else 0), stage
        assert sum(map(bool, waiting.values())) == (2 if model.mpu.pp.rank else 1)
        model.mpu.destroy()
