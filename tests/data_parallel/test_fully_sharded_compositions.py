"""ZeRO stage 3 beside what else looks at forwards: rows of both kinds, and ``generate`` of encoder-decoders."""

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import autopar
from autopar.data_parallel import fully_sharded
from autopar.errors import ConfigError
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close, randomise
from tests.small import llama


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def bart() -> Any:
    torch.manual_seed(0)
    sizes = {"encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    config = BartConfig(vocab_size=131, d_model=24, **sizes, **heads, dropout=0.0, max_position_embeddings=64)
    return randomise(BartForConditionalGeneration(config))


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 24, "d_kv": 4, "d_ff": 37, "num_layers": 2, "num_heads": 6}
    return randomise(
        T5ForConditionalGeneration(T5Config(vocab_size=131, **sizes, dropout_rate=0.0, decoder_start_token_id=0))
    )


@pytest.mark.tier("all")
@pytest.mark.parametrize("stage", [2, 3])
@pooled(world_size=2)
def test_generate_between_a_backward_and_its_step(stage: int) -> None:
    """``generate`` gathers weights, which the step makes old."""
    plain = t5().train()
    model = copy.deepcopy(plain)
    model, optimizer = autopar.initialize(model, {"zero": {"stage": stage}}, optimizer=_sgd(model))
    reference, ids = _sgd(plain), torch.arange(5, 19).view(2, 7)
    for _ in range(3):
        losses = []
        for each, stepped in ((plain, reference), (model, optimizer)):
            loss = each.train()(input_ids=ids, labels=ids).loss
            loss.backward()
            each.eval().generate(ids, max_new_tokens=3, do_sample=False)
            stepped.step()
            stepped.zero_grad()
            losses.append(loss.detach())
        close(losses[1], losses[0], "loss")
    model.mpu.destroy()


def mamba() -> Any:
    torch.manual_seed(0)
    return randomise(MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=2, state_size=4)))


@pooled(world_size=2)
def test_generate_waits_once_and_keeps_its_weights() -> None:
    """The cache has other names before transformers 5.24, and a Mamba's holds no keys."""
    ids, calls = torch.arange(5, 19).view(2, 7), Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("meet", "free_weights"):
            patch.setattr(fully_sharded, name, functools.partial(_counted, calls, name, getattr(fully_sharded, name)))
        for build, way in ((llama, {}), (llama, {"cache_implementation": "static"}), (mamba, {}), (bart, {})):
            plain = build().eval()
            model = autopar.initialize(copy.deepcopy(plain), {"zero": {"stage": 3}})
            how: Any = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, **way}
            for _ in range(2):  # replicas meet at each block until they know which one follows
                model.generate(ids, **how)
            for _ in range(2):
                calls.clear()
                assert torch.equal(*(each.generate(ids, **how) for each in (plain, model)))
                assert calls == {"meet": 1}, (build, way)
            with torch.no_grad():
                model(ids)
            assert calls["free_weights"] == 1
            model.mpu.destroy()


def _counted(calls: Counter[str], name: str, plain: Any, *args: Any) -> Any:
    calls[name] += 1
    return plain(*args)


@pooled(world_size=2)
def test_a_forward_without_a_backward_leaves_norms_and_weights_and_ddp_is_refused() -> None:
    plain = llama().train()
    model = copy.deepcopy(plain)
    model, _ = autopar.initialize(model, {"zero": {"stage": 2}}, optimizer=_sgd(model))
    ids = torch.arange(5, 19).view(2, 7)
    for each in (plain, model):
        each(ids, labels=ids).loss.backward()
        each(ids, labels=ids)
    close(autopar.clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1), "norm")
    model(ids, labels=ids)
    weights = dict(autopar.hf_weights(model))
    assert all(torch.equal(weights[name], parameter) for name, parameter in plain.named_parameters())
    with raises_everywhere(ConfigError, "around a model with zero.stage 2 or 3", "Leave the wrapper out."):
        torch.nn.parallel.DistributedDataParallel(model)
    model.mpu.destroy()
