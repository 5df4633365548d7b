"""Hooks of the user's where ranks share sequences see, change and train what they do on the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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


class Script:
    """What users do with hooks, on a plain model or on one over rows; everything that they look at is in ``found``."""

    def __init__(self, model: Any, block: str = "model.layers.0") -> None:
        self.model, self.block = model, model.get_submodule(block)
        self.found: dict[str, torch.Tensor] = {}
        torch.manual_seed(5)
        self.direction = nn.Parameter(torch.randn(24))
        self.down, self.up = nn.Parameter(torch.randn(24, 4) / 5), nn.Parameter(torch.randn(4, 16) / 5)
        self.penalties: list[torch.Tensor] = []
        self.hidden: list[torch.Tensor] = []
        self.clean: torch.Tensor | None = None

    def steer(self, module: Any, args: Any, output: Any) -> Any:
        """One position only."""
        x = _first(output).clone()
        x[:, 5] += self.direction
        return _changed(output, lambda _: x)

    def steer_in_place(self, module: Any, args: Any, output: Any) -> None:
        _first(output)[:, 3, :] *= 0.5

    def keep(self, module: Any, args: Any, output: Any) -> None:
        self.clean = _first(output).detach().clone()

    def patch(self, module: Any, args: Any, output: Any) -> Any:
        """A position of another run."""
        assert self.clean is not None
        clean = self.clean
        return _changed(output, lambda x: torch.cat([x[:, :2], clean[:, 2:4], x[:, 4:]], 1))

    def collect(self, module: Any, args: Any, output: Any) -> None:
        self.penalties.append(_first(output).abs().mean() + _first(output)[:, 4].square().sum())

    def adapt(self, module: Any, args: Any, output: Any) -> Any:
        return output + args[0] @ self.down @ self.up[:, : output.shape[-1]]

    def capture(self, module: Any, args: Any, output: Any) -> None:
        self.hidden.append(_first(output))

    def run(self, batches: list[dict[str, Any]], **hooks: str) -> None:
        """Run and differentiate with hooks: method=path."""
        handles = [
            self.model.get_submodule(path).register_forward_hook(getattr(self, name)) for name, path in hooks.items()
        ]
        for number, batch in enumerate(batches):
            self.penalties.clear()
            self.hidden.clear()
            out = self.model(**batch, use_cache=False)
            loss = out.loss + 0.1 * sum(self.penalties)
            if self.model.training:
                (loss / len(batches)).backward()
            self.found[f"loss {number}"] = loss.detach()
            self.found[f"logits {number}"] = out.logits.detach() + 0
            for place, hidden in enumerate(self.hidden):
                lens = self.model.lm_head(self.model.model.norm(hidden.detach()))
                self.found[f"hidden {number}, {place}"] = hidden.detach().clone()
                self.found[f"lens {number}, {place}"] = lens.detach() + 0
        for name in ("direction", "down", "up"):
            grad = getattr(self, name).grad
            if grad is not None:
                self.found[f"gradient of {name}"] = grad
        for handle in handles:
            handle.remove()


def _first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def _changed(value: Any, change: Any) -> Any:
    return change(value) if isinstance(value, torch.Tensor) else (change(value[0]), *value[1:])


BLOCKS = "model.layers.0", "model.layers.1"
USES: dict[str, list[dict[str, str]]] = {
    "steering": [{"steer": BLOCKS[0]}],
    "steering in place": [{"steer_in_place": BLOCKS[1]}],
    "patching": [{"keep": BLOCKS[0]}, {"patch": BLOCKS[0]}],
    "lens": [{"capture": BLOCKS[0]}],
    "penalty": [{"collect": f"{BLOCKS[1]}.mlp.down_proj"}],
    "penalty on attention": [{"collect": f"{BLOCKS[0]}.self_attn"}],
    "penalty on logits": [{"collect": "lm_head"}],
    "penalty on embeddings": [{"collect": "model.embed_tokens"}],
    "adapter of keys": [{"adapt": f"{BLOCKS[0]}.self_attn.k_proj"}],
    "steering of embeddings": [{"steer": "model.embed_tokens"}],
    "steering in place, of embeddings": [{"steer_in_place": "model.embed_tokens"}],
    "all together": [
        {
            "steer": BLOCKS[0],
            "collect": f"{BLOCKS[1]}.mlp",
            "capture": BLOCKS[1],
            "adapt": f"{BLOCKS[1]}.self_attn.k_proj",
        }
    ],
}


def scripted(use: str, config: dict[str, Any], *, training: bool = True, length: int = 7) -> None:
    plain: Any = llama(num_key_value_heads=1 if "tensor_parallel_size" in str(config) else 2).train(training)
    model = autopar.initialize(copy.deepcopy(plain), config).train(training)
    scripts = [Script(each) for each in (plain, model)]
    for script in scripts:
        with torch.set_grad_enabled(training):
            for seed, hooks in enumerate(USES[use]):
                script.run(language_batches(131, seq=length, seed=seed), **hooks)
    expected, found = scripts[0].found, scripts[1].found
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        close(found[name], tensor, name)
    if training:
        compare_gradients(model, plain)
    model.mpu.destroy()


@pytest.mark.tier("test", only=("penalty", "steering"))
@pytest.mark.parametrize("use", USES)
@pooled(world_size=2)
def test_uses(use: str) -> None:
    for method in METHODS:
        for length in LENGTHS:
            scripted(use, sizes(2, method), length=length)
    scripted(use, sizes(2), training=False)
    scripted(
        use, {**sizes(2), "activation_checkpointing": {"enable": True}}
    ) if "penalty" not in use and "all" not in use else None


@pytest.mark.parametrize("use", USES)
@pooled(world_size=4)
def test_uses_with_tensor_parallelism(use: str) -> None:
    for sp in (False, True):
        scripted(use, sizes(2, tensor_parallel_size=2, sequence_parallel=sp))
    scripted(use, sizes(2, tensor_parallel_size=2), training=False, length=16)


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


@pooled(world_size=4)
def test_on_stages() -> None:
    """A stage has hooks on its own blocks; a penalty is that of each micro-batch."""
    plain: Any = llama(num_hidden_layers=4).train()
    sections = {**sizes(2, pipeline_parallel_size=2), "pipeline": {"num_microbatches": 2}}
    model: Any = autopar.initialize(copy.deepcopy(plain), sections).train()
    found: dict[bool, list[torch.Tensor]] = {}
    batches = language_batches(131, count=2, batch=4, seq=9)
    for each in (plain, model):
        scale, seen = nn.Parameter(torch.tensor(0.5)), found.setdefault(each is plain, [])

        def hook(module: Any, args: Any, output: Any, scale: Any = scale, seen: Any = seen) -> Any:
            seen.append(output.detach().clone())
            return output * torch.linspace(0.5, 1.5, output.shape[1])[:, None] * scale

        handle = each.model.layers[1 if each is plain or model.mpu.pp.rank == 0 else 3].mlp.register_forward_hook(hook)
        if each is model and model.mpu.pp.rank:
            handle.remove()
        for batch in batches:
            each(**batch).loss.backward() if each is plain else each.execute_pipeline(batch)
        if each is plain:
            expected = scale.grad
        elif model.mpu.pp.rank == 0:
            close(torch.cat(seen), torch.cat(found[True]), "what the hook saw")
            assert scale.grad is not None and expected is not None
            close(scale.grad / 10, expected / 10, "the hook's own parameter")
        handle.remove()


@pooled(world_size=2)
def test_of_the_model_inside_and_of_its_outputs() -> None:
    plain: Any = llama()
    copied = copy.deepcopy(plain)
    seen: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def note(module: Any, args: Any, output: Any) -> Any:
            seen.setdefault(name, []).extend([output.last_hidden_state.detach() + 0, *output.hidden_states])
            output.last_hidden_state = output.last_hidden_state * torch.arange(1, 8)[:, None]
            return output

        return note

    copied.model.register_forward_hook(hook("before"))
    model: Any = autopar.initialize(copied, sizes(2))
    plain.model.register_forward_hook(hook("plain"))
    (batch,) = language_batches(131, count=1)
    loss = plain(**batch, output_hidden_states=True).loss
    close(model(**batch, output_hidden_states=True).loss, loss, "loss")
    for expected, found in zip(seen["plain"], seen["before"], strict=True):
        close(found, expected, "hidden states")
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
