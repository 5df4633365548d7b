"""What users do with logits and embeddings of which each rank has some rows: the plain model's values and gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import ConfigError, ConsistencyError
from autopar.tensor_parallel import sharded_logits
from autopar.tensor_parallel.sharded_logits import ShardedLogits
from tests.compare import same_gradients
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama
from tests.tensor_parallel.test_sharded_logits import FROM_SHARDS, GATHERED
from tests.tensor_parallel.test_sharded_logits_habits import HABITS

VOCAB = 131
FROM_ROWS = {"shifted", "smoothed sum", "each token", "capped", "biased", "double", "module", "a copy"}


def made(build: Callable[[], Any] = llama, **config: Any) -> tuple[Any, Any]:
    plain = build()
    sizes = {"context_parallel_size": 2, **config.pop("sizes", {})}
    return plain, autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes, **config})


def same(plain: Any, model: Any, compute: Callable[[Any], torch.Tensor], what: str) -> None:
    """``compute`` gives both the same number, and the same gradients."""
    expected, actual = compute(plain), compute(model)
    close(actual, expected, what)
    expected.backward()
    actual.backward()
    autopar.average_gradients(model)
    same_gradients(model, plain, 2e-5, what)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_whatever_is_computed_of_them() -> None:
    (batch,) = language_batches(VOCAB, count=1)
    ids = labels = batch["input_ids"]
    meetings: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        meet = sharded_logits.meet
        patch.setattr(sharded_logits, "meet", lambda *args: meetings.append(args[1]) or meet(*args))
        plain, model = made()
        for name, function in {**FROM_SHARDS, **GATHERED, **HABITS}.items():
            assert isinstance(model(ids).logits, ShardedLogits)
            meetings.clear()
            same(plain, model, lambda each, function=function: function(each(ids).logits, labels), name)
            assert bool(meetings) == (name not in FROM_ROWS), name
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
        plain, model = made(build)
        same(plain, model, lambda each: read(each, batch), build.__name__)


@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])
@pooled(world_size=2)
def test_a_loss_of_ones_own_behind_a_wrapper(how: str) -> None:
    """DDP then passes all outputs through a function of its own, which takes their place in the graph."""
    (batch,) = language_batches(VOCAB, count=1)
    labels = batch.pop("labels")
    plain, model = made()
    group = model.mpu.get_data_parallel_group(with_context_parallel=True)
    engine = DistributedDataParallel(model, process_group=group, **{how: True})
    for each in (plain, engine):
        F.cross_entropy(each(**batch).logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)).backward()
    same_gradients(model, plain, 2e-5)


@pooled(world_size=2)
def test_sharded_weights_gather_no_logits() -> None:
    """FSDP2 asks every output when its gradient comes."""
    (batch,) = language_batches(VOCAB, count=1)
    plain, model = llama(), llama()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, model)]
    model, optimizers[1] = autopar.initialize(model, {"cp": 2, "zero": {"stage": 3}}, optimizer=optimizers[1])
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            out = each(**batch)
            assert each is plain or not out.logits.is_full
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        close(parameter.full_tensor(), plain.get_parameter(name), name)


@pooled(world_size=2)
def test_what_would_be_wrong_is_said_on_every_rank() -> None:
    (batch,) = language_batches(VOCAB, count=1)
    _, model = made()
    out = model(**batch)
    for loss in (
        out.loss,
        out.logits.square().mean(),
        model(**batch, output_hidden_states=True).hidden_states[1].sum(),
    ):
        with raises_everywhere(
            ConfigError,
            "create_graph=True is not supported with context_parallel_size",
            "tensor_parallel_size or replicas",
        ):
            torch.autograd.grad(loss, model.model.embed_tokens.weight, create_graph=True)
    labels = batch["labels"].clone()
    labels[0, -1] = VOCAB + 1  # of a row that one rank has
    with raises_everywhere(ConfigError, f"target {VOCAB + 1} is outside the vocabulary of {VOCAB} (1 such targets)"):
        model(**{**batch, "labels": labels})
    first, second = (model(**batch).logits for _ in range(2))
    with pytest.raises(ConsistencyError, match=r"rank 0 reads .* of forward \d+ of model \d+; rank 1 reads"):
        (second if dist.get_rank() else first).argmax(-1)
