"""Hooks of the user's on a sharded model see, change and train what they do on the plain one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as of_all
from transformers import Qwen3Config, Qwen3ForCausalLM

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.compare import same_gradients
from tests.exchange import raises_everywhere
from tests.features.experts.mixtures import mixtral
from tests.harness.worlds import pooled
from tests.parity import close, language_batches, whole
from tests.small import gpt2, llama

Seen = list[tuple[str, torch.Tensor]]


def _first(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)([_changed(value[0], change), *value[1:]])


class Steering:
    """Hooks of all kinds on some modules: they look, change by place, and train a parameter of their own."""

    def __init__(self, model: nn.Module, paths: list[str], *, every: bool = False) -> None:
        self.seen: Seen = []
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.handles = []
        self.names = {id(module): name for name, module in model.named_modules()}
        for path in paths:
            module = model.get_submodule(path)
            self.handles += [
                module.register_forward_pre_hook(self.before),
                module.register_forward_pre_hook(self.with_kwargs, with_kwargs=True),
                module.register_forward_hook(self.after),
                module.register_full_backward_pre_hook(self.backward_pre),
                module.register_full_backward_hook(self.backward),
            ]
        if every:
            self.handles += [
                of_all.register_module_forward_hook(self.look),
                of_all.register_module_forward_pre_hook(self.look_before),
                of_all.register_module_full_backward_hook(self.look_back),
            ]

    def note(self, kind: str, module: nn.Module, value: torch.Tensor) -> None:
        self.seen.append((f"{kind} {self.names.get(id(module))}", value.detach().clone()))

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """A number for each feature and row, which is another one if they are counted from elsewhere."""
        features = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)
        if x.ndim < 3:
            return features
        return features * torch.linspace(0.8, 1.2, x.shape[1], dtype=x.dtype).view(-1, *[1] * (x.ndim - 2))

    def before(self, module: nn.Module, args: Any) -> Any:
        if args:
            self.note("given", module, _first(args))
            return _changed(args, lambda x: x * (1 + 0.1 * x.std()) if x.is_floating_point() else x)
        return None

    def with_kwargs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            self.note("given by name", module, kwargs["hidden_states"])
            kwargs = {**kwargs, "hidden_states": kwargs["hidden_states"] * 1.1}
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.note("made", module, _first(output))
        return _changed(output, lambda x: x * self.place(x) + self.scale * x.norm(dim=-1, keepdim=True))

    def backward_pre(self, module: nn.Module, gradients: Any) -> Any:
        self.note("gradient of output", module, _first(gradients))
        return _changed(gradients, lambda g: g * self.place(g))

    def backward(self, module: nn.Module, into: Any, out: Any) -> Any:
        if into and into[0] is not None:
            self.note("gradient of input", module, into[0])
            return _changed(into, lambda g: g / (1 + g.norm()))
        return None

    def look(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and id(module) in self.names:
            self.note("made", module, output)

    def look_before(self, module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and id(module) in self.names:
            self.note("given", module, args[0])

    def look_back(self, module: nn.Module, into: Any, out: Any) -> None:
        if isinstance(out[0], torch.Tensor) and id(module) in self.names:
            self.note("gradient of output", module, out[0])

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def as_plain(build: Callable[[], Any], paths: list[str], config: dict[str, Any], *, every: bool = False) -> None:
    plain: Any = build()
    model = autopar.initialize(copy.deepcopy(plain), config)
    seen: list[Seen] = []
    scales = []
    for each in (plain, model):
        hooks = Steering(each, paths, every=every)
        for batch in language_batches(131):
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
    same_gradients(model, plain, scaled=True)
    close(model(**language_batches(131)[0]).loss, plain(**language_batches(131)[0]).loss, "without hooks")


PLACES = {
    "block": ["model.layers.0"],
    "attention": ["model.layers.0.self_attn"],
    "mlp": ["model.layers.1.mlp"],
    "norms": ["model.layers.1.input_layernorm", "model.norm"],
    "q": ["model.layers.0.self_attn.q_proj"],
    "k, v": ["model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.v_proj"],
    "o": ["model.layers.0.self_attn.o_proj"],
    "gate": ["model.layers.0.mlp.gate_proj"],
    "act": ["model.layers.0.mlp.act_fn"],
    "down": ["model.layers.1.mlp.down_proj"],
    "head": ["lm_head"],
}
SP = {"model_parallelism": {"tensor_parallel_size": 2, "sequence_parallel": True}}


@pytest.mark.tier("test", only=("tp-gate", "tp-down", "sp-block", "sp-gate"))
@pytest.mark.parametrize(
    ("mesh", "place"), [(mesh, place) for mesh in ("tp", "sp") for place in PLACES if (mesh, place) != ("sp", "head")]
)
@pooled(world_size=2)
def test_a_hook_at_any_place_is_as_on_the_plain_model(mesh: str, place: str) -> None:
    if mesh == "tp":
        as_plain(lambda: llama(num_key_value_heads=1), PLACES[place], {"tp": 2})
    else:
        as_plain(llama, PLACES[place], SP)


@pooled(world_size=3)
def test_over_uneven_shards() -> None:
    for paths in PLACES.values():
        as_plain(llama, paths, {"tp": 3})
    for paths in (["transformer.h.0.attn.c_attn"], ["transformer.h.1.mlp.c_proj", "transformer.h.1.mlp.act"]):
        as_plain(gpt2, paths, {"tp": 3})


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_hooks_on_all_modules() -> None:
    for config in ({"tp": 2}, SP):
        as_plain(llama, [], config, every=True)


@pooled(world_size=2)
def test_norms_of_heads() -> None:
    def build(heads: int, kv_heads: int) -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 131}
        return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes))

    norms = ["model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm"]
    for heads, kv_heads in ((5, 1), (4, 2), (6, 3)):  # one KV head on both ranks, one on each, two and one
        as_plain(lambda heads=heads, kv_heads=kv_heads: build(heads, kv_heads), norms, {"tp": 2})
    model = autopar.initialize(build(4, 2), {"tp": 2})
    model.get_submodule(norms[0]).register_forward_hook(lambda *_: None)
    with raises_everywhere(ConfigError, "has as many positions as heads on this rank", "autopar.local_hooks(module)"):
        model(torch.arange(2).view(1, 2))


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_hooks_of_one_rank_raise_and_local_hooks_see_shards() -> None:
    model = autopar.initialize(llama(), {"tp": 2})
    if dist.get_rank() == 0:
        handle = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    with raises_everywhere(ConsistencyError, "hooks that see full tensors", "forward on model.layers.0.mlp.up_proj"):
        model(**language_batches(131)[0])
    if dist.get_rank() == 0:
        handle.remove()
    model(**language_batches(131)[0])

    model = autopar.initialize(llama(), {"tp": 2})
    layer, widths = model.model.layers[0].mlp.up_proj, []
    handle = layer.register_forward_hook(lambda module, args, output: widths.append(output.shape[-1]))
    model(**language_batches(131)[0])
    autopar.local_hooks(layer)
    model(**language_batches(131)[0])
    handle.remove()
    model(**language_batches(131)[0])
    assert widths == [37, 19 - model.mpu.tp.rank]


@pytest.mark.parametrize("config", [{"tp": 2}, SP], ids=["tp", "sp"])
@pooled(world_size=2)
def test_what_a_hook_writes_into_counts(config: Any) -> None:
    def halve(module: Any, args: Any, output: Any) -> None:
        _first(output)[..., 3:9] *= 0.5

    def double(module: Any, args: Any) -> None:
        args[0][..., 2] *= 2

    def write(module: Any, args: Any, output: Any) -> None:
        args[0].mul_(2)

    plain: Any = llama()
    model = autopar.initialize(copy.deepcopy(plain), config)
    losses = []
    for each in (plain, model):
        first, second = each.model.layers
        handles = [module.register_forward_hook(halve) for module in (first.mlp.gate_proj, second)]
        handles.append(second.mlp.down_proj.register_forward_pre_hook(double))
        losses.append(each(**language_batches(131)[0]).loss.detach() + 0)
        for handle in handles:
            handle.remove()
    close(losses[1], losses[0], "loss")
    assert abs(losses[0] - plain(**language_batches(131)[0]).loss) > 1e-3
    handle = model.model.layers[0].mlp.down_proj.register_forward_hook(write)
    with raises_everywhere(ConfigError, "the hook write", "must not change its module's sharded", "forward pre-hook"):
        model(**language_batches(131)[0])
    handle.remove()


@pytest.mark.parametrize("rows", [False, True])
@pooled(world_size=2)
def test_gradients_of_hidden_states_are_the_plain_models_where_blocks_have_all_rows(rows: bool) -> None:
    ids = torch.arange(16).view(2, 8)
    model = autopar.initialize(llama().train(), SP if rows else {"tp": 2})
    plain = llama().train()
    for name in ("plain", "own"):
        found = []
        for each in (plain, model):
            output = each(ids, labels=ids, use_cache=False, output_hidden_states=True)
            hidden = output.hidden_states[1]
            loss = output.loss if name == "plain" else hidden.square().sum()
            found.append(torch.autograd.grad(loss, hidden, allow_unused=True)[0])
        if rows and name == "plain":
            assert found[1] is None  # the page says so
        else:
            close(found[1], found[0], f"gradient of the {name} loss")


@pooled(world_size=2)
def test_the_activation_of_experts_whose_features_are_sharded() -> None:
    places = [f"model.layers.{number}.mlp.experts.act_fn" for number in range(2)]
    as_plain(lambda: mixtral(4, vocab_size=131), places, {"tp": 2})


KEPT = {
    "features": ["layers.0.self_attn.k_proj", "layers.0.mlp.gate_proj"],
    "activation": ["layers.1.mlp.act_fn", "layers.0.mlp.down_proj"],
    "blocks": ["layers.0", "layers.1.self_attn", "layers.0.mlp", "layers.0.post_attention_layernorm"],
    "ends": ["embed_tokens", "norm"],
}


def kept(model: Any, places: list[str], kind: str) -> list[torch.Tensor]:
    """Two micro-batches with hooks that return nothing and keep their tensors: gradients that these had."""
    found: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []

    def keep(value: Any) -> None:
        tensor = _first(value)
        if tensor.is_floating_point() and tensor.requires_grad:
            tensors.append(tensor)
            if kind == "changed":
                tensor.register_hook(lambda g: 1.1 * g)
            if kind == "retained":
                tensor.retain_grad()

    hooks: dict[str, Any] = {
        "made": lambda module, args, output: keep(output),
        "given": lambda module, args, kwargs, output: keep([*args, *kwargs.values()]),
        "before": lambda module, args, kwargs: keep([*args, *kwargs.values()]),
    }
    sharded = [each for layer in model.model.layers for each in (layer.mlp.act_fn, layer.mlp.down_proj)]
    handles = []
    for module in map(model.model.get_submodule, places):
        handles.append(module.register_forward_hook(hooks["made"]))
        handles.append(module.register_forward_pre_hook(hooks["before"], with_kwargs=True))
        if module not in sharded:  # elsewhere a forward hook gets a copy of the input
            handles.append(module.register_forward_hook(hooks["given"], with_kwargs=True))
    for batch in language_batches(131):
        tensors.clear()
        loss = model(**batch, use_cache=False).loss / 2
        if kind == "late":
            tensors[-1].register_hook(lambda g: g * 1.5)
        if kind == "asked":
            found += torch.autograd.grad(loss, tensors, retain_graph=True)
        held = list(tensors)
        loss.backward()
        found += [tensor.grad for tensor in held if tensor.grad is not None]
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.tier("test", only=("sp-activation", "sp-blocks"))
@pytest.mark.parametrize("place", KEPT)
@pytest.mark.parametrize("config", [{"tp": 2}, SP], ids=["tp", "sp"])
@pooled(world_size=2)
def test_what_a_hook_keeps_has_the_gradient_of_one_process(place: str, config: Any) -> None:
    counts = {}
    for kind in ("changed", "retained", "asked", "late"):
        plain: Any = llama(num_key_value_heads=1).train()
        model = autopar.initialize(copy.deepcopy(plain), config)
        gradients, expected = (kept(each, KEPT[place], kind) for each in (model, plain))
        counts[kind] = len(expected)
        for found, right in zip(gradients, expected, strict=True):
            close(found, right, f"gradient of what a hook kept ({kind})")
        for name, gradient in whole(model, lambda p: p.grad).items():
            close(gradient, plain.get_parameter(name).grad, f"{name} ({kind})")
    assert counts["retained"] == counts["asked"] > 0 == counts["changed"]
