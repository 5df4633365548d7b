"""Hooks of the user's where ranks share sequences see, change and train what they do on the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.context_parallel.test_exactness import METHODS, made, sizes
from tests.parity import close, language_batches, whole
from tests.pool import pooled
from tests.small import gpt2, llama
from tests.tensor_parallel.test_whole_hooks import PLACES, Seen, Steering
from tests.tiers import mainly
from tests.worlds import raises_everywhere

LENGTHS = (7, 16)  # ragged rows, and even ones


def ragged(length: int) -> list[dict[str, Any]]:
    return language_batches(131, seq=length)


def as_plain(
    build: Callable[[], Any],
    paths: list[str],
    config: dict[str, Any],
    *,
    every: bool = False,
    length: int = 7,
    before: bool = False,
) -> None:
    plain: Any = build().train()
    copied = copy.deepcopy(plain)
    given = Steering(copied, paths, every=every) if before else None
    model = autopar.initialize(copied, config).train()
    seen: list[Seen] = []
    scales = []
    for each in (plain, model):
        hooks = given if given is not None and each is model else Steering(each, paths, every=every)
        for batch in ragged(length):
            (each(**batch, use_cache=False).loss / 2).backward()
        hooks.remove()
        seen.append(hooks.seen)
        scales.append(hooks.scale.grad)
    assert [name for name, _ in seen[0]] == [name for name, _ in seen[1]]
    for (name, expected), (_, found) in zip(*seen, strict=True):
        close(found, expected, name)
    if scales[0] is not None:
        scale = max(1.0, float(scales[0].abs()))
        close(scales[1] / scale, scales[0] / scale, "the hook's own parameter")
    compare_gradients(model, plain)
    with torch.no_grad():
        close(model(**ragged(length)[0]).loss, plain(**ragged(length)[0]).loss, "without hooks")
    model.mpu.destroy()


def compare_gradients(model: Any, plain: Any) -> None:
    autopar.average_gradients(model)
    gradients = whole(model, lambda p: p.grad)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        largest = max(1.0, float(parameter.grad.abs().max()))
        close(gradients[name] / largest, parameter.grad / largest, name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", PLACES)
@pooled(world_size=2)
def test_a_hook_at_any_place_is_as_on_the_plain_model(place: str, method: str) -> None:
    for length in LENGTHS:
        as_plain(llama, PLACES[place], sizes(2, method), length=length)


@pooled(world_size=2)
def test_in_front_of_the_blocks() -> None:
    for length in LENGTHS:
        as_plain(llama, ["model.embed_tokens"], sizes(2), length=length)


@pooled(world_size=2)
def test_hooks_on_all_modules() -> None:
    as_plain(llama, [], sizes(2), every=True)


@pytest.mark.parametrize("sp", mainly(True, False, later="sweep"))
@pytest.mark.parametrize("place", PLACES)
@pooled(world_size=4)
def test_with_tensor_parallelism(place: str, sp: bool) -> None:
    if not sp or place != "head":
        as_plain(llama, PLACES[place], sizes(2, tensor_parallel_size=2, sequence_parallel=sp))


OTHERS = {
    "learned positions": (
        lambda: gpt2(n_positions=64),
        ["transformer.wpe", "transformer.h.0.attn.c_attn", "transformer.h.1", "transformer.drop"],
    ),
    "attention of its own": (
        lambda: made("bloom", "BloomForCausalLM"),
        ["transformer.h.0.self_attention.query_key_value", "transformer.h.1.self_attention", "transformer.h.0.mlp"],
    ),
    "norms of heads": (
        lambda: made("qwen3", "Qwen3ForCausalLM"),
        ["model.layers.0.self_attn.q_norm", "model.layers.1.self_attn.k_norm"],
    ),
    "an encoder": (
        lambda: made("bert", "BertForMaskedLM"),
        ["bert.encoder.layer.0.output.LayerNorm", "bert.embeddings.LayerNorm", "cls.predictions.transform"],
    ),
    "experts": (lambda: made("qwen3_moe", "Qwen3MoeForCausalLM"), ["model.layers.0.mlp", "model.layers.1.mlp.experts"]),
    "recurrence": (
        lambda: made("qwen3_next", "Qwen3NextForCausalLM"),
        ["model.layers.0", "model.layers.0.linear_attn", "model.layers.0.linear_attn.in_proj_qkvz"],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pooled(world_size=2)
def test_other_models(name: str) -> None:
    build, paths = OTHERS[name]
    for length in LENGTHS:
        as_plain(build, paths, sizes(2), length=length)


@pytest.mark.parametrize("place", PLACES)
@pooled(world_size=2)
def test_hooks_that_are_there_before(place: str) -> None:
    as_plain(llama, PLACES[place], sizes(2), before=True)


@pytest.mark.parametrize("place", ["block", "attention", "q", "o", "gate", "norms"])
@pooled(world_size=2)
def test_with_recomputation(place: str) -> None:
    """A recomputed block calls its hooks again, with the same rows."""
    plain: Any = llama().train()
    plain.gradient_checkpointing_enable()
    model = autopar.initialize(llama().train(), {**sizes(2), "activation_checkpointing": {"enable": True}}).train()
    seen, scales = [], []
    for each in (plain, model):
        hooks = Steering(each, PLACES[place])
        for length in LENGTHS:  # both before the first backward
            losses = [each(**batch, use_cache=False).loss / 2 for batch in ragged(length)]
            for loss in losses:
                loss.backward()
        hooks.remove()
        seen.append(hooks.seen)
        scales.append(hooks.scale.grad)
    assert [name for name, _ in seen[0]] == [name for name, _ in seen[1]]
    for (name, expected), (_, found) in zip(*seen, strict=True):
        close(found, expected, name)
    close(scales[1] / 100, scales[0] / 100, "the hook's own parameter")
    compare_gradients(model, plain)


@pooled(world_size=2)
def test_an_encoder_and_a_decoder() -> None:
    """Attention of a decoder to an encoder has queries that are rows, and keys that are none."""
    inside = ["SelfAttention.q", "EncDecAttention.k", "EncDecAttention.v", "EncDecAttention.q", "EncDecAttention"]
    t5 = [f"decoder.block.0.layer.{('EncDec' in name and 1) or 0}.{name}" for name in inside]
    for model_type, head, paths in (
        ("t5", "T5ForConditionalGeneration", [*t5, "encoder.block.0", "encoder.final_layer_norm", "decoder.block.1"]),
        (
            "bart",
            "BartForConditionalGeneration",
            ["model.decoder.layers.0.encoder_attn.k_proj", "model.encoder.layers.1"],
        ),
    ):
        plain: Any = made(model_type, head).train()
        model = autopar.initialize(copy.deepcopy(plain), sizes(2)).train()
        seen, scales = [], []
        for each in (plain, model):
            hooks = Steering(each, paths)
            for length, target in ((7, 16), (8, 16), (16, 9)):  # 8: as many as rows of the decoder
                (batch,) = language_batches(131, count=1, seq=length)
                (each(**{**batch, "labels": torch.arange(2 * target).view(2, target)}).loss / 3).backward()
            hooks.remove()
            seen.append(hooks.seen)
            scales.append(hooks.scale.grad)
        assert [name for name, _ in seen[0]] == [name for name, _ in seen[1]]
        for (name, expected), (_, found) in zip(*seen, strict=True):
            close(found, expected, name)
        close(scales[1] / 100, scales[0] / 100, "the hook's own parameter")
        compare_gradients(model, plain)
        model.mpu.destroy()


@pooled(world_size=2)
def test_forwards_that_are_not_cut() -> None:
    """Too few rows, and a cache: each rank has all, and hooks cost nothing."""
    plain: Any = llama().eval()
    model: Any = autopar.initialize(copy.deepcopy(plain), sizes(2)).eval()
    results = []
    for each in (plain, model):
        handle = each.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * (out > out.mean()))
        tokens = each.generate(torch.arange(5).view(1, 5), max_new_tokens=6, do_sample=False)
        short = each(torch.arange(3).view(1, 3), use_cache=False).logits
        handle.remove()
        results.append((tokens, short.detach() + 0))
    assert torch.equal(results[0][0], results[1][0])
    close(results[1][1], results[0][1], "three tokens")
    model.mpu.destroy()


@pooled(world_size=2)
def test_ranks_with_other_hooks_are_named() -> None:
    model: Any = autopar.initialize(llama(), sizes(2))
    (batch,) = language_batches(131, count=1)
    if model.mpu.cp.rank:
        handle = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    with raises_everywhere(ConsistencyError, "hooks that see whole tensors", "forward on model.layers.0.mlp.up_proj"):
        model(**batch)
    if model.mpu.cp.rank:
        handle.remove()
    model(**batch)


@pooled(world_size=2)
def test_local_hooks_see_rows() -> None:
    model: Any = autopar.initialize(llama(), sizes(2))
    (batch,) = language_batches(131, count=1)
    layer, rows = model.model.layers[0].mlp, []
    handle = layer.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    model(**batch)
    autopar.local_hooks(layer)
    model(**batch)
    handle.remove()
    model(**batch)
    assert rows == [7, 3 + model.mpu.cp.rank]
    assert copy.deepcopy(model) is not model


@pooled(world_size=2)
def test_what_cannot_be_made_whole_is_refused() -> None:
    def keep(module: Any, args: Any, output: Any) -> None:
        pass

    def write(module: Any, args: Any, output: Any) -> None:
        args[0].mul_(2)

    (batch,) = language_batches(131, count=1)
    model: Any = autopar.initialize(made("qwen3_moe", "Qwen3MoeForCausalLM"), sizes(2))
    experts = model.model.layers[1].mlp.experts
    handle = experts.act_fn.register_forward_hook(keep)
    words = (
        f"the hook keep ({__file__}:",
        "on model.layers.1.mlp.experts.act_fn is inside of model.layers.1.mlp.experts",
    )
    with raises_everywhere(ConfigError, *words, "autopar.local_hooks(module)"):
        model(**batch)
    with torch.no_grad():
        model(**batch, use_cache=True)  # all rows are on each rank
    autopar.local_hooks(experts.act_fn)
    model(**batch)
    handle.remove()
    model.mpu.destroy()
    model = autopar.initialize(made("qwen3", "Qwen3ForCausalLM"), sizes(2))
    norm = model.model.layers[0].self_attn.q_norm
    handle = norm.register_forward_hook(keep)
    with raises_everywhere(ConfigError, "has as many heads as rows on this rank", "dims 1 and 2"):
        model(torch.arange(16).view(2, 8))  # four rows, four heads
    handle.remove()
    handle = model.model.layers[0].mlp.register_forward_hook(write)
    with raises_everywhere(ConfigError, "on model.layers.0.mlp writes into what its module was given", "pre-hook"):
        model(**batch)
    handle.remove()
