"""Loading under ZeRO 2 and 3: the weights of the single-process model, and of them a rank's own rows alone."""

import copy
import functools
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

import autopar
from autopar.deferred_init import materialize
from autopar.storage.hugging_face import Sketch
from autopar.tools.compat.operators import in_parts
from tests.checkpoint.loading import shared
from tests.features.experts.mixtures import mixtral
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, lazily, llama


def odd(**more: Any) -> Any:
    """Its 6 columns, 5 rows and 13 tokens are dealt unevenly to 4 ranks."""
    sizes = {"hidden_size": 6, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 5}
    return llama(**sizes, vocab_size=13, **more)


MODELS: dict[str, Callable[..., Any]] = {
    "gpt2": lambda: gpt2(n_layer=4),
    "odd": lambda: odd(num_hidden_layers=4),
    "tied": lambda: llama(num_hidden_layers=4, tie_word_embeddings=True),
    "mixtral": lambda: mixtral(num_hidden_layers=4).float(),
}
ZERO2, ZERO3 = {"zero": {"stage": 2}}, {"zero": {"stage": 3}}
MESHES: dict[str, dict[str, Any]] = {
    "dp 4, ZeRO 3": ZERO3,
    "tp 2 x dp 2": {"tp": 2, **ZERO3},
    "pp 2 x dp 2": {"pp": 2, **ZERO3},
    "dp 4, ZeRO 2": ZERO2,
    "shards of 2": {"zero": {"stage": 3, "shard_size": 2}},
    "experts": {"model_parallelism": {"tensor_parallel_size": 2, "expert_parallel_size": 4}, **ZERO3},
}

CASES = [(mesh, name) for mesh in MESHES for name in (MODELS if mesh != "experts" else ["mixtral"])]


def drawn(model: Any, mesh: dict[str, Any]) -> Any:
    torch.manual_seed(5 + dist.get_rank())  # rank 0's counts
    return autopar.initialize(lazily(model), copy.deepcopy(mesh))


def loaded(model: Any, folder: str, mesh: dict[str, Any], **options: Any) -> Any:
    return autopar.from_pretrained(type(model), folder, copy.deepcopy(mesh), **options)


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in autopar.hf_weights(model)}


def assert_weights(model: Any, expected: dict[str, torch.Tensor]) -> None:
    assert all(isinstance(parameter, DTensor) and not parameter.is_meta for parameter in model.parameters())
    found = whole(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.tier("test", only=("dp 4, ZeRO 3-odd",))
@pytest.mark.parametrize(("mesh", "name"), [pytest.param(*case, id="-".join(case)) for case in CASES])
@pooled(world_size=4)
def test_weights_are_those_of_the_single_process_model(tmp_path, mesh, name):
    plain, config = MODELS[name](), MESHES[mesh]
    folder, single = shared(tmp_path / "plain", plain), {"model_parallelism": {"tensor_parallel_size": 1}}
    weights = whole(autopar.initialize(copy.deepcopy(plain), single))
    draws = whole(drawn(plain, single))
    assert not any(torch.equal(draws[key], tensor) for key, tensor in weights.items() if tensor.ndim > 1)

    model = loaded(plain, folder, config)
    assert_weights(model, weights)
    model.save_parallelized(str(tmp_path / "shards"))
    batch = next(iter(language_batches(plain.config.vocab_size, count=1, batch=4, seq=9, seed=1)))
    for each in (model, plain.train()):  # the shards are those that FSDP2 gathers
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
        if each is model and model.mpu.pp.size > 1:
            model.train().execute_pipeline(dict(batch), optimizer=optimizer)
        else:
            each.train()(**batch).loss.backward()
        optimizer.step()
    trained = whole(model)
    for key, tensor in whole(autopar.initialize(plain, single)).items():
        close(trained[key], tensor, key)
    model.from_parallelized(str(tmp_path / "shards"))
    assert_weights(model, weights)

    for model, expected in ((loaded(plain, str(tmp_path / "shards"), config), weights), (drawn(plain, config), draws)):
        assert_weights(model, expected)


@pooled(world_size=2)
def test_values_are_rounded_as_in_memory(tmp_path):
    plain = gpt2()
    folder, config = shared(tmp_path, plain), {**ZERO3, "precision": {"dtype": "bf16"}}

    def adamw(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": [*model.parameters()][:3], "lr": 0.1}, {"params": [*model.parameters()][3:]}]
        )

    model, optimizer = loaded(plain, folder, config, dtype=torch.bfloat16, optimizer=adamw)
    expected = {name: tensor.bfloat16() for name, tensor in plain.state_dict().items()}
    found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].float()), name
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [*map(id, stepped)] == [*map(id, model.parameters())]
    before = stepped[0].full_tensor()
    loss = model.train()(torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss
    optimizer.scale_loss(loss).backward()
    optimizer.step()
    assert not torch.equal(stepped[0].full_tensor(), before)
    torch.manual_seed(3)
    with autopar.lazy_init():
        half = type(plain)(copy.deepcopy(plain.config)).to(torch.bfloat16)
    model = autopar.initialize(half, {**ZERO3, "precision": {"dtype": "bf16"}})
    for name, parameter in model.named_parameters():
        tensor = parameter.full_tensor()
        assert tensor.dtype == torch.float32 and torch.equal(tensor, tensor.bfloat16().float()), name


@pooled(world_size=2)
def test_frozen_and_own_parameters_and_values_of_the_constructor():
    class Wrapper(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model
            self.scale = torch.nn.Parameter(torch.tensor([0.5, 2.0, 3.0]), requires_grad=False)
            self.register_buffer("steps", torch.arange(3.0))

    config = llama().config
    with autopar.lazy_init():
        model = Wrapper(LlamaForCausalLM(config))
    model.model.lm_head.weight.requires_grad_(False)
    autopar.initialize(model, ZERO3)
    assert model.scale.full_tensor().tolist() == [0.5, 2.0, 3.0] and model.steps.tolist() == [0, 1, 2]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"scale", "model.lm_head.weight"}
    assert not any("_autopar_sources" in vars(module) for module in model.modules())


class _Held(TorchDispatchMode):
    """The most elements, of four bytes each, that tensors which operations returned have held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_parts(types):
            return NotImplemented  # its operators on plain tensors come here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not (leaf.is_meta or isinstance(leaf, Sketch)):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.alive:
                    gone = functools.partial(lambda key, _: self.alive.pop(key, None), storage._cdata)
                    self.alive[storage._cdata] = weakref.ref(storage, gone), storage.nbytes() // 4
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


class _InTurn(Executor):
    """Runs at once what reading threads run: a dispatch mode sees one thread."""

    def __init__(self, *_: Any) -> None:
        pass

    def map(self, function: Any, *values: Any, **_: Any) -> Any:  # type: ignore[override]
        return map(function, *values)


@pytest.mark.every_case
@pytest.mark.parametrize("mesh", [*(name for name in MESHES if name != "experts"), "tp 4", "pp 4"])
@pooled(world_size=4)
def test_a_rank_never_holds_more_than_its_share_and_a_block(tmp_path, mesh):
    plain = llama(num_hidden_layers=12, vocab_size=40, hidden_size=48, intermediate_size=64)
    folder = shared(tmp_path / "plain", plain)
    config = MESHES.get(mesh) or {mesh[:2]: 4}
    block = sum(parameter.numel() for parameter in plain.model.layers[0].parameters())
    buffers = sum(buffer.numel() for buffer in plain.buffers())
    with mock.patch.object(materialize, "ThreadPoolExecutor", _InTurn):
        for at, make in enumerate(
            (
                lambda: drawn(plain, config),
                lambda: loaded(plain, folder, config),
                lambda: loaded(plain, str(tmp_path / "shards"), config),
            )
        ):
            with _Held() as held:
                model = make()
            local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
            share = sum(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in local)
            total = sum(parameter.numel() for parameter in plain.parameters())
            assert share <= total * (0.55 if "2" in mesh.replace("ZeRO 2", "") else 0.35)
            assert share <= held.most <= share + block + buffers, (at, held.most, share, block)
            if at == 0:
                model.save_parallelized(str(tmp_path / "shards"))
            with _Held() as held:
                model.from_parallelized(str(tmp_path / "shards"))
            assert held.most <= share + block  # its own shards are among what it touches
