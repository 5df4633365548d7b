"""Context parallelism against the plain model: masks, lengths, methods, meshes. Logits, losses, every gradient."""

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import autopar
from autopar.distributed import collectives
from autopar.features.context_parallel import attention
from autopar.layout import rows_layout
from tests.harness.worlds import pooled
from tests.parity import check, close, language_batches
from tests.pipeline_parallel.oracle import check_pipeline
from tests.random_models import Case, build
from tests.small import gpt2, llama

METHODS = ("ulysses", "gather")


def sizes(cp: int, method: str = "auto", **more: Any) -> dict[str, Any]:
    return {"model_parallelism": {"context_parallel_size": cp, "context_parallel_method": method, **more}}


def made(model_type: str, head: str, heads: int = 4, kv_heads: int = 2, **changes: Any) -> PreTrainedModel:
    model = build(Case(model_type, head), heads, kv_heads, vocab=131)
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def padded_left(length: int) -> dict[str, Any]:
    batch = language_batches(131, count=1, seq=length, seed=2)[0]
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def packed(*lengths: int) -> dict[str, Any]:
    ids = torch.arange(sum(lengths))[None] + 5
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}


def labelled_on_one_rank(length: int) -> dict[str, Any]:
    batch = language_batches(131, count=1, seq=length, seed=3)[0]
    batch["labels"][:, : length // 2 + 2] = -100  # no row of the first rank has a label
    return batch


def batches() -> list[dict[str, Any]]:
    """Lengths that do not divide, padding on both sides, documents, a rank without labels."""
    return [*language_batches(131, count=1, seq=7), padded_left(16), packed(7, 9), labelled_on_one_rank(33)]


CAUSAL = {
    "grouped keys": llama,
    "one key": functools.partial(made, "llama", "LlamaForCausalLM", 4, 1),
    "windows": functools.partial(made, "mistral", "MistralForCausalLM", sliding_window=4),
    "soft-capping": functools.partial(made, "gemma2", "Gemma2ForCausalLM"),
    "some windows": functools.partial(made, "gemma3_text", "Gemma3ForCausalLM"),
    "sinks and experts": functools.partial(made, "gpt_oss", "GptOssForCausalLM"),
    "experts with a loss": functools.partial(made, "qwen3_moe", "Qwen3MoeForCausalLM", output_router_logits=True),
    "fused": functools.partial(made, "phi3", "Phi3ForCausalLM"),
    "learned positions": lambda: gpt2(n_positions=64),
    "attention of its own": functools.partial(made, "bloom", "BloomForCausalLM"),
}


@pytest.mark.tier("test", only=("grouped keys-ulysses", "windows-gather"))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CAUSAL)
@pooled(world_size=2)
def test_masks_and_lengths(name: str, method: str) -> None:
    wanted = [batch for batch in batches() if name != "attention of its own" or "position_ids" not in batch]
    check(CAUSAL[name], wanted, 1, config=sizes(2, method), step=False).mpu.destroy()


@pytest.mark.parametrize("method", METHODS)
@pooled(world_size=4)
def test_four_ranks(method: str) -> None:
    for build_one in (llama, CAUSAL["some windows"], CAUSAL["one key"]):  # fewer keys, and fewer heads, than ranks
        check(build_one, batches(), 1, config=sizes(4, method), step=False).mpu.destroy()
    speech = functools.partial(made, "moonshine", "MoonshineForConditionalGeneration")  # causal but for one query
    batch = {"input_values": torch.randn(2, 2500), "labels": torch.arange(10).view(2, 5)}
    check(speech, [batch], 1, config=sizes(4, method), step=False).mpu.destroy()
    if method == "ulysses":  # heads of one rank look at two keys
        parts = functools.partial(made, "llama", "LlamaForCausalLM", 6, 2)
        check(parts, batches()[1:2], 1, config=sizes(4, method), step=False).mpu.destroy()


@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("bert", "BertForMaskedLM"),
        ("bert", "BertForTokenClassification"),
        ("llama", "LlamaForSequenceClassification"),
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration"),
    ],
)
@pooled(world_size=2)
def test_other_heads(model_type: str, head: str) -> None:
    listed = []
    for length, target in ((8, 16), (16, 8), (7, 3)):  # the rows of one sequence are as many as the other has
        batch: dict[str, Any] = language_batches(131, count=1, seq=length)[0]
        if "Conditional" in head:
            batch["labels"] = torch.arange(2 * target).view(2, target)
        elif "Classification" in head:
            batch["labels"] = torch.arange(2) if "Sequence" in head else batch["labels"].clamp(max=2)
        listed.append(batch)
    model = functools.partial(made, model_type, head)
    check(model, listed, 1, config=sizes(2), step=False).mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_with_tensor_parallelism() -> None:
    for name in ("grouped keys", "learned positions", "experts with a loss"):
        check(CAUSAL[name], batches(), 2, config=sizes(2, tensor_parallel_size=2), step=False).mpu.destroy()


@pytest.mark.parametrize("method", METHODS)
@pooled(world_size=4)
def test_with_sequence_parallelism(method: str) -> None:
    """Rows of rows between the regions, also recomputed; of 3 tokens one rank has one, which is not cut."""
    listed = [*batches(), *language_batches(131, count=1, seq=3)]
    config = sizes(2, method, tensor_parallel_size=2, sequence_parallel=True)
    for name in ("grouped keys", "experts with a loss") if method == "ulysses" else ("learned positions",):
        check(CAUSAL[name], listed, 2, config=config, step=False).mpu.destroy()
    config["activation_checkpointing"] = {"enable": True}
    listed = [{**batch, "output_hidden_states": True} for batch in listed[:2]]
    check(CAUSAL["some windows"], listed, 2, config=config, first=_same_hidden_states).mpu.destroy()


def _same_hidden_states(plain: nn.Module, parallel: nn.Module) -> None:
    batch = {**language_batches(131, count=1, seq=9)[0], "output_hidden_states": True}
    with torch.no_grad():
        for ours, theirs in zip(parallel(**batch).hidden_states, plain(**batch).hidden_states, strict=True):
            close(ours, theirs, "hidden states")


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_with_pipeline_stages() -> None:
    config = {**sizes(2, pipeline_parallel_size=2), "pipeline": {"num_microbatches": 2, "schedule": "1f1b"}}
    check_pipeline(llama, language_batches(131, batch=4, seq=9), **config).mpu.destroy()
    config["pipeline"]["schedule"] = "zero-bubble"
    check_pipeline(gpt2, language_batches(131, batch=4, seq=8), **config).mpu.destroy()


@pytest.mark.tier("all")
@pooled(world_size=8)
def test_with_stages_and_sequence_parallelism() -> None:
    """Rows of rows of two stages, recomputed."""
    more = {"sequence_parallel": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = {**sizes(2, **more), "pipeline": {"num_microbatches": 2}, "activation_checkpointing": {"enable": True}}
    for build_one in (CAUSAL["windows"], gpt2):
        check_pipeline(build_one, language_batches(131, batch=4, seq=9), tp=2, **config).mpu.destroy()


@pytest.mark.every_case
@pytest.mark.tier("test", only=("grouped keys-1",))
@pytest.mark.tier("sweep", only=("grouped keys-3", "gated delta-1", "gated delta-3"))
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["grouped keys", "gated delta"])
@pooled(world_size=4)
def test_steps_with_replicas_and_sharded_states(name: str, stage: int) -> None:
    """Three steps of two micro-batches, clipped, with recomputed activations, on two replicas of two ranks each."""
    build_one = CAUSAL.get(name, functools.partial(made, "qwen3_next", "Qwen3NextForCausalLM"))
    plain, model = build_one().train(), build_one().train()
    reference, optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, model))
    more = {"zero": {"stage": stage}, "gradient_clipping": 0.5, "activation_checkpointing": {"enable": True}}
    model, optimizer = autopar.initialize(model, {**sizes(2), **more}, optimizer=optimizer)
    mpu, engine = model.mpu, model
    if stage < 3:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        engine = DistributedDataParallel(model, process_group=group)
    for step in range(3):
        batches = language_batches(131, batch=4, seq=7 + step, seed=step)
        with torch.no_grad():
            close(engine(**batches[0]).loss, plain(**batches[0]).loss, f"in evaluation before step {step}")
        for number, batch in enumerate(batches):
            plain(**batch).loss.backward()
            mine = {key: value.chunk(2)[mpu.dp.rank] for key, value in batch.items()}
            valid = (batch["labels"][:, 1:] != -100).sum()
            with contextlib.nullcontext() if number or stage == 3 else engine.no_sync():
                loss = engine(**mine, num_items_in_batch=valid).loss * mpu.dp.size  # averaged over the replicas
                loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    weights = dict(model.named_parameters())
    for key, parameter in plain.named_parameters():
        held: Any = weights[key]
        close(held.full_tensor() if stage == 3 else held.data, parameter.data, f"{key} after three steps")


@pooled(world_size=2)
def test_long_runs_are_computed_some_queries_at_a_time() -> None:
    before, attention._MOST = attention._MOST, 1
    batch = language_batches(131, count=1, seq=80)[0]
    del batch["attention_mask"]  # plain causal: no mask is made
    try:
        assert len(list(attention._pieces(rows_layout(80, 2, zigzag=True).ranges(0)))) == 4
        check(llama, [batch], 1, config=sizes(2, "gather"), step=False).mpu.destroy()
    finally:
        attention._MOST = before


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_dropout_differs_over_the_rows_and_is_drawn_again_the_same() -> None:
    model = llama(attention_dropout=0.5)
    model.model.layers[0].mlp.dropout = nn.Dropout(0.5)
    model = autopar.initialize(model, sizes(2)).train()
    seen: list[torch.Tensor] = []
    autopar.local_hooks(model.model.layers[0].mlp)
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: seen.append(nn.functional.dropout(torch.ones(64)))
    )
    before = torch.get_rng_state()
    model(**language_batches(131, count=1, seq=8)[0])
    torch.set_rng_state(before)
    model(**language_batches(131, count=1, seq=8)[0])
    assert torch.equal(seen[0], seen[1])
    everyone = collectives.all_gather(seen[0], model.mpu.cp, collectives.even_layout(128, 2), 0)
    assert not torch.equal(everyone[:64], everyone[64:])


@pooled(world_size=2)
def test_tokens_are_generated_between_steps() -> None:
    plain, model = llama(), autopar.initialize(llama(), sizes(2))
    batch = language_batches(131, count=1, seq=7)[0]
    for _ in range(2):
        model(**batch).loss.backward()
        ids, mask = batch["input_ids"], torch.ones_like(batch["input_ids"])
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        assert torch.equal(tokens, plain.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False))
        with torch.no_grad():
            close(model(**batch).logits, plain(**batch).logits, "logits in evaluation")
            cached = model(ids, use_cache=True).past_key_values
            assert cached.get_seq_length() == 7  # of all rows: a forward that fills a cache is not cut
            assert model(ids).past_key_values is None
