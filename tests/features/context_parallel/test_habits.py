"""What users do with a context-parallel model in their own loops: equal to the plain model."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autopar
from autopar.errors import ConsistencyError
from tests.compare import same_gradients
from tests.features.context_parallel.test_exactness import made
from tests.harness.worlds import pooled
from tests.small import llama

METHODS = ("ulysses", "gather")


def _ids(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(3, 131, (batch, seq), generator=torch.Generator().manual_seed(seq))  # [batch, seq]


def _pair(plain: Any, method: str = "auto", **config: Any) -> tuple[Any, Any]:
    """A plain model, and its copy over two context-parallel ranks."""
    sizes = {"context_parallel_size": 2, "context_parallel_method": method}
    return plain, autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes, **config})


def _same(model: nn.Module, plain: nn.Module, loss: Any) -> None:
    """``loss(model)`` and its gradients are those of the plain model."""
    ours, theirs = loss(model), loss(plain)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    ours.backward()
    theirs.backward()
    autopar.average_gradients(model)
    same_gradients(model, plain)


@pytest.mark.parametrize("method", METHODS)
@pooled(world_size=2)
def test_some_logits(method: str) -> None:
    """``logits_to_keep`` takes rows of what the blocks return: all of it."""
    plain, model = _pair(llama(), method)
    _same(model, plain, lambda each: each(input_ids=_ids(2, 9), logits_to_keep=3).logits.square().mean())


@pytest.mark.every_case
@pytest.mark.tier("sweep", only=("ulysses-True", "gather-False", "states-False"))
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "states"])
@pooled(world_size=2)
def test_recomputed_after_another_forward(method: str, reentrant: bool) -> None:
    """The backward pass recomputes rows of its own forward, whatever ran since; states that are handed on, too."""
    states = functools.partial(made, "qwen3_next", "Qwen3NextForCausalLM")
    plain, model = _pair(states().train()) if method == "states" else _pair(llama().train(), method)
    for each in (plain, model):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})

    def loss(each: Any) -> Any:
        first = each(input_ids=_ids(2, 9), labels=_ids(2, 9)).loss
        second = each(input_ids=_ids(3, 14), labels=_ids(3, 14)).loss
        with torch.no_grad():
            each(input_ids=_ids(1, 5))
        return first + 2 * second

    _same(model, plain, loss)


@pytest.mark.parametrize("seq", [5, 8])
@pooled(world_size=2)
def test_router_logits(seq: int) -> None:
    """They are joined once, though two outputs hold them: 10 rows can be divided by one rank's 2, 16 by 4."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=131, num_hidden_layers=2, num_local_experts=4, output_router_logits=True, **sizes)
    plain, model = _pair(MixtralForCausalLM(config))

    def loss(each: Any) -> Any:
        out = each(input_ids=_ids(2, seq), labels=_ids(2, seq))
        assert [tuple(x.shape) for x in out.router_logits] == [(2 * seq, 4)] * 2
        return out.loss + sum(x.square().mean() for x in out.router_logits)

    _same(model, plain, loss)


@pooled(world_size=2)
def test_an_attention_function_is_told_of_whole_sequences() -> None:
    """Flash attention finds packed documents by ``position_ids``: all of them, also when a block is recomputed."""
    seen: list[torch.Tensor] = []

    def told(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["position_ids"])
        assert query.shape[2] == kwargs["position_ids"].shape[1] == 9
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("told", told)
    ALL_MASK_ATTENTION_FUNCTIONS.register("told", sdpa_mask)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    plain, model = _pair(llama().train(), "ulysses")
    for each in (plain, model):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        each.set_attn_implementation("told")
    _same(model, plain, lambda each: each(_ids(1, 9), labels=_ids(1, 9), position_ids=positions, use_cache=False).loss)
    assert len(seen) == 8 and all(torch.equal(each, positions) for each in seen)  # 2 blocks, recomputed, of 2 models


@pytest.mark.tier("test")
@pytest.mark.parametrize("averaged", [True, False])
@pooled(world_size=2)
def test_an_inner_step_takes_the_average_or_raises(averaged: bool) -> None:
    """MAML of first order: the inner step uses gradients that nothing has averaged yet."""
    plain, model = _pair(llama().train())
    group = model.mpu.get_data_parallel_group(with_context_parallel=True)

    def meta_loss(each: Any) -> torch.Tensor:
        weights = dict(each.named_parameters())
        loss = each(input_ids=_ids(2, 9), labels=_ids(2, 9)).loss
        gradients = torch.autograd.grad(loss, list(weights.values()))
        if each is model and averaged:
            for gradient in gradients:
                dist.all_reduce(gradient, group=group)
                gradient.div_(2)
        fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        outer = {"input_ids": _ids(2, 11), "labels": _ids(2, 11)}
        again: torch.Tensor = torch.func.functional_call(each, fast, (), outer).loss
        return again

    if averaged:
        _same(model, plain, meta_loss)
        return
    words = r"of one context-parallel group have drifted apart(.|\n)*Or gradients of torch.autograd.grad were used"
    with pytest.raises(ConsistencyError, match=words):
        meta_loss(model)
