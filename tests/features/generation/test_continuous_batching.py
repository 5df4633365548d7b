"""Continuous batching over tensor-parallel ranks: transformers' ``generate_batch`` and its managers."""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import ContinuousBatchingConfig, Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

import autopar
from autopar.errors import ConfigError, ConsistencyError, PipelineError
from tests.features.experts.mixtures import mixtral
from tests.harness.worlds import pooled
from tests.parity import randomise
from tests.small import gpt2, llama

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11] * 20, [3], list(range(20, 60)), [5, 6, 7, 8, 9]]


def grouped(kv: int = 4) -> Any:
    return llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=kv).eval()


def cache(**changes: Any) -> ContinuousBatchingConfig:
    """A cache of 96 tokens, for prompts of 76 tokens with 12 new ones each."""
    settings: dict[str, Any] = {"page_size": 4, "num_blocks": 24, "max_batch_tokens": 48, "max_memory_percent": 0.9}
    return ContinuousBatchingConfig(**{**settings, **changes})


def asked(**changes: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2, **changes})


def tokens(outputs: dict[str, Any]) -> list[tuple[str, list[int], list[float]]]:
    assert all(output.error is None for output in outputs.values())
    return [(name, output.generated_tokens, output.logprobs) for name, output in outputs.items()]


def generated(
    model: Any, prompts: list[list[int]] = PROMPTS, seed: int = 3, replica: int | None = None, **way: Any
) -> Any:
    """Tokens of a way; ``replica``: of which the plain model draws the samples, whatever rank of the world this is."""
    way = dict(way)
    ours = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)} & set(way)
    settings = {name: way.pop(name) for name in ours}
    drawn = seed if replica is None else seed + replica - dist.get_rank()
    config = cache(seed=drawn, **settings)
    return tokens(model.generate_batch(prompts, generation_config=asked(**way), continuous_batching_config=config))


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7},
    "several of each": {"num_return_sequences": 2, "do_sample": True},
    "prefill first, nothing shared": {"scheduler_type": "prefill_first", "allow_block_sharing": False},
    "two requests at a time": {"max_requests_per_batch": 2, "max_new_tokens": 5},
}


def compare(model: Any, plain: Any, replica: int, prompts: list[list[int]], *ways: str) -> None:
    for name in ways:
        expected = generated(plain, prompts, replica=replica, **WAYS[name])
        assert generated(model, prompts, **WAYS[name]) == expected, name
        assert all(made for _, made, _ in expected)


@pooled(world_size=2)
def test_generate_batch_and_requests_that_differ() -> None:
    model = autopar.initialize(grouped(), {"tp": 2})
    plain, moved = grouped(), []
    moves = OffloadingManager.offload_requests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadingManager, "offload_requests", lambda self: moved.append(1) or moves(self))
        compare(model, plain, 0, PROMPTS, "greedy")
    assert len(moved) > 2, "the cache is too large for this test"
    with torch.inference_mode():
        ids = torch.tensor([PROMPTS[1]])
        alone = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert generated(model)[1][1] == alone[0, 7:].tolist()

    rank = dist.get_rank()
    for number, prompts, length in ((5, PROMPTS[rank:], 12), (6, PROMPTS, 12 + rank)):
        with pytest.raises(ConsistencyError, match=f"generate_batch of {number} prompts"):
            generated(model, prompts, max_new_tokens=length)
    with pytest.raises(ConsistencyError, match=r"init_continuous_batching \(with settings"):
        model.init_continuous_batching(asked(), cache(page_size=4 + 4 * rank))
    assert generated(model) == generated(grouped())


@pooled(world_size=2)
def test_a_cache_without_a_size_leaves_the_hosts_memory_to_the_other_ranks() -> None:
    """transformers takes 60 % of all that is not this process's, on each rank of the host."""
    free, asked_for, measure = 64 << 20, [], PagedAttentionMemoryHandler.get_available_memory
    memory = SimpleNamespace(total=psutil.Process().memory_info().rss + (1 << 30), available=free)
    way: dict[str, Any] = {"num_blocks": None, "max_memory_percent": None}
    expected = generated(grouped())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: memory)
        handler = PagedAttentionMemoryHandler
        patch.setattr(handler, "get_available_memory", lambda self: asked_for.append(measure(self)) or asked_for[-1])
        for mesh in ({"tp": 2}, {}) * 2:  # two ranks of a replica; two replicas
            assert generated(autopar.initialize(grouped(), mesh), **way) == expected
    assert len(asked_for) == 4 and all(0.25 * free < each < 0.31 * free for each in asked_for), asked_for


def windows() -> Any:
    """Every second layer sees 8 tokens: two kinds of pages share one cache."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    kinds = ["sliding_attention", "full_attention"]
    sizes |= {"num_hidden_layers": 2, "sliding_window": 8, "vocab_size": 131, "intermediate_size": 37}
    return randomise(Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds))).eval()


SEQUENCE = {"tp": 2, "model_parallelism": {"sequence_parallel": True}}
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a KV head for each query head": (lambda: grouped(8), {"tp": 2}),
    "one KV head": (lambda: grouped(1), {"tp": 2}),
    "heads side by side in one matrix": (lambda: gpt2(n_positions=64).eval(), {"tp": 2}),
    "windows": (windows, {"tp": 2}),
    "rows between regions": (lambda: grouped(2), SEQUENCE),
    "experts": (lambda: mixtral(4, vocab_size=131).eval(), {"tp": 2, "ep": 2}),
}


@pytest.mark.every_case
@pytest.mark.tier("sweep", only=(*list(MODELS)[1:], *list(WAYS)[3:]))
@pytest.mark.parametrize("name", [*MODELS, *list(WAYS)[2:]])  # the other ways are compared above
@pooled(world_size=2)
def test_models_and_ways(name: str) -> None:
    make, config = MODELS.get(name, (lambda: grouped(2), {"tp": 2}))
    compare(autopar.initialize(make(), config), make(), 0, PROMPTS, name if name in WAYS else "sampled")


@pytest.mark.tier("sweep")
@pooled(world_size=4)
def test_replicas_and_fewer_heads_than_ranks() -> None:
    compare(autopar.initialize(grouped(2), {"tp": 4}), grouped(2), 0, PROMPTS, "greedy", "sampled")
    replica = dist.get_rank() // 2
    own = PROMPTS[: 3 + replica]  # each takes steps of its own
    compare(autopar.initialize(grouped(2), {"tp": 2}), grouped(2), replica, own, "greedy", "sampled")


def served(
    model: Any, give: Callable[[Any], None], wanted: int = len(PROMPTS), way: Any = None, **settings: Any
) -> dict[str, list[int]]:
    """Tokens of requests that ``give`` gives to a manager."""
    found, config = dict[str, list[int]](), cache(**settings)
    with model.continuous_batching_context_manager(way or asked(), continuous_batching_config=config) as manager:
        give(manager)
        while len(found) < wanted and manager.is_running():
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                found[output.request_id] = output.generated_tokens
    return found


def expected(model: Any) -> dict[str, list[int]]:
    return {f"own {number}": made for number, (_, made, _) in enumerate(generated(model))}


def from_threads(manager: Any) -> None:
    """Each request from a thread of its own, at unlike times."""

    def give(number: int) -> None:
        time.sleep(0.01 * ((number * 7 + 3 * dist.get_rank()) % 5))
        assert manager.add_request(PROMPTS[number], request_id=f"own {number}", max_new_tokens=12) == f"own {number}"

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        list(pool.map(give, range(len(PROMPTS))))


@pytest.mark.tier("sweep")
@pooled(world_size=2)
def test_requests_are_given_on_all_ranks_or_on_the_first() -> None:
    model = autopar.initialize(grouped(), {"tp": 2})
    due = expected(grouped())
    assert served(model, from_threads) == due
    assert served(model, lambda manager: from_threads(manager) if dist.get_rank() == 0 else None) == due
    seen: list[int] = []

    def stream(manager: Any) -> None:
        name = manager.add_request(PROMPTS[1], streaming=True)
        for output in manager.request_id_iter(name):
            seen.append(len(output.generated_tokens))

    assert served(model, stream, wanted=0) == {} and seen == list(range(1, 13))

    def cancel(manager: Any) -> None:
        manager.add_request(PROMPTS[4], request_id="long", max_new_tokens=10**6)
        manager.cancel_request("long")
        from_threads(manager)

    assert served(model, cancel) == due


@pooled(world_size=2)
def test_ranks_leave_together() -> None:
    """The second rank has nothing to do and comes to the end of its block at once."""
    model, rank = autopar.initialize(grouped(), {"tp": 2}), dist.get_rank()
    due = expected(grouped())

    def give(manager: Any) -> None:
        if rank == 0:
            time.sleep(0.5)
            from_threads(manager)

    found = served(model, give, wanted=0 if rank else len(PROMPTS))
    assert found == ({} if rank else due)


def no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("no memory is left here")


@pytest.mark.tier("sweep")
@pooled(world_size=2)
def test_a_rank_that_fails_ends_the_others() -> None:
    model, rank = autopar.initialize(grouped(), {"tp": 2, "pipeline": {"timeout": 2}}), dist.get_rank()
    begun, error = time.monotonic(), MemoryError if rank else PipelineError

    def give(manager: Any) -> None:
        if rank:
            manager.batch_processor.inputs_and_outputs.prepare_batch_tensors = no_memory
        manager.add_request(PROMPTS[0], max_new_tokens=10**6)

    with pytest.raises(error, match="no memory is left here" if rank else r"rank 1 said.*MemoryError: no memory is"):
        served(model, give, 1)
    model = autopar.initialize(grouped(), {"tp": 2})  # the ranks of the first one have lost each other
    words = r"(?s)ended on all ranks: rank 1 failed.*rank 1 said: MemoryError: Memory footprint"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error, match="Memory footprint" if rank else words):
        if rank:
            patch.setattr(PagedAttentionMemoryHandler, "get_available_memory", lambda self: 1000)
        generated(model)
    assert time.monotonic() - begun < 30
    assert generated(model) == generated(grouped())


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_ranks_that_draw_other_tokens_raise() -> None:
    model = autopar.initialize(grouped(), {"tp": 2})

    def draw(manager: Any) -> None:
        manager.add_request(PROMPTS[0], request_id="own", max_new_tokens=250)
        while manager.is_running() and manager.get_result(timeout=0.001) is None:
            if dist.get_rank() == 1:
                torch.rand(())  # as a data loader might

    words = (
        r"the ranks chose different tokens. On the ranks \[0, 1\] request own has .*: \[\(\d+, \d+\), \(\d+, \d+\)\]"
    )
    with pytest.raises(ConsistencyError, match=words):
        served(model, draw, 0, asked(do_sample=True, eos_token_id=-1), num_blocks=80)


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_a_pause_changes_weights_and_other_threads_are_refused() -> None:
    """As in reinforcement learning: requests that run go on with the new weights."""
    model, plain = autopar.initialize(grouped(), {"tp": 2}), grouped()
    ids = torch.tensor([PROMPTS[0]])
    model.requires_grad_(False)
    later = grouped().requires_grad_(False)
    for parameter in later.parameters():
        parameter.mul_(1.25)
    manager = model.init_continuous_batching(asked(eos_token_id=-1), cache(num_blocks=80))
    manager.start()
    manager.add_request(PROMPTS[1], request_id="long", max_new_tokens=200)
    for call in (model, model.generate):
        with pytest.raises(ConfigError, match=r"manager\.pause"):
            call(ids)
    with manager.pause():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
        for parameter in model.parameters():
            parameter.mul_(1.25)
    manager.add_request(PROMPTS[2], request_id="new", max_new_tokens=12)
    found = {}
    while len(found) < 2:
        output = manager.get_result(timeout=60)  # a busy machine takes seconds for the 200 tokens
        found[output.request_id] = output.generated_tokens
    manager.stop()
    manager.destroy()
    assert len(found["long"]) == 200
    assert found["new"] == generated(later, [PROMPTS[2]], eos_token_id=-1)[0][1]
    torch.testing.assert_close(model(ids).logits, later(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.tier("sweep")
@pooled(world_size=2)
def test_managers_are_kept_and_models_become_plain_again() -> None:
    plain, model = grouped(), grouped()
    due = generated(plain)
    with model.continuous_batching_context_manager(
        asked(), continuous_batching_config=cache(), persistent_manager=True
    ):
        pass  # a manager of the plain model, which is not used again
    model = autopar.initialize(model, {"tp": 2})
    settings = {"generation_config": asked(), "continuous_batching_config": cache(seed=3)}
    managers = []
    for _ in range(2):
        kept = model.generate_batch(PROMPTS, persistent_manager=True, **settings)
        assert [made for _, made, _ in tokens(kept)] == [made for _, made, _ in due]
        managers.append(model._cached_continuous_batching_manager)
    assert managers[0] is managers[1]
    whole = autopar.deparallelize(model)
    assert "_cached_continuous_batching_manager" not in vars(whole) and "generate_batch" not in vars(whole)
    assert generated(whole) == due


@pytest.mark.tier("sweep")
@pooled(world_size=2)
def test_other_models_of_ranks_are_refused() -> None:
    words = (
        r"(?s)continuous batching .* of \w*LlamaForCausalLM is not .* with {}.*Use model\.generate\(\*\*tok.*Supported"
    )
    for config, reason in {"pp": "pipeline_parallel_size=2", "cp": "context_parallel_size=2"}.items():
        model = autopar.initialize(grouped(), {config: 2})
        for begin in (
            lambda model=model: model.generate_batch([[5, 6, 7]], max_new_tokens=3),
            model.init_continuous_batching,
            lambda model=model: model.continuous_batching_context_manager().__enter__(),
        ):
            with pytest.raises(ConfigError, match=words.format(reason)):
                begin()
    model = grouped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = autopar.initialize(model, {"zero": {"stage": 3}}, optimizer=optimizer)
    with pytest.raises(ConfigError, match=words.format("zero.stage 2 and 3 on 2 replicas")):
        generated(model)
    experts = autopar.initialize(mixtral(4), {"ep": 2})
    with pytest.raises(ConfigError, match="experts that are distributed over 2 ranks of several replicas"):
        generated(experts)
    replicas = autopar.initialize(grouped(), {})
    assert generated(replicas) == generated(grouped())
