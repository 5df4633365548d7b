"""What scripts do to logits beside computing a loss: they change them in place, keep them, look at their gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.errors import ConsistencyError
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama, parallel
from tests.tensor_parallel.test_sharded_logits import compare
from tests.three_steps import case, trained

VOCAB = 131
FIRST = torch.tensor([1, 0])


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB).float(), labels.reshape(-1))


def _transposed(x: Any, y: Any) -> Any:
    x.transpose(1, 2).mul_(0.5)
    return loss(x, y)


def _one_column(x: Any, y: Any) -> Any:
    x[..., 7].fill_(-3)
    x.narrow(-1, 0, 5).fill_(0.1)
    return loss(x, y)


def _data(x: Any, y: Any) -> Any:
    x.data[..., 7] = -3
    x.detach().mul_(0.5)
    return loss(x, y)


def _numpy(x: Any, y: Any) -> Any:
    x.detach().numpy()[..., 3] = -1
    return loss(x, y)


def _foreach(x: Any, y: Any) -> Any:
    torch._foreach_mul_([x.detach()], 0.5)
    F.relu(x, inplace=True)
    return loss(x, y)


def _flat(x: Any, y: Any) -> Any:
    flat = x[:, :-1].reshape(-1, VOCAB)  # a copy
    flat[:, 7] = -3
    return F.cross_entropy(flat, y[:, 1:].reshape(-1)) + x.square().mean()


def _chosen(x: Any, y: Any) -> Any:
    some = x[y > 10]
    some.mul_(0.5)
    turned = x[FIRST]
    turned[..., 3] = 0
    return F.cross_entropy(some, y[y > 10]) + loss(turned, y[FIRST]) + x.square().mean()


def _wide(x: Any, y: Any) -> Any:
    wide = x.float()
    wide[..., 7] = -3
    wide.div_(2)
    return loss(wide, y)


def _contiguous(x: Any, y: Any) -> Any:
    some = x[..., :-1, :].contiguous()
    some[..., 7] = -3
    some.mul_(0.5)
    return F.cross_entropy(some.view(-1, VOCAB), y[:, 1:].reshape(-1)) + x.square().mean()


def _copied(x: Any, y: Any) -> Any:
    kept = x.clone()
    x.mul_(0.5)
    return loss(kept, y) + loss(x, y)


def _biased_before(x: Any, y: Any) -> Any:
    bias = torch.linspace(-1, 1, VOCAB)
    biased = x + bias
    bias.fill_(5.0)
    x.mul_(3.0)
    return loss(biased, y)


def _read_without_gradients(x: Any, y: Any) -> Any:
    with torch.no_grad():
        x.argmax(-1)
    with torch.inference_mode():
        x.argmax(-1)
    return x.log_softmax(-1)[..., 3].mean() + loss(x, y)


def _kept_without_gradients(x: Any, y: Any) -> Any:
    with torch.no_grad():
        kept, wide, some, scaled = x.clone(), x.float(), x[:, :-1], x * 2
    assert not kept.requires_grad and not scaled.requires_grad
    return loss(x, y) + loss(kept, y) + loss(wide, y).detach() + some.mean().detach() + scaled.mean()


def _leaf(x: Any, y: Any) -> Any:
    leaf = x.detach()
    leaf.requires_grad_(True)
    loss(leaf, y).backward()
    return (x * leaf.grad).sum()


def _hook(x: Any, y: Any) -> Any:
    x.register_hook(lambda grad: grad * 0.5)
    return loss(x, y)


def _own_gradient(x: Any, y: Any) -> Any:
    x.retain_grad()
    loss(x, y).backward(retain_graph=True)
    (also,) = torch.autograd.grad(loss(x, y), x, retain_graph=True)
    return (x * (x.grad + also)).sum()


def _like(x: Any, y: Any) -> Any:
    assert torch.zeros_like(x).shape == x.new_zeros(x.shape).shape == x.shape
    return loss(torch.where(torch.ones_like(x) > 0, x, torch.full_like(x, -1.0)), y)


HABITS: tuple[Callable[[Any, Any], Any], ...] = (
    *(_transposed, _one_column, _data, _numpy, _foreach, _flat, _chosen, _wide, _contiguous, _copied),
    *(_biased_before, _read_without_gradients, _kept_without_gradients, _leaf, _hook, _own_gradient, _like),
)


@pytest.mark.parametrize("chunk", [0, 3])
@pooled(world_size=2)
def test_habits(chunk: int) -> None:
    compare({habit.__name__: habit for habit in HABITS}, llama, chunk)


@pooled(world_size=2)
def test_half_precision() -> None:
    (batch,) = language_batches(VOCAB, count=1)
    ids = labels = batch["input_ids"]
    plain = llama().bfloat16()
    model = parallel(copy.deepcopy(plain), 2)
    for habit in (_wide, _contiguous, _flat, _copied):
        expected, actual = (habit(each(ids).logits, labels) for each in (plain, model))
        assert abs(float(actual) - float(expected)) < 0.05, habit
    with torch.autocast("cpu", torch.bfloat16):
        plain, model = llama(), parallel(llama(), 2, loss={"chunk": 3})
        expected, actual = (
            F.cross_entropy(each(ids).logits.view(-1, VOCAB), labels.view(-1)) for each in (plain, model)
        )
        assert actual.dtype == expected.dtype == torch.float32
        assert abs(float(actual) - float(expected)) < 0.05


@pooled(world_size=2)
def test_a_compiled_loss() -> None:
    (batch,) = language_batches(VOCAB, count=1)
    ids, labels = batch["input_ids"], batch["input_ids"]
    plain = gpt2()
    model = parallel(copy.deepcopy(plain), 2)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(x.float().log_softmax(-1).view(-1, VOCAB), labels.view(-1))

    compute(plain(ids).logits).backward()
    torch.compile(compute, backend="eager")(model(ids).logits).backward()
    same_gradients(model, plain, 2e-5)


@pooled(world_size=2)
def test_logits_in_chunks_are_read_before_the_weights_change() -> None:
    ids = torch.arange(6)[None]
    model = parallel(gpt2(), 2, loss={"chunk": 4})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    message = r"logits are read after the backward pass or a step .*\n.*read them before, or use loss: \{chunk: 0\}"
    output = model(ids, labels=ids)
    expected = gpt2()(ids).logits
    close(output.logits.square(), expected.square(), "before")
    output.loss.backward()
    optimizer.step()
    close(output.logits + 0, expected, "kept, since it was read before")
    output = model(ids, labels=ids)
    output.loss.backward()
    with pytest.raises(ConsistencyError, match=message):
        output.logits.argmax(-1)
    output = model(ids, labels=ids)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(ConsistencyError, match=message):
        output.logits.argmax(-1)


@pooled(world_size=2)
def test_what_was_lost_is_said() -> None:
    """A loss of the model's own is taken before anybody can ask for gradients of logits."""
    ids = torch.arange(6)[None]
    output = parallel(gpt2(), 2)(ids, labels=ids)
    for what, ask in {
        "register_hook": lambda: output.logits.register_hook(print),
        "retain_grad": output.logits.retain_grad,
        "grad": lambda: torch.autograd.grad(output.loss, output.logits),
    }.items():
        with pytest.raises(RuntimeError, match=rf"{what} is not .* get no gradient\.\n.*gather_logits: always"):
            ask()


@pooled(world_size=2)
def test_two_models_are_not_mixed_up() -> None:
    ids = torch.arange(6)[None]
    models = [parallel(gpt2(seed=seed), 2) for seed in (0, 1)]
    outputs = [model(ids).logits for model in models]
    mine = outputs if dist.get_rank() == 0 else outputs[::-1]
    with pytest.raises(ConsistencyError, match=r"read different values: rank 0 reads .* of model \d+; rank 1"):
        mine[0].argmax(-1)
    for output, seed in zip(outputs, (0, 1), strict=True):
        close(output + 0, gpt2(seed=seed)(ids).logits, "each by itself")
    assert f"{outputs[0]}" == repr(outputs[0])


@pytest.mark.tier("all")
@pooled(world_size=4)
def test_weights_sharded_over_replicas() -> None:
    """FSDP2 asks every output for its gradient."""
    for chunk in (0, 3):
        trained(
            "cpu", *case(extra={"zero": {"stage": 3}, "loss": {"chunk": chunk}}, tensor_parallel_size=2), moved=False
        )
