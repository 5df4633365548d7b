"""What tensor-parallel ranks must have alike, in the loops that users write: named as soon as it differs."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import DynamicCache, Qwen3NextConfig, StaticCache

from autopar.errors import ConfigError, ConsistencyError
from autopar.tensor_parallel.hooks import reuses_cache
from benchmarks.traffic import record
from tests.compare import same_weights
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close
from tests.random_models import small
from tests.small import gpt2, llama, parallel


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_different_batches_are_an_error_that_names_the_argument_on_any_forward():
    rank = dist.get_rank()
    for before in (0, 1, 7):
        model = parallel(gpt2(), 2).train()
        for step in range(before):
            model(torch.arange(step, step + 4)[None], labels=torch.arange(4)[None])
        with raises_everywhere(
            ConsistencyError,
            "the ranks [0, 1] of one tensor-parallel group got different inputs (1 argument):",
            "labels: rank 0: [1, 4] ",
            "autopar.prepare_dataloader",
        ):
            model(torch.arange(4)[None], labels=torch.arange(4)[None] + rank)
        model(torch.arange(4)[None])  # goes on
        with raises_everywhere(ConsistencyError, "input_ids: rank 0: [1, 4] ", "attention_mask: rank 0: missing"):
            model(torch.arange(4 + rank)[None], **({"attention_mask": torch.ones(1, 5)} if rank else {}))


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_the_same_samples_in_another_order_are_other_inputs():
    model = parallel(gpt2(), 2)
    ids = torch.arange(8).view(2, 4)
    model(ids)
    with raises_everywhere(ConsistencyError, "input_ids"):
        model(ids.flip(0) if dist.get_rank() else ids)
    large = torch.randint(0, 131, (1000, 30), generator=torch.Generator().manual_seed(0))  # too much to be hashed
    with torch.no_grad(), raises_everywhere(ConsistencyError, "input_ids"):
        model(large.flip(0) if dist.get_rank() else large)


@pooled(world_size=2)
def test_the_base_model_and_evaluation_are_compared_too_after_an_interrupted_forward():
    model, rank = parallel(gpt2(), 2), dist.get_rank()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.transformer.h[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.arange(4)[None])
    handle.remove()
    with raises_everywhere(ConsistencyError, "input_ids"):
        model(torch.arange(4)[None] + rank)
    with raises_everywhere(ConsistencyError, "input_ids"):
        model.transformer(torch.arange(4)[None] + rank)
    with torch.no_grad(), raises_everywhere(ConsistencyError, "input_ids"):
        model.eval()(torch.arange(4)[None] + rank)
    model.train(rank == 0)
    with raises_everywhere(ConsistencyError, "training mode: rank 0: True, rank 1: False"):
        model(torch.arange(4)[None])


@pooled(world_size=2)
def test_how_often_inputs_are_compared():
    ids, rank = torch.arange(4)[None], dist.get_rank()
    first = parallel(gpt2(), 2, consistency_check={"inputs": "first"}).train()
    first(ids)
    first(ids + rank)
    with pytest.raises(ConsistencyError):
        first.eval()(ids + rank)  # of each mode
    seldom = parallel(gpt2(), 2, consistency_check={"inputs": "every 3"})
    seldom(ids)
    seldom(ids + rank)
    with raises_everywhere(ConsistencyError, "input_ids: rank 0: [1, 4] int64, rank 1: [1, 5] int64"):
        seldom(torch.arange(4 + rank)[None])  # shapes always
    with raises_everywhere(ConsistencyError, "input_ids"):
        seldom(ids + rank)
    off = parallel(gpt2(), 2, consistency_check={"enable": False}).train()
    off(ids + rank)


@pooled(world_size=2)
def test_generate_compares_its_first_forward_only():
    gloo = {"tensor_parallel_size": 2, "cpu_transport": "gloo"}
    model, rank = parallel(gpt2(), 2, model_parallelism=gloo).eval(), dist.get_rank()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    calls = [call[::2] for call in record(lambda: model.generate(torch.arange(4)[None], **options))]
    assert calls.count(("allreduce", torch.int64)) == 3  # that all generate; the first forward, its shards
    with raises_everywhere(ConsistencyError, "input_ids"):
        model.generate(torch.arange(4)[None] + rank, **options)
    with raises_everywhere(ConsistencyError, "input_ids"):
        model(torch.arange(4)[None] + rank)  # outside again


@pytest.mark.tier("test")
@pooled(world_size=2)
@torch.no_grad()
def test_tokens_after_a_cache_are_compared_and_weights_now_and_then():
    rank, ids = dist.get_rank(), torch.arange(4)[None]

    def filled(model):
        return model(ids, use_cache=True).past_key_values

    model = parallel(llama(), 2).eval()
    cache = filled(model)
    with raises_everywhere(ConsistencyError, "input_ids: rank 0: [1, 1] ", "rank 1: [1, 1] "):
        model(ids[:, :1] + rank, past_key_values=cache, use_cache=True)
    with raises_everywhere(ConsistencyError, "input_ids: rank 0: [1, 1] ", "rank 1: [1, 2] "):
        model(ids[:, : 1 + rank], past_key_values=filled(model), use_cache=True)
    cache = filled(model)
    with raises_everywhere(ConsistencyError, "continues from a cache: rank 0: missing, rank 1: yes"):
        model(ids, past_key_values=cache if rank else None, use_cache=True)
    for often in ("always", "every 25"):
        model = parallel(llama(), 2, consistency_check={"inputs": often}).eval()
        cache = filled(model)
        if rank:
            model.model.norm.weight.data[3] += 1e-6
        with raises_everywhere(ConsistencyError, "weight model.norm.weight: rank 0: "):
            for _ in range(50):
                model(ids[:, :1], past_key_values=cache, use_cache=True)


@pooled(world_size=2)
@torch.no_grad()
def test_ranks_that_disagreed_about_a_token_compare_the_same_afterwards():
    rank, ids = dist.get_rank(), torch.arange(4)[None]
    model = parallel(gpt2(), 2).eval()  # more replicated weights than one sample has
    cache = model(ids, use_cache=True).past_key_values
    with raises_everywhere(ConsistencyError, "continues from a cache: rank 0: missing, rank 1: yes"):
        model(ids, past_key_values=cache if rank else None, use_cache=True)
    model(ids)
    if rank:
        model.extra = nn.Linear(2, 2)
    with pytest.raises(ConfigError if rank else ConsistencyError, match="extra"):
        model(ids)
    if rank:
        del model.extra
    cache = model(ids, use_cache=True).past_key_values
    for _ in range(20):
        model(ids[:, :1], past_key_values=cache, use_cache=True)


@pooled(world_size=2)
@torch.no_grad()
def test_a_token_with_dropout_compares_the_generators_that_it_draws_from():
    model, ids = parallel(gpt2(resid_pdrop=0.5), 2).eval(), torch.arange(4)[None]
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout))  # several answers of one model, which evaluates
    cache = [model(ids, use_cache=True).past_key_values for _ in range(2)][-1]
    model(ids[:, :1], past_key_values=cache, use_cache=True)
    torch.rand(1 + dist.get_rank())  # as a rank that samples for all
    with raises_everywhere(ConsistencyError, "have different random states (1)", "random state of torch: rank 0: "):
        model(ids[:, :1], past_key_values=cache, use_cache=True)


@pooled(world_size=2)
@torch.no_grad()
@pytest.mark.parametrize("static", [True, False])
def test_a_cache_that_was_reset_begins_anew(static):
    model, ids = parallel(llama(), 2).eval(), torch.arange(4)[None]
    cache = StaticCache(model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    assert not reuses_cache((), {"past_key_values": cache})
    model(ids, past_key_values=cache, use_cache=True)
    assert reuses_cache((), {"past_key_values": cache})
    model(ids[:, :1], past_key_values=cache, use_cache=True)
    cache.reset()
    assert not reuses_cache((), {"past_key_values": cache})
    if dist.get_rank():
        model.model.norm.weight.data[3] += 1e-6
    with raises_everywhere(ConsistencyError, "weight model.norm.weight: rank 0: "):
        model(ids, past_key_values=cache, use_cache=True)


def test_states_of_linear_attention_that_were_reset_begin_anew():
    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    cache = DynamicCache(config=config)
    cache._autopar_local = True
    assert not reuses_cache((), {"cache_params": cache})
    cache.update_conv_state(torch.ones(1, 8, 4), 0)
    assert reuses_cache((), {"cache_params": cache})
    cache.reset()
    assert not reuses_cache((), {"cache_params": cache})


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_random_states_that_differ_are_an_error_when_dropout_is_on():
    rank = dist.get_rank()
    model = parallel(gpt2(attn_pdrop=0.1), 2).train()
    model(torch.arange(4)[None])
    if rank == 0:
        torch.rand(1)  # rank 0 draws once: for a picture, for its log
    with raises_everywhere(ConsistencyError, "have different random states (1)", "random state of torch: rank 0: "):
        model(torch.arange(4)[None])
    model = parallel(gpt2(), 2).train()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model(torch.arange(4)[None])  # nothing is drawn, nothing to compare


def _speech() -> Any:
    return small("wav2vec2", "Wav2Vec2ForCTC").train()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_masks_drawn_from_numpy_are_those_of_one_process():
    rank = dist.get_rank()
    np.random.seed(5)
    torch.manual_seed(0)
    wave, labels = torch.randn(2, 400), torch.randint(1, 17, (2, 4))
    plain, model = _speech(), _speech()
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (plain, model)]
    losses = []
    np.random.seed(5)
    for _ in range(4):
        losses.append(plain(wave, labels=labels).loss)
        losses[-1].backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    np.random.seed(5 if rank == 0 else 77)  # users seed by rank, or not at all: initialize shares the first one's
    parallel(model, 2)
    for loss in losses:
        output = model(wave, labels=labels)
        close(output.loss, loss, "loss")
        output.loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert len({round(loss.item(), 4) for loss in losses}) == 4
    same_weights(model, plain)
    if rank == 0:
        np.random.rand()
    with raises_everywhere(ConsistencyError, "random state of numpy: rank 0: "):
        model(wave, labels=labels)


@pooled(world_size=2)
def test_generators_that_differ_before_the_first_forward_are_noticed_in_it():
    wave, labels = torch.zeros(2, 400), torch.ones(2, 4, dtype=torch.long)
    model = parallel(_speech(), 2)
    np.random.seed(dist.get_rank())  # set_seed(rank) after initialize
    with raises_everywhere(ConsistencyError, "random state of numpy"):
        model(wave, labels=labels)


@pooled(world_size=2)
def test_initialize_draws_nothing():
    for build in (gpt2, llama):
        model = build()
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        parallel(model, 2)
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(3))
        assert random.random() == random.Random(3).random()
        assert np.random.rand() == np.random.RandomState(3).rand()
