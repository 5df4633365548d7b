"""Transforms of torch.func and forward mode through sharded layers: the numbers of the plain model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import autopar
from autopar.errors import ConfigError
from autopar.tensor_parallel import overlap, vocab_parallel_cross_entropy
from tests.distributed.test_derivatives import HOW, MODELS
from tests.distributed.transforms import (
    IDS,
    LABELS,
    MASK,
    Loss,
    Tensors,
    directions_of,
    gradients_of,
    parallel_with,
    same,
    second_of,
    weights_of,
    whole_of,
)
from tests.parity import close
from tests.pool import pooled
from tests.small import gpt2, llama
from tests.worlds import raises_everywhere

# In double, but norms of a Llama and the loss of transformers are computed in fp32.
TOLERANCE = {("gpt2", False): 1e-9, ("gpt2", True): 2e-6, ("llama", False): 1e-5, ("llama", True): 1e-5}


def _logit_row(model: Any, weights: Tensors) -> torch.Tensor:
    logits: torch.Tensor = functional_call(model, weights, kwargs={"input_ids": IDS, "attention_mask": MASK}).logits
    return logits[1, 2, 60:70]  # of two ranks, and of three


def _as_plain(kind: str, how: str) -> None:
    plain: Any = MODELS[kind]().double()
    model = parallel_with(plain, how)
    for given in (True, False):
        _loss_as_plain(model, plain, given, TOLERANCE[kind, given])
    _jacobian_as_plain(model, plain, TOLERANCE[kind, False])


def _loss_as_plain(model: Any, plain: Any, given: bool, tolerance: float) -> None:
    weights, directions, known = weights_of(model), directions_of(model), dict(plain.named_parameters())
    of, of_plain, what = Loss(model, given), Loss(plain, given), "labels" if given else "logits"
    expected = of_plain(known)
    gradients = gradients_of(expected, plain)

    found, loss = grad_and_value(of)(weights)
    close(loss, expected.detach(), f"{what}: loss", tolerance)
    same(whole_of(model, found), gradients, f"{what}: grad", tolerance)

    each = [gradients_of(of_plain(known, slice(i, i + 1)), plain) for i in range(3)]
    stacked = {name: torch.stack([one[name] for one in each]) for name in gradients}
    same(whole_of(model, of.samples(), samples=True), stacked, f"{what}: gradients of samples", tolerance)

    along = sum((gradients[name] * x).sum() for name, x in directions_of(plain).items())
    close(jvp(of, (weights,), (directions,))[1], torch.as_tensor(along).to(loss), f"{what}: jvp", tolerance)
    product = jvp(grad(of), (weights,), (directions,))[1]
    same(whole_of(model, product), second_of(of_plain, plain), f"{what}: Hessian times a vector", tolerance)


def _jacobian_as_plain(model: Any, plain: Any, tolerance: float) -> None:
    weights, row = weights_of(model), _logit_row(plain, dict(plain.named_parameters()))
    rows = [gradients_of(one, plain, retain_graph=True) for one in row]
    stacked = {name: torch.stack([one[name] for one in rows]) for name in rows[0]}
    jacobian = jacrev(lambda weights: _logit_row(model, weights))(weights)
    same(whole_of(model, jacobian, samples=True), stacked, "jacrev", tolerance)
    made, back = vjp(lambda weights: _logit_row(model, weights), weights)
    by_hand = {name: x.sum(0) for name, x in stacked.items()}
    same(whole_of(model, back(torch.ones_like(made))[0]), by_hand, "vjp", tolerance)


@pytest.mark.tier("test", only=("gpt2-tp", "llama-sp"))
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", MODELS)
@pooled(world_size=2)
def test_transforms_in_the_weights_are_the_plain_models(kind: str, how: str) -> None:
    least, overlap._LEAST = overlap._LEAST, 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", autopar.ShardWarning)
            _as_plain(kind, how)
    finally:
        overlap._LEAST = least


@pytest.mark.parametrize("kind", MODELS)
@pooled(world_size=3)
def test_over_uneven_shards(kind: str) -> None:
    for how in ("tp", "sp"):
        _as_plain(kind, how)


@pooled(world_size=2)
def test_forward_mode_without_functional_transforms() -> None:
    plain: Any = gpt2(attn_implementation="eager").double()
    model = parallel_with(plain)
    loss, known, gradients = Loss(model, False), dict(plain.named_parameters()), {}
    gradients = gradients_of(Loss(plain, False)(known), plain)
    along = torch.stack([(gradients[name] * x).sum() for name, x in directions_of(plain).items()]).sum()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        expected = loss(weights)
    with forward_ad.dual_level():
        assert torch.equal(loss(weights), expected), "nothing is dual"
        dual = {name: forward_ad.make_dual(weights[name], x) for name, x in directions_of(model).items()}
        with torch.no_grad():
            close(forward_ad.unpack_dual(loss(dual)).tangent, along, "without gradients", 1e-9)
        found = gradients_of(loss(dual), model)
        product = {name: forward_ad.unpack_dual(x).tangent.detach() for name, x in found.items()}
    same(whole_of(model, product), second_of(Loss(plain, False), plain), "backward of dual tensors", 1e-9)


@pytest.mark.tier("test", only=("tp",))
@pytest.mark.parametrize("how", HOW)
@pooled(world_size=2)
def test_gradients_that_come_batched_or_dual(how: str) -> None:
    """One backward pass for all of them, of a graph that was made without transforms."""
    plain: Any = gpt2(attn_implementation="eager").double()
    model = parallel_with(plain, how)
    least, overlap._LEAST = overlap._LEAST, 1
    try:
        for of in (
            lambda logits: F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()),
            lambda logits: logits[1, 2, 60:70],
        ):
            expected, output = (of(each(input_ids=IDS).logits) for each in (plain, model))
            given = torch.randn(4, *output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
            rows = [gradients_of(expected, plain, grad_outputs=one, retain_graph=True) for one in given]
            stacked = {name: torch.stack([one[name] for one in rows]) for name in rows[0]}
            found = vmap(lambda one, of=output: gradients_of(of, model, grad_outputs=one, retain_graph=True))(given)
            same(whole_of(model, found, samples=True), stacked, "batched", 1e-9)
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(given[0].clone(), given[1].clone())
                found = gradients_of(output, model, grad_outputs=dual)
                tangents = {name: forward_ad.unpack_dual(x).tangent for name, x in found.items()}
            same(whole_of(model, tangents), rows[1], "dual", 1e-9)
    finally:
        overlap._LEAST = least


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_hessians_and_transforms_of_transforms() -> None:
    plain: Any = gpt2(attn_implementation="eager").double()
    model, name = parallel_with(plain), "transformer.h.1.ln_1.weight"

    def of(each: Any) -> Any:
        weights, loss = weights_of(each), Loss(each, False)
        return lambda weight: loss({**weights, name: weight})

    weight = plain.get_parameter(name).detach()
    expected: Any = torch.autograd.functional.hessian(of(plain), weight)
    for second in (hessian, lambda f: jacrev(jacrev(f))):
        close(second(of(model))(weight), expected, "Hessian", 1e-9)
    # torch's own derivative of a tangent of its layer norm is off: no symmetric matrix.
    for second in (lambda f: jacrev(jacfwd(f)), lambda f: jacfwd(jacfwd(f))):
        close(second(of(model))(weight), second(of(plain))(weight), "Hessian of tangents", 1e-9)
    given = torch.randn(3, 7, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with raises_everywhere(ConfigError, "torch.func.linearize records operations", "torch.func.jvp computes the same"):
        linearize(lambda x: model(inputs_embeds=x).logits, given)
    scale = torch.tensor([1.0, 0.5, 2.0]).double()
    ensemble = {n: torch.stack([factor * x for factor in scale]) for n, x in weights_of(model).items()}
    losses = vmap(Loss(model, False))(ensemble)
    for loss, factor in zip(losses, scale, strict=True):
        close(loss, Loss(plain, False)({n: factor * x for n, x in weights_of(plain).items()}), "of an ensemble", 1e-9)


@pooled(world_size=2)
def test_samples_through_sdpa() -> None:
    """Where the plain model can: without a mask."""
    plain: Any = llama().double()
    model, found = parallel_with(plain, "sp"), []
    for each in (plain, model):
        one = grad(lambda w, ids, each=each: functional_call(each, w, kwargs={"input_ids": ids, "labels": ids}).loss)
        samples = vmap(lambda w, ids, one=one: one(w, ids[None]), in_dims=(None, 0))(weights_of(each), IDS)
        found.append(whole_of(each, samples, samples=True))
    same(found[1], found[0], "sdpa", 1e-5)


@pooled(world_size=2)
def test_hooks_and_whole_parameters_in_a_transform() -> None:
    plain: Any = gpt2(attn_implementation="eager").double()
    model, found = parallel_with(plain), []

    def louder(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * output.norm(dim=-1, keepdim=True)

    for each in (plain, model):
        parameters = dict(each.named_parameters())

        def loss(weights: Tensors, *row: Any, each: Any = each, parameters: Any = parameters) -> torch.Tensor:
            full = [autopar.full(x, of=parameters[n]) if each is model else x for n, x in weights.items()]
            penalty = torch.stack([x.norm() for x in full]).sum()
            return Loss(each, False).of(weights, *(x[None] for x in row)) + 0.1 * penalty

        handle = each.transformer.h[0].mlp.c_fc.register_forward_hook(louder)
        samples = vmap(grad(loss), in_dims=(None, 0, 0, 0))(weights_of(each), IDS, MASK, LABELS)
        handle.remove()
        found.append(whole_of(each, samples, samples=True))
    same(found[1], found[0], "steered and penalised", 1e-9)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pooled(world_size=2)
def test_the_cross_entropy_of_sharded_logits(reduction: Any) -> None:
    model: Any = parallel_with(gpt2())
    whole = torch.randn(6, 131, generator=torch.Generator().manual_seed(1)).double()
    target, rank = torch.tensor([3, 130, 70, -100, 65, 66]), dist.get_rank()
    own = whole.split([66, 65], 1)[rank]

    def sharded(x: torch.Tensor, target: torch.Tensor, size: int | None) -> torch.Tensor:
        how: Any = {"label_smoothing": 0.1, "reduction": reduction, "vocab_size": size}
        return vocab_parallel_cross_entropy(x, target, group=model.mpu, **how).square().sum()

    def plain(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target, label_smoothing=0.1, reduction=reduction).square().sum()

    expected = grad(plain)(whole, target).split([66, 65], 1)[rank]
    for size in (None, 131):
        close(grad(sharded)(own, target, size), expected, "gradient", 1e-9)
    pairs = own.unflatten(0, (3, 2)), target.unflatten(0, (3, 2))
    expected = vmap(grad(plain))(whole.unflatten(0, (3, 2)), pairs[1]).flatten(0, 1).split([66, 65], 1)[rank]
    found = vmap(grad(lambda x, target: sharded(x, target, None)))(*pairs)
    close(found.flatten(0, 1), expected, "gradients of samples", 1e-9)


@pooled(world_size=2)
def test_dropout_draws_in_transforms_as_without() -> None:
    model: Any = parallel_with(
        gpt2(attn_implementation="eager", attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2)
    ).train()
    loss, weights = Loss(model), weights_of(model)
    torch.manual_seed(3)
    expected, after = loss(dict(model.named_parameters())).detach(), torch.get_rng_state()
    torch.manual_seed(3)
    close(grad_and_value(loss)(weights)[1], expected, "the same draws")
    assert torch.equal(torch.get_rng_state(), after)
    one = grad(lambda weights, *row: loss.of(weights, *(x[None] for x in row)))
    samples = vmap(one, in_dims=(None, 0, 0, 0), randomness="different")(weights, IDS, MASK, LABELS)
    replicated = samples["transformer.ln_f.weight"]
    both = [torch.empty_like(replicated) for _ in range(2)]
    dist.all_gather(both, replicated.contiguous())
    assert torch.equal(both[0], both[1]), "ranks have drawn apart where they must not"
