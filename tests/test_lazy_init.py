"""Models that are built without memory: what they hold, and what initialize makes of them."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

import autopar
from autopar.errors import ConfigError
from tests.harness.worlds import pooled
from tests.parity import whole
from tests.random_models import build, cases
from tests.small import gpt2, lazily, llama, parallel

TYPES = ["gpt2", "llama", "mixtral", "bert", "t5", "bart", "bloom", "mamba2", "whisper", "albert", "vit"]
TYPES += ["vit_mae", "deepseek_v3"]


class Wrapper(nn.Module):
    """A Hugging Face model with parameters of the user's own beside it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Sequential(nn.Linear(24, 5), nn.LayerNorm(5))
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.recurrent = nn.LSTM(24, 3)
        self.register_buffer("steps", torch.arange(3.0), persistent=False)


def test_nothing_has_memory_but_buffers():
    model = lazily(llama())
    assert all(parameter.is_meta for parameter in model.parameters())
    plain = llama()
    for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert [*model.state_dict()] == [*plain.state_dict()]
    tied = lazily(gpt2())
    assert tied.lm_head.weight is tied.transformer.wte.weight
    with autopar.lazy_init():
        wrapped = Wrapper(LlamaForCausalLM(plain.config))
    assert all(parameter.is_meta for parameter in wrapped.parameters())
    assert torch.equal(wrapped.steps, torch.arange(3.0))


def test_everything_is_as_before_afterwards():
    before = (nn.Module.register_parameter, PreTrainedModel.init_weights, PreTrainedModel._load_pretrained_model)
    for error in (False, True):
        try:
            with autopar.lazy_init():
                if error:
                    raise RuntimeError("in between")
        except RuntimeError:
            pass
        now = (nn.Module.register_parameter, PreTrainedModel.init_weights, PreTrainedModel._load_pretrained_model)
        assert now == before
    assert not nn.Linear(2, 2).weight.is_meta
    assert not torch.empty(2).is_meta


def test_it_draws_what_transformers_draws():
    plain = llama(tie_word_embeddings=False)
    for module in plain.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(3)
    plain.initialize_weights()
    model = lazily(plain)
    torch.manual_seed(3)
    autopar.initialize(model)
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


@pytest.mark.tier("test", only=("gpt2",))
@pytest.mark.parametrize("model_type", TYPES)
@pooled(world_size=2)
def test_the_size_of_tensor_parallelism_does_not_matter(model_type):
    plain = build(cases(model_type)[0], 6, 3)
    weights = []
    for size in (1, 2):
        torch.manual_seed(7 + dist.get_rank())  # rank 0's counts
        model = parallel(lazily(plain), size)
        assert all(not parameter.is_meta for parameter in model.parameters())
        weights.append(whole(model, lambda parameter: parameter.data))
    assert list(weights[0]) == list(weights[1])
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
        everyone = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(everyone, tensor)
        assert torch.equal(*everyone), name


@pooled(world_size=2)
def test_modules_of_the_users_own():
    results = []
    for size in (1, 2):
        config = llama().config
        torch.manual_seed(7 + dist.get_rank())
        with autopar.lazy_init():
            model = Wrapper(LlamaForCausalLM(config))
        optimizer = torch.optim.AdamW(model.parameters())
        identities = [id(parameter) for parameter in model.parameters()]
        parallel(model, size)
        assert identities == [id(parameter) for parameter in model.parameters()]
        assert identities == [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
        assert torch.equal(model.scale.detach(), torch.tensor([0.5, 2.0]))
        assert torch.equal(model.head[1].weight.detach(), torch.ones(5))
        assert 0 < model.head[0].weight.abs().max() <= 24**-0.5
        model.recurrent(torch.zeros(1, 24))[0].sum().backward()
        results.append(whole(model, lambda parameter: parameter.data))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


@pooled(world_size=2)
def test_a_pretrained_model_inside_a_module(tmp_path):
    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path)
    dist.barrier()
    with autopar.lazy_init():
        model = Wrapper(LlamaForCausalLM.from_pretrained(tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters())
    parallel(model, 2)
    weights = whole(model, lambda parameter: parameter.data)
    for name, parameter in llama().named_parameters():
        assert torch.equal(weights[f"model.{name}"], parameter), name


class Forgotten(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.gate = nn.Parameter(torch.empty(3))


class HalfForgotten(Forgotten):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gate[:2].fill_(1.0)


@pooled(world_size=2)
def test_what_nothing_initializes_is_an_error():
    config = gpt2().config
    for kind in (Forgotten, HalfForgotten):
        with autopar.lazy_init():
            model = kind(GPT2LMHeadModel(config))
        with pytest.raises(ConfigError, match=rf"1 parameters of {kind.__name__} their values: gate"):
            parallel(model, 2)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.model.lm_head.weight is model.model.transformer.wte.weight
    model.gate = nn.Parameter(torch.zeros(3))
    assert parallel(model, 2).gate.tolist() == [0, 0, 0]


class LooksAtValues(LlamaForCausalLM):
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and module.weight.std().item() > 1e-3:
            nn.init.constant_(module.weight, 0.25)


@pooled(world_size=2)
def test_an_init_that_looks_at_values_and_a_copy_in_another_dtype():
    config = llama().config
    with autopar.lazy_init():
        model = LooksAtValues(config)
    parallel(model, 2)
    assert (model.lm_head.weight == 0.25).all()
    assert model.model.embed_tokens.weight.std() > 0.05

    model = copy.deepcopy(lazily(gpt2())).to(torch.bfloat16)
    parallel(model, 2)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.is_meta or parameter.isnan().any() for parameter in model.parameters())


@pooled(world_size=2)
def test_only_one_block_is_whole_at_a_time():
    model = lazily(gpt2(n_layer=6))
    held: list[int] = []
    from autopar.deferred_init import materialize

    real = materialize.replace_storage

    def counting(parameter: nn.Parameter, data: torch.Tensor) -> None:
        real(parameter, data)
        held.append(sum(p.numel() for p in model.parameters() if not p.is_meta))

    materialize.replace_storage = counting  # type: ignore[assignment]
    try:
        parallel(model, 2)
    finally:
        materialize.replace_storage = real
    drawing = held[: held.index(0, 1) + 1]
    block = sum(p.numel() for p in gpt2().transformer.h[0].parameters())
    largest = max(p.numel() for p in gpt2().parameters())
    assert max(drawing) <= max(block, largest)


@pooled(world_size=2)
def test_ranks_that_do_not_agree():
    with torch.device("meta"):
        without_values = GPT2LMHeadModel(gpt2().config)
    for first in (gpt2(), without_values):
        with pytest.raises(autopar.ConsistencyError):
            parallel(lazily(gpt2()) if dist.get_rank() else first, 2)


def test_the_default_device_does_not_matter():
    plain = llama()
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            with autopar.lazy_init():
                model = LlamaForCausalLM(plain.config)
            found.append(autopar.initialize(model))
    for (name, one), other in zip(found[0].state_dict().items(), found[1].state_dict().values(), strict=True):
        assert other.device.type == "cpu" and torch.equal(one, other), name
    for (name, one), other in zip(plain.named_buffers(), found[1].buffers(), strict=True):
        assert torch.equal(one, other), name


def test_buffers_without_values_are_refused():
    config = llama().config
    message = r"the buffer \w*inv_freq of a LlamaRotaryEmbedding must have values, but is on the meta device"
    with pytest.raises(ConfigError, match=message), autopar.lazy_init(), torch.device("meta"):
        model = LlamaForCausalLM(config)
    del model
    with autopar.lazy_init(), torch.device("meta"):
        torch.nn.BatchNorm1d(3)  # as a constructor that replaces what another one made


@pytest.mark.parametrize("inside", [False, True])
def test_values_follow_a_weight_to_another_module(tmp_path, inside):
    plain = gpt2(tie_word_embeddings=False)
    assert not torch.equal(plain.lm_head.weight, plain.transformer.wte.weight)
    plain.save_pretrained(tmp_path)
    with autopar.lazy_init():
        model = GPT2LMHeadModel.from_pretrained(tmp_path)
        if inside:
            model.transformer.wte.weight = model.lm_head.weight
    model.transformer.wte.weight = model.lm_head.weight
    autopar.initialize(model)
    assert torch.equal(model.transformer.wte.weight, plain.lm_head.weight)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)


def test_parameters_that_came_later_are_refused():
    model = lazily(gpt2(tie_word_embeddings=False))
    model.lm_head = nn.Linear(36, 131, bias=False, device="meta")
    with pytest.raises(ConfigError, match=r"1 parameters of GPT2LMHeadModel have no memory .*: lm_head\.weight"):
        autopar.initialize(model)
    model.lm_head = nn.Linear(36, 131, bias=False)
    assert torch.isfinite(autopar.initialize(model).lm_head.weight).all()
