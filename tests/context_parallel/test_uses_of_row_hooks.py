"""What users do with hooks where ranks share sequences: steering, patching, penalties, lenses, adapters in hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.context_parallel.test_exactness import METHODS, sizes
from tests.context_parallel.test_row_hooks import LENGTHS, compare_gradients
from tests.parity import close, language_batches
from tests.pool import pooled
from tests.small import llama


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
