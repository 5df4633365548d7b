"""What does not work with context parallelism raises, with what to use instead; user hooks."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import autopar
from autopar.config import ParallelConfig
from autopar.errors import ConfigError, ConsistencyError
from autopar.features.context_parallel.plan import check_sequence_parallel, plan_rows
from autopar.policy.match import find_policy
from tests.compare import same_gradients
from tests.exchange import raises_everywhere
from tests.features.context_parallel.test_exactness import sizes
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.random_models import Case, build
from tests.small import gpt2, llama


def test_compile_and_modules_of_ones_own_and_all_rows_under_sequence_parallelism() -> None:
    config = {"cp": 2, "compile": {"enable": True}}
    with pytest.raises(ConfigError, match="context_parallel_size=2 is not supported with compile"):
        ParallelConfig.parse(config)
    with pytest.raises(ConfigError, match="does not fit Linear: the model must be a Hugging Face model"):
        plan_rows(nn.Linear(2, 2), find_policy(llama()), "", 2)
    model = build(Case("bloom", "BloomForCausalLM"), 6, 3)
    plan = plan_rows(model, find_policy(model), "", 2)
    with pytest.raises(ConfigError) as info:
        check_sequence_parallel(model, plan, 2)
    assert str(info.value) == (
        "context_parallel_size=2 does not fit BloomForCausalLM: with sequence_parallel, transformer.h.0.self_attention "
        "needs all rows (the first of 2 such modules)\n  Set sequence_parallel: false."
    )
    with pytest.raises(ConfigError, match="its code between the blocks may mix rows"):
        check_sequence_parallel(model, replace(plan, whole={}, between=True), 2)
    check_sequence_parallel(model, replace(plan, whole={}), 2)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_no_rank_could_compute_is_refused_and_the_next_forward_holds() -> None:
    model = autopar.initialize(llama(), sizes(2, "gather"))
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        expected = llama()(ids).logits
        with raises_everywhere(ConfigError, "output_attentions=True", "context_parallel_size=2"):
            model(ids, output_attentions=True, use_cache=False)
        flags = torch.ones(2, 7, dtype=torch.int64)
        model.config._attn_implementation = "flash_attention_2"  # takes no mask with rows
        with raises_everywhere(ConfigError, "context_parallel_method=gather is not supported with 'flash_attention_2'"):
            model(ids, attention_mask=flags, use_cache=False)
        model.config._attn_implementation = "sdpa"
        logits = model(ids, use_cache=False).logits
        assert (logits - expected).abs().max() <= 1e-5


@pooled(world_size=2)
def test_logits_that_one_rank_reads_alone_raise_but_for_an_evaluation() -> None:
    model = autopar.initialize(llama(), {"cp": 2, "loss": {"read_timeout": 0.5}})
    logits = model(torch.arange(8).view(1, 8), use_cache=False).logits
    assert "has rows" in repr(logits), "printing them gathers nothing"
    if dist.get_rank() == 0:
        with pytest.raises(ConsistencyError, match="gathers them, so every context-parallel rank must read them"):
            logits.argmax()
    dist.barrier()

    ids = torch.arange(8).view(1, 8)
    expected = llama().eval()(ids).logits
    model = autopar.initialize(llama(), {"cp": 2})
    training = [model(ids, labels=ids, use_cache=False)]
    with torch.inference_mode():
        alone = [model(ids, use_cache=False), model(ids, labels=ids, use_cache=False)]
    alone.append(model.eval()(ids, use_cache=False))
    if dist.get_rank() == 1:
        for output in alone:
            assert (output.logits.softmax(-1) - expected.softmax(-1)).abs().max() <= 1e-5
    assert type(training[0].logits) is not torch.Tensor
    alone[-1].logits.square().mean().backward()
    plain = llama()
    plain(ids).logits.square().mean().backward()
    autopar.average_gradients(model)
    same_gradients(model, plain, 2e-5)


@pytest.mark.parametrize(
    ("model_type", "head", "changes", "words"),
    [
        ("bart", "BartForConditionalGeneration", {"decoder_layerdrop": 0.25}, "layerdrop=0.25 skips blocks at random"),
        ("vit", "ViTForImageClassification", {}, r"vit\.\S+ does not run over tokens"),
        ("led", "LEDForConditionalGeneration", {}, "longformer_self_attn: .*is invalid"),
        ("xlnet", "XLNetLMHeadModel", {}, "mems is made of rows"),
    ],
)
def test_models_that_do_not_fit(model_type: str, head: str, changes: dict[str, float], words: str) -> None:
    model = build(Case(model_type, head), 6, 3)
    for name, value in changes.items():
        setattr(model.config, name, value)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=f"context_parallel_size=2 does not fit {head}: (in )?.*{words}"):
        plan_rows(model, find_policy(model), "", 2)
    assert [type(module) for module in model.modules()] == kinds


def test_a_length_that_tells_rows_apart_may_be_longer_than_the_model_takes() -> None:
    """Without data only tables of a fixed length mind; a number of rows must divide no size of the model."""
    short = gpt2(n_positions=8)
    assert set(plan_rows(short, find_policy(short), "", 4).own) == {"transformer.wte", "transformer.wpe"}
    sizes = {"hidden_size": 24, "num_layers": 2, "num_heads": 6, "vocab_size": 131, "max_position_embeddings": 8}
    config = GPTNeoConfig(attention_types=[[["global", "local"], 1]], bos_token_id=0, eos_token_id=0, **sizes)
    model = GPTNeoForCausalLM(config)
    words = "context_parallel_size=4 does not fit GPTNeoForCausalLM: no sequence length up to 8 differs from all"
    with pytest.raises(ConfigError, match=words):
        plan_rows(model, find_policy(model), "", 4)


KINDS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


def look(*_: Any) -> None:
    """Change nothing."""


@pytest.mark.parametrize("kind", KINDS)
@pooled(world_size=2)
def test_hooks_below_the_model_raise_until_they_are_local_or_removed(kind: str) -> None:
    model: Any = autopar.initialize(llama(), sizes(2))
    (batch,) = language_batches(131, count=1)
    for path in ("model", "model.embed_tokens", "model.layers.0", "model.layers.1.mlp.up_proj", "lm_head"):
        module = model.get_submodule(path)
        handle = getattr(module, f"register_{kind}")(look)
        words = (f"the hook look ({__file__}:", f"on {path} would get this rank's part", "autopar.local_hooks(module)")
        with raises_everywhere(ConfigError, "context_parallel_size=2", *words):
            model(**batch)
        handle.remove()
        model(**batch)
        autopar.local_hooks(module)
        getattr(module, f"register_{kind}")(look)
        model(**batch)


@pooled(world_size=4)
def test_hooks_with_tensor_parallelism() -> None:
    (batch,) = language_batches(131, count=1)
    for sp in (False, True):
        model: Any = autopar.initialize(llama(), sizes(2, tensor_parallel_size=2, sequence_parallel=sp))
        handle = model.model.layers[0].mlp.up_proj.register_forward_hook(look)
        with raises_everywhere(ConfigError, "the hook look", "on model.layers.0.mlp.up_proj"):
            model(**batch)
        handle.remove()
        model(**batch)
        model.mpu.destroy()


@pooled(world_size=2)
def test_hooks_from_before_hooks_of_all_modules_and_hooks_of_one_rank() -> None:
    model: Any = llama()
    model.model.layers[0].register_forward_hook(look)
    with raises_everywhere(ConfigError, "the hook look", "on model.layers.0 would get"):
        autopar.initialize(model, sizes(2))
    autopar.local_hooks(model.model.layers[0])
    model = autopar.initialize(model, sizes(2))
    (batch,) = language_batches(131, count=1)
    model(**batch)
    handle = register_module_forward_hook(look)
    with raises_everywhere(ConfigError, "the hook look", "on all modules"):
        model(**batch)
    handle.remove()
    model(**batch)
    layer, lengths = model.model.layers[0].mlp, []
    if model.mpu.cp.rank:
        handle = layer.up_proj.register_forward_hook(look)
    with raises_everywhere(ConsistencyError, "over local sequences on model.layers.0.mlp.up_proj"):
        model(**batch)
    handle.remove()
    autopar.local_hooks(layer)
    layer.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    model(**batch)
    assert lengths == [3 + model.mpu.cp.rank]
    copy.deepcopy(model)(**batch)
    assert len(lengths) == 2


@pooled(world_size=2)
def test_hooks_of_the_model_and_of_forwards_with_a_cache_see_full_tensors() -> None:
    plain: Any = llama().eval()
    model: Any = autopar.initialize(copy.deepcopy(plain), sizes(2)).eval()
    logits, tokens = [], []
    for each in (plain, model):
        handle = each.register_forward_hook(lambda module, args, out: logits.append(out.logits.detach() + 0))
        each(language_batches(131, count=1)[0]["input_ids"])
        handle.remove()
        each.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * (out > out.mean()))
        tokens.append(each.generate(torch.arange(5).view(1, 5), max_new_tokens=6, do_sample=False))
    close(logits[1], logits[0], "logits")
    assert torch.equal(*tokens)
