"""Plain calls, evaluation and ``generate`` of a model in stages."""

import copy
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import autopar
from autopar.errors import ConfigError, ConsistencyError
from autopar.tools.commands.models import of_task
from autopar.tools.verification.small_models import build_small
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close, language_batches, randomise
from tests.pipeline_parallel.deep import NAMES, deep
from tests.small import gpt2, llama


def _both(name: str, *, pp: int = 2, tp: int = 1, layers: int = 3, **pipeline: Any) -> tuple[Any, Any]:
    plain = deep(name, layers)
    piped = autopar.initialize(copy.deepcopy(plain), {"pp": pp, "tp": tp, "pipeline": pipeline})
    return plain.eval(), piped.eval()


@pytest.mark.tier("test", only=("gpt2", "bart"))
@pytest.mark.parametrize("name", NAMES)
@pooled(world_size=2)
def test_a_plain_call_and_generate_give_every_rank_the_plain_output(name: str) -> None:
    plain, piped = _both(name)
    (batch,) = language_batches(131, count=1, batch=3)
    with torch.no_grad():
        expected, actual = plain(**batch), piped(**batch)
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.loss, expected.loss)
    ids = torch.randint(3, 131, (2, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    for beams in (1, 3) if plain.can_generate() else ():
        given = {"input_ids": ids, "attention_mask": mask, "num_beams": beams, **settings}
        assert torch.equal(piped.generate(**given), plain.generate(**given))


@pytest.mark.parametrize("model_type", ["gpt_neo", "hy_v4"])
@pooled(world_size=2)
def test_padding_stays_masked_where_layers_are_numbered_or_called_in_another_way(model_type: str) -> None:
    """GPT-Neo's attentions have a layer_id; HYV4's hidden states are several streams, [batch, seq, streams, width]."""
    _same_logits_of_tokens(model_type, 2)


@pooled(world_size=4)
def test_an_encoder_that_is_no_model_and_blocks_with_time_first() -> None:
    """FSMT's encoder is a plain module; its hidden states are [seq, batch, width]; it writes into its labels."""
    piped = _same_logits_of_tokens("fsmt", 4)
    (batch,) = language_batches(100, count=1, batch=3)
    evaluated = piped.eval().execute_pipeline(batch, broadcast_loss=True).loss
    for module in piped.train().modules():
        vars(module).update({name: 0.0 for name, value in vars(module).items() if "dropout" in name and value})
    trained = piped.execute_pipeline(batch, broadcast_loss=True).loss  # micro-batches of one sample
    close(trained, evaluated, "loss", 1e-6)


def _same_logits_of_tokens(model_type: str, pp: int) -> Any:
    head = of_task(model_type, None)
    assert head.kind is not None and head.config is not None
    plain = build_small(head.kind, head.config).eval()
    piped = autopar.initialize(copy.deepcopy(plain), {"pp": pp, "pipeline": {"microbatch_size": 1}}).eval()
    ids = torch.randint(3, 131, (2, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    settings: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0, "do_sample": False}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    expected = plain.generate(input_ids=ids, attention_mask=mask, **settings)
    actual = piped.generate(input_ids=ids, attention_mask=mask, **settings)
    for number, (mine, theirs) in enumerate(zip(actual.logits, expected.logits, strict=True)):
        close(mine, theirs, f"logits of token {number + 1}", 1e-6)
    return piped


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_sampling_is_the_same_on_every_rank() -> None:
    plain, piped = _both("llama")
    torch.manual_seed(piped.mpu.rank)
    ids = torch.arange(3, 9).view(2, 3)
    actual = piped.generate(input_ids=ids, do_sample=True, max_new_tokens=8, pad_token_id=0)
    torch.manual_seed(0)
    expected = plain.generate(input_ids=ids, do_sample=True, max_new_tokens=8, pad_token_id=0)
    assert torch.equal(actual, expected)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_stages_with_different_inputs_or_caches_are_named() -> None:
    piped = autopar.initialize(gpt2(), {"pp": 2}).eval()
    ids = torch.arange(8).view(2, 4) + 1 + piped.mpu.rank
    text = "ranks [0, 1]) got different batches", "input_ids: rank 0: [2, 4] "
    with raises_everywhere(ConsistencyError, *text):
        piped.generate(input_ids=ids, max_new_tokens=2, pad_token_id=0)
    with raises_everywhere(ConsistencyError, *text), torch.no_grad():
        piped(input_ids=ids)
    same = torch.arange(8).view(2, 4)
    assert piped.generate(input_ids=same, max_new_tokens=2, pad_token_id=0).shape == (2, 6)
    with torch.no_grad():  # arguments that one stage alone is given are not compared; names count, not places
        piped(same, labels=same) if piped.mpu.rank else piped(input_ids=same)
    for place in range(2):  # a used cache on some ranks only
        with torch.no_grad():
            cache = piped(same, use_cache=True).past_key_values
            for state in ("one call", "several calls"):
                given = cache if piped.mpu.rank == place else None
                states = [f"a cache of {state}" if rank == place else "a new cache or none" for rank in range(2)]
                parts = "(ranks [0, 1]) got different KV caches", f"rank 0: {states[0]}, rank 1: {states[1]}"
                with raises_everywhere(ConsistencyError, *parts):
                    piped(same[:, :1], past_key_values=given)
                assert piped(same[:, :1], past_key_values=cache).logits.shape[:2] == (2, 1)


@pytest.mark.tier("test", only=("1f1b-gpt2",))
@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv", "dualpipev"])
@pooled(world_size=2)
def test_evaluation_of_an_uneven_batch(name: str, schedule: str) -> None:
    plain, piped = _both(name, layers=4, microbatch_size=2, schedule=schedule)
    for size in (5, 1, 4):
        (batch,) = language_batches(131, count=1, batch=size)
        with torch.no_grad():
            expected = plain(**batch)
        out = piped.execute_pipeline(batch, return_outputs=True)
        folded = schedule in ("zbv", "dualpipev")
        last = piped.mpu.is_pipeline_first_stage() if folded else piped.mpu.is_pipeline_last_stage()
        assert (out.loss is None) == (out.outputs is None) == (not last)
        if last:
            close(out.loss, expected.loss, "loss", 1e-6)
            close(out.outputs.logits, expected.logits, "logits", 1e-6)
            close(out.outputs.loss, expected.loss, "loss of the outputs", 1e-6)
        everywhere = piped.execute_pipeline(iter([batch]), broadcast_loss=True)["loss"]
        close(everywhere, expected.loss, "loss", 1e-6)
        assert all(parameter.grad is None for parameter in piped.parameters())
    with torch.no_grad():
        close(piped(**batch).logits, expected.logits, "logits of a plain call", 1e-6)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
@pooled(world_size=2)
def test_several_stages_on_a_rank_generate_without_a_cache(schedule: str) -> None:
    plain, piped = _both("llama", layers=4, schedule=schedule)
    ids = torch.arange(3, 9).view(2, 3)
    settings = {"input_ids": ids, "do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}
    with pytest.raises(ConfigError, match=r"a KV cache is not supported with 4 stages on 2 ranks.*\n.*use_cache=False"):
        piped.generate(**settings)
    assert torch.equal(piped.generate(**settings, use_cache=False), plain.generate(**settings))


@pooled(world_size=2)
def test_training_by_a_plain_call_is_refused() -> None:
    _, piped = _both("gpt2")
    piped.train()
    (batch,) = language_batches(131, count=1)
    with pytest.raises(ConfigError, match=r"cannot be trained by a plain call\n  Use out = model.execute_pipeline"):
        piped(**batch)
    with torch.no_grad():
        assert piped(**batch).loss > 0


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_stages_follow_a_model_to_another_dtype() -> None:
    for kind in (llama, gpt2):
        plain = kind().train()
        model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"pipeline_parallel_size": 2}}).train()
        for dtype in (torch.bfloat16, torch.float32):
            plain.to(dtype)
            model.to(dtype)
            for batch in language_batches(131, count=2, batch=2, seq=8):
                expected = plain(**batch).loss
                loss = model.execute_pipeline(batch, broadcast_loss=True).loss
                assert loss.dtype == expected.dtype
                close(loss.float(), expected.float(), "loss", 2**-8 if dtype == torch.bfloat16 else 1e-5)
            with torch.no_grad():
                found, logits = (each.eval()(batch["input_ids"]).logits for each in (model, plain))
            assert found.dtype == dtype
            close(found.float(), logits.float(), "logits", 2**-4 if dtype == torch.bfloat16 else 1e-5)
            plain.train()
            model.train()


@pytest.mark.tier("all")
@pooled(world_size=4)
def test_stages_know_the_length_of_a_cache_beside_sequence_parallelism() -> None:
    """ALiBi is as long as the cache: stages count whole sequences where blocks in front of them have rows."""
    torch.manual_seed(0)
    bloom = randomise(BloomForCausalLM(BloomConfig(vocab_size=131, hidden_size=24, n_layer=4, n_head=6)))
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True}
    ids = torch.arange(5, 19).view(2, 7)
    for plain in (bloom.eval(), llama(num_hidden_layers=4).eval()):
        model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes}).eval()
        tokens = [each.generate(ids, max_new_tokens=8, do_sample=False) for each in (plain, model)]
        assert torch.equal(*tokens)
