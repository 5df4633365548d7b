"""Hooks of the user's where ranks share sequences see, change and train what they do on the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.context_parallel.test_exactness import METHODS, made, sizes
from tests.parity import close, language_batches, whole
from tests.pool import pooled
from tests.small import gpt2, llama
from tests.tensor_parallel.test_whole_hooks import PLACES, Seen, Steering

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


@pytest.mark.parametrize("sp", [False, True])
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
