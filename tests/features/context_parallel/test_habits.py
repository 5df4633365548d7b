"""What users do with a context-parallel model and its logits in their loops: equal to the reference model."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autopar
from autopar.errors import ConfigError, ConsistencyError
from autopar.tensor_parallel.sharded_logits import ShardedLogits
from tests.compare import same_gradients
from tests.exchange import raises_everywhere
from tests.features.context_parallel.test_exactness import METHODS, VOCAB, made, sizes
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama
from tests.tensor_parallel.test_sharded_logits import FROM_SHARDS, GATHERED, Gathered
from tests.tensor_parallel.test_sharded_logits_habits import HABITS


def _ids(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(3, 131, (batch, seq), generator=torch.Generator().manual_seed(seq))  # [batch, seq]


def pair(plain: Any, method: str = "auto", **config: Any) -> tuple[Any, Any]:
    """A plain model, and its copy over two context-parallel ranks."""
    return plain, autopar.initialize(copy.deepcopy(plain), {**sizes(2, method), **config})


def same(model: Any, plain: Any, compute: Callable[[Any], torch.Tensor], what: str = "") -> None:
    """``compute`` gives both the same number, and the same gradients."""
    expected, actual = compute(plain), compute(model)
    close(actual, expected, what)
    expected.backward()
    actual.backward()
    autopar.average_gradients(model)
    same_gradients(model, plain, 2e-5, what)


@pytest.mark.parametrize("method", METHODS)
@pooled(world_size=2)
def test_some_logits(method: str) -> None:
    """``logits_to_keep`` takes rows of what the blocks return: all of it."""
    plain, model = pair(llama(), method)
    same(model, plain, lambda each: each(input_ids=_ids(2, 9), logits_to_keep=3).logits.square().mean())


@pytest.mark.every_case
@pytest.mark.tier("sweep", only=("ulysses-True", "gather-False", "states-False"))
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "states"])
@pooled(world_size=2)
def test_recomputed_after_another_forward(method: str, reentrant: bool) -> None:
    """The backward pass recomputes rows of its own forward, whatever ran since; states that are handed on, too."""
    states = functools.partial(made, "qwen3_next", "Qwen3NextForCausalLM")
    plain, model = pair(states().train()) if method == "states" else pair(llama().train(), method)
    for each in (plain, model):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})

    def loss(each: Any) -> Any:
        first = each(input_ids=_ids(2, 9), labels=_ids(2, 9)).loss
        second = each(input_ids=_ids(3, 14), labels=_ids(3, 14)).loss
        with torch.no_grad():
            each(input_ids=_ids(1, 5))
        return first + 2 * second

    same(model, plain, loss)


@pytest.mark.parametrize("seq", [5, 8])
@pooled(world_size=2)
def test_router_logits(seq: int) -> None:
    """They are joined once, though two outputs hold them: 10 rows can be divided by one rank's 2, 16 by 4."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=131, num_hidden_layers=2, num_local_experts=4, output_router_logits=True, **sizes)
    plain, model = pair(MixtralForCausalLM(config))

    def loss(each: Any) -> Any:
        out = each(input_ids=_ids(2, seq), labels=_ids(2, seq))
        assert [tuple(x.shape) for x in out.router_logits] == [(2 * seq, 4)] * 2
        return out.loss + sum(x.square().mean() for x in out.router_logits)

    same(model, plain, loss)


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
    plain, model = pair(llama().train(), "ulysses")
    for each in (plain, model):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        each.set_attn_implementation("told")
    same(model, plain, lambda each: each(_ids(1, 9), labels=_ids(1, 9), position_ids=positions, use_cache=False).loss)
    assert len(seen) == 8 and all(torch.equal(each, positions) for each in seen)  # 2 blocks, recomputed, of 2 models


@pytest.mark.tier("test")
@pytest.mark.parametrize("averaged", [True, False])
@pooled(world_size=2)
def test_an_inner_step_takes_the_average_or_raises(averaged: bool) -> None:
    """MAML of first order: the inner step uses gradients that nothing has averaged yet."""
    plain, model = pair(llama().train())
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
        return torch.func.functional_call(each, fast, (), outer).loss

    if averaged:
        same(model, plain, meta_loss)
        return
    words = r"of one context-parallel group have drifted apart(.|\n)*Or gradients of torch.autograd.grad were used"
    with pytest.raises(ConsistencyError, match=words):
        meta_loss(model)


def one_step(of: Any, embed: nn.Module, prompt: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Train soft prompts before embeddings of a one-hot matrix, as GCG makes it. Returns the gradient of that."""
    ids, labels = batch["input_ids"], batch["labels"]
    hot = nn.functional.one_hot(ids, 131).float().requires_grad_()
    given = torch.cat([prompt.expand(len(ids), -1, -1), hot @ embed.weight], 1)
    seen = torch.ones(given.shape[:2], dtype=torch.long)
    counted = torch.cat([labels.new_full((len(ids), prompt.shape[0]), -100), labels], 1)
    of(inputs_embeds=given, attention_mask=seen, labels=counted).loss.backward()
    return hot.grad


def alike(build: Any, **more: int) -> None:
    plain = build().train()
    model = autopar.initialize(copy.deepcopy(plain), sizes(2, **more))
    table = copy.deepcopy(plain.get_input_embeddings())  # the user's own, whole
    prompts = [nn.Parameter(torch.linspace(-1, 1, 2 * table.weight.shape[1]).view(2, -1)) for _ in range(2)]
    for batch in language_batches(131, count=2, seq=9):
        mine, expected = (one_step(*each, batch) for each in ((model, table, prompts[0]), (plain, table, prompts[1])))
        close(mine, expected, "gradient of the one-hot matrix")
    close(prompts[0].grad, prompts[1].grad, "gradient of the prompt")
    plain.zero_grad()
    model.zero_grad()
    for each in (plain, model):  # through the model's own embedding
        each(inputs_embeds=each.get_input_embeddings()(batch["input_ids"]), labels=batch["labels"]).loss.backward()
    autopar.average_gradients(model)
    same_gradients(model, plain, 2e-5)
    model.mpu.destroy()


@pytest.mark.tier("test", only=("llama",))
@pytest.mark.parametrize("build", [llama, gpt2])
@pooled(world_size=2)
def test_gradients_of_inputs(build: Any) -> None:
    alike(build)


@pooled(world_size=4)
def test_gradients_of_inputs_beside_tensor_parallelism() -> None:
    alike(llama, tensor_parallel_size=2)
    alike(llama, tensor_parallel_size=2, sequence_parallel=True)


FROM_ROWS = {"shifted", "smoothed sum", "each token", "capped", "biased", "double", "module", "a copy"}


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_whatever_is_computed_of_them() -> None:
    (batch,) = language_batches(VOCAB, count=1)
    ids = labels = batch["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        gathered = Gathered(patch)
        plain, model = pair(llama())
        for name, function in {**FROM_SHARDS, **GATHERED, **{habit.__name__: habit for habit in HABITS}}.items():
            assert isinstance(model(ids).logits, ShardedLogits)
            before = gathered.times
            same(model, plain, lambda each, function=function: function(each(ids).logits, labels), name)
            assert (gathered.times > before) == (name not in FROM_ROWS), name
            for each in (plain, model):
                each.zero_grad()


def _norm_of_embeddings(each: Any, batch: Any) -> torch.Tensor:
    """A metric that nobody is to be trained by, in front of the blocks."""
    seen: list[torch.Tensor] = []

    def read(module: Any, args: Any, out: torch.Tensor) -> None:
        with torch.no_grad():
            seen.append(out.norm())

    autopar.local_hooks(each.get_input_embeddings())
    handle = each.get_input_embeddings().register_forward_hook(read)
    loss: torch.Tensor = each(**batch).loss
    handle.remove()
    assert len(seen) == 1 and not seen[0].requires_grad
    return loss


def _accuracy(each: Any, batch: Any) -> torch.Tensor:
    out = each(**batch)
    with torch.inference_mode():
        out.logits.argmax(-1)
    return out.loss + out.logits.square().mean()


@pytest.mark.parametrize("read", [_norm_of_embeddings, _accuracy])
@pooled(world_size=2)
def test_reading_without_gradients_takes_none_away(read: Callable[..., torch.Tensor]) -> None:
    (batch,) = language_batches(VOCAB, count=1)
    for build in (llama, gpt2):
        plain, model = pair(build())
        same(model, plain, lambda each: read(each, batch), build.__name__)


@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])
@pooled(world_size=2)
def test_a_loss_of_ones_own_behind_a_wrapper(how: str) -> None:
    """DDP then passes all outputs through a function of its own, which takes their place in the graph."""
    (batch,) = language_batches(VOCAB, count=1)
    labels = batch.pop("labels")
    plain, model = pair(llama())
    group = model.mpu.get_data_parallel_group(with_context_parallel=True)
    engine = DistributedDataParallel(model, process_group=group, **{how: True})
    for each in (plain, engine):
        F.cross_entropy(each(**batch).logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)).backward()
    same_gradients(model, plain, 2e-5)


@pooled(world_size=2)
def test_what_would_be_wrong_is_said_on_every_rank() -> None:
    (batch,) = language_batches(VOCAB, count=1)
    _, model = pair(llama())
    out = model(**batch)
    hidden, instead = model(**batch, output_hidden_states=True).hidden_states[1], "tensor_parallel_size or replicas"
    for loss in (out.loss, out.logits.square().mean(), hidden.sum()):
        with raises_everywhere(ConfigError, "create_graph=True is not supported with context_parallel_size", instead):
            torch.autograd.grad(loss, model.model.embed_tokens.weight, create_graph=True)
    labels = batch["labels"].clone()
    labels[0, -1] = VOCAB + 1  # of a row that one rank has
    with raises_everywhere(ConfigError, f"target {VOCAB + 1} is outside the vocabulary of {VOCAB} (1 such targets)"):
        model(**{**batch, "labels": labels})
    first, second = (model(**batch).logits for _ in range(2))
    with pytest.raises(ConsistencyError, match=r"rank 0 reads .* of forward \d+ of model \d+; rank 1 reads"):
        (second if dist.get_rank() else first).argmax(-1)

    model = autopar.initialize(llama().train(), sizes(2))
    given = torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(0)).requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ConsistencyError, match=r"inputs_embeds: rank 0: \[1, 8, 24\] \w+, requires a gradient"):
        model(inputs_embeds=given)
