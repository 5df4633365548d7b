"""Transforms of torch.func and forward mode through sharded layers: the plain model's numbers, or refused in words."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.errors import ConfigError, ConsistencyError
from autopar.tensor_parallel import overlap, vocab_parallel_cross_entropy
from tests.distributed.test_derivatives import HOW, MODELS
from tests.parity import close, randomise
from tests.pool import pooled
from tests.small import gpt2, llama
from tests.worlds import raises_everywhere

Tensors = dict[str, torch.Tensor]

# In double, but norms of a Llama and the loss of transformers are computed in fp32.
TOLERANCE = {("gpt2", False): 1e-9, ("gpt2", True): 2e-6, ("llama", False): 1e-5, ("llama", True): 1e-5}
IDS = torch.randint(0, 131, (3, 7), generator=torch.Generator().manual_seed(3))
MASK = (torch.arange(7) < torch.tensor([[7], [4], [6]])).long()
LABELS = IDS.masked_fill(MASK == 0, -100)


def _parallel(plain: Any, how: str = "tp", **sizes: int) -> Any:
    given = HOW[how]
    tensor = {} if sizes else {"tensor_parallel_size": dist.get_world_size()}
    return autopar.initialize(
        copy.deepcopy(plain),
        {**given, "model_parallelism": {**tensor, **sizes, **given.get("model_parallelism", {})}},
    )


def _weights(model: Any) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _whole(model: Any, found: Tensors, samples: bool = False) -> Tensors:
    """Return whole tensors of what has the shape of the parameters' shards, or of samples of them."""
    if not hasattr(model, "mpu"):
        return found
    parameters = dict(model.named_parameters())
    if samples:
        return {n: vmap(lambda one, n=n: autopar.full(one, of=parameters[n]))(x) for n, x in found.items()}
    return {name: autopar.full(x, of=parameters[name]).detach() for name, x in found.items()}


def _directions(model: Any) -> Tensors:
    """Draw a direction for each parameter, and return this rank's parts."""
    drawn, plan = torch.Generator().manual_seed(5), getattr(vars(model).get("_autopar"), "plan", None)
    found = {}
    for name, parameter in model.named_parameters():
        due = None if plan is None else plan.tensors[plan.canonical(name)]
        whole = torch.randn(parameter.shape if due is None else due.shape, generator=drawn, dtype=parameter.dtype)
        found[name] = whole if due is None or due.layout is None else due.layout.shard(whole, model.mpu.tp.rank)
    return found


class Loss:
    """A loss of a model in its weights: its own, of labels, or one that is made of its logits."""

    def __init__(self, model: Any, given: bool = True) -> None:
        self.model, self.given = model, given

    def __call__(self, weights: Tensors, rows: Any = slice(None)) -> torch.Tensor:
        return self.of(weights, IDS[rows], MASK[rows], LABELS[rows])

    def of(self, weights: Tensors, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return that of some rows."""
        batch = {"input_ids": ids, "attention_mask": mask, **({"labels": labels} if self.given else {})}
        outputs = functional_call(self.model, weights, kwargs=batch)
        if self.given:
            loss: torch.Tensor = outputs.loss
            return loss
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def samples(self) -> Tensors:
        """Return the gradients of each row."""
        one = grad(lambda weights, *row: self.of(weights, *(x[None] for x in row)))
        found: Tensors = vmap(one, in_dims=(None, 0, 0, 0))(_weights(self.model), IDS, MASK, LABELS)
        return found


def _logit_row(model: Any, weights: Tensors) -> torch.Tensor:
    logits: torch.Tensor = functional_call(model, weights, kwargs={"input_ids": IDS, "attention_mask": MASK}).logits
    return logits[1, 2, 60:70]  # of two ranks, and of three


def _gradients(output: torch.Tensor, model: Any, **how: Any) -> Tensors:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(output, list(named.values()), **how)
    return dict(zip(named, found, strict=True))


def _second(loss: Loss, model: Any) -> Tensors:
    """Return the Hessian times the directions, by two backward passes."""
    directions = _directions(model)
    first = _gradients(loss(dict(model.named_parameters())), model, create_graph=True)
    along = torch.stack([(x * directions[name]).sum() for name, x in first.items()]).sum()
    return _gradients(along, model)


def _same(found: Tensors, expected: Tensors, what: str, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        close(found[name] / scale, value / scale, f"{what}: {name}", tolerance)


def _as_plain(kind: str, how: str) -> None:
    plain: Any = MODELS[kind]().double()
    model = _parallel(plain, how)
    for given in (True, False):
        _loss_as_plain(model, plain, given, TOLERANCE[kind, given])
    _jacobian_as_plain(model, plain, TOLERANCE[kind, False])


def _loss_as_plain(model: Any, plain: Any, given: bool, tolerance: float) -> None:
    weights, directions, known = _weights(model), _directions(model), dict(plain.named_parameters())
    of, of_plain, what = Loss(model, given), Loss(plain, given), "labels" if given else "logits"
    expected = of_plain(known)
    gradients = _gradients(expected, plain)

    found, loss = grad_and_value(of)(weights)
    close(loss, expected.detach(), f"{what}: loss", tolerance)
    _same(_whole(model, found), gradients, f"{what}: grad", tolerance)

    each = [_gradients(of_plain(known, slice(i, i + 1)), plain) for i in range(3)]
    stacked = {name: torch.stack([one[name] for one in each]) for name in gradients}
    _same(_whole(model, of.samples(), samples=True), stacked, f"{what}: gradients of samples", tolerance)

    along = sum((gradients[name] * x).sum() for name, x in _directions(plain).items())
    close(jvp(of, (weights,), (directions,))[1], torch.as_tensor(along).to(loss), f"{what}: jvp", tolerance)
    product = jvp(grad(of), (weights,), (directions,))[1]
    _same(_whole(model, product), _second(of_plain, plain), f"{what}: Hessian times a vector", tolerance)


def _jacobian_as_plain(model: Any, plain: Any, tolerance: float) -> None:
    weights, row = _weights(model), _logit_row(plain, dict(plain.named_parameters()))
    rows = [_gradients(one, plain, retain_graph=True) for one in row]
    stacked = {name: torch.stack([one[name] for one in rows]) for name in rows[0]}
    jacobian = jacrev(lambda weights: _logit_row(model, weights))(weights)
    _same(_whole(model, jacobian, samples=True), stacked, "jacrev", tolerance)
    made, back = vjp(lambda weights: _logit_row(model, weights), weights)
    by_hand = {name: x.sum(0) for name, x in stacked.items()}
    _same(_whole(model, back(torch.ones_like(made))[0]), by_hand, "vjp", tolerance)


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
    model = _parallel(plain)
    loss, known, gradients = Loss(model, False), dict(plain.named_parameters()), {}
    gradients = _gradients(Loss(plain, False)(known), plain)
    along = torch.stack([(gradients[name] * x).sum() for name, x in _directions(plain).items()]).sum()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        expected = loss(weights)
    with forward_ad.dual_level():
        assert torch.equal(loss(weights), expected), "nothing is dual"
        dual = {name: forward_ad.make_dual(weights[name], x) for name, x in _directions(model).items()}
        with torch.no_grad():
            close(forward_ad.unpack_dual(loss(dual)).tangent, along, "without gradients", 1e-9)
        found = _gradients(loss(dual), model)
        product = {name: forward_ad.unpack_dual(x).tangent.detach() for name, x in found.items()}
    _same(_whole(model, product), _second(Loss(plain, False), plain), "backward of dual tensors", 1e-9)


@pytest.mark.tier("test", only=("tp",))
@pytest.mark.parametrize("how", HOW)
@pooled(world_size=2)
def test_gradients_that_come_batched_or_dual(how: str) -> None:
    """One backward pass for all of them, of a graph that was made without transforms."""
    plain: Any = gpt2(attn_implementation="eager").double()
    model = _parallel(plain, how)
    least, overlap._LEAST = overlap._LEAST, 1
    try:
        for of in (
            lambda logits: F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()),
            lambda logits: logits[1, 2, 60:70],
        ):
            expected, output = (of(each(input_ids=IDS).logits) for each in (plain, model))
            given = torch.randn(4, *output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
            rows = [_gradients(expected, plain, grad_outputs=one, retain_graph=True) for one in given]
            stacked = {name: torch.stack([one[name] for one in rows]) for name in rows[0]}
            found = vmap(lambda one, of=output: _gradients(of, model, grad_outputs=one, retain_graph=True))(given)
            _same(_whole(model, found, samples=True), stacked, "batched", 1e-9)
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(given[0].clone(), given[1].clone())
                found = _gradients(output, model, grad_outputs=dual)
                tangents = {name: forward_ad.unpack_dual(x).tangent for name, x in found.items()}
            _same(_whole(model, tangents), rows[1], "dual", 1e-9)
    finally:
        overlap._LEAST = least


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_hessians_and_transforms_of_transforms() -> None:
    plain: Any = gpt2(attn_implementation="eager").double()
    model, name = _parallel(plain), "transformer.h.1.ln_1.weight"

    def of(each: Any) -> Any:
        weights, loss = _weights(each), Loss(each, False)
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
    ensemble = {n: torch.stack([factor * x for factor in scale]) for n, x in _weights(model).items()}
    losses = vmap(Loss(model, False))(ensemble)
    for loss, factor in zip(losses, scale, strict=True):
        close(loss, Loss(plain, False)({n: factor * x for n, x in _weights(plain).items()}), "of an ensemble", 1e-9)


@pooled(world_size=2)
def test_samples_through_sdpa() -> None:
    """Where the plain model can: without a mask."""
    plain: Any = llama().double()
    model, found = _parallel(plain, "sp"), []
    for each in (plain, model):
        one = grad(lambda w, ids, each=each: functional_call(each, w, kwargs={"input_ids": ids, "labels": ids}).loss)
        samples = vmap(lambda w, ids, one=one: one(w, ids[None]), in_dims=(None, 0))(_weights(each), IDS)
        found.append(_whole(each, samples, samples=True))
    _same(found[1], found[0], "sdpa", 1e-5)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_inputs_are_checked_inside_of_transforms() -> None:
    model: Any = _parallel(gpt2(attn_implementation="eager"))
    samples = vmap(lambda ids: model(input_ids=ids[None]).logits)
    before = samples(IDS)
    with raises_everywhere(IndexError, "index out of range in an embedding of 131 rows: ids run from 125 to"):
        samples(IDS - IDS.min() + 125)
    other = IDS.roll(dist.get_rank(), 0)
    with raises_everywhere(ConsistencyError, "input_ids"):
        samples(other)
    with raises_everywhere(ConsistencyError, "input_ids"):
        grad(lambda w: functional_call(model, w, kwargs={"input_ids": other, "labels": IDS}).loss)(_weights(model))
    weights = _weights(model)
    weights["transformer.ln_f.weight"] = weights["transformer.ln_f.weight"] + dist.get_rank()
    with raises_everywhere(ConsistencyError, "transformer.ln_f.weight"):
        for _ in range(20):  # some weights in each forward
            grad(Loss(model))(weights)
    assert torch.equal(samples(IDS), before)


@pooled(world_size=2)
def test_hooks_and_whole_parameters_in_a_transform() -> None:
    plain: Any = gpt2(attn_implementation="eager").double()
    model, found = _parallel(plain), []

    def louder(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * output.norm(dim=-1, keepdim=True)

    for each in (plain, model):
        parameters = dict(each.named_parameters())

        def loss(weights: Tensors, *row: Any, each: Any = each, parameters: Any = parameters) -> torch.Tensor:
            full = [autopar.full(x, of=parameters[n]) if each is model else x for n, x in weights.items()]
            penalty = torch.stack([x.norm() for x in full]).sum()
            return Loss(each, False).of(weights, *(x[None] for x in row)) + 0.1 * penalty

        handle = each.transformer.h[0].mlp.c_fc.register_forward_hook(louder)
        samples = vmap(grad(loss), in_dims=(None, 0, 0, 0))(_weights(each), IDS, MASK, LABELS)
        handle.remove()
        found.append(_whole(each, samples, samples=True))
    _same(found[1], found[0], "steered and penalised", 1e-9)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pooled(world_size=2)
def test_the_cross_entropy_of_sharded_logits(reduction: Any) -> None:
    model: Any = _parallel(gpt2())
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
    model: Any = _parallel(gpt2(attn_implementation="eager", attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2)).train()
    loss, weights = Loss(model), _weights(model)
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


def _mixtral(experts: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 4, "initializer_range": 0.1}
    config = MixtralConfig(**sizes, **heads, attn_implementation="eager", experts_implementation=experts)
    return randomise(MixtralForCausalLM(config)).double()


@pooled(world_size=2)
def test_experts() -> None:
    plain = _mixtral("batched_mm")
    for config in ({}, {"expert_parallel_size": 2}):
        model = _parallel(plain, tensor_parallel_size=2, **config)
        loss, weights = Loss(model), _weights(model)
        gradients = _gradients(Loss(plain)(dict(plain.named_parameters())), plain)
        _same(_whole(model, grad(loss)(weights)), gradients, "grad", 1e-5)
        product = jvp(grad(loss), (weights,), (_directions(model),))[1]
        _same(_whole(model, product), _second(Loss(plain), plain), "Hessian times a vector", 1e-4)
        if not config:
            _same(_whole(model, loss.samples(), samples=True), Loss(plain).samples(), "samples", 1e-5)
            continue
        with raises_everywhere(ConfigError, "vmap: experts that ranks hold whole", "expert_parallel_size: 1"):
            loss.samples()


def _refused(model: Any, cause: str) -> None:
    def loss(weights: Any) -> Any:
        return functional_call(model, weights, kwargs={"input_ids": IDS, "labels": IDS, "use_cache": False}).loss

    text = f"torch.func (grad, vmap, jvp and the like) and dual tensors do not go through {cause}"
    before = model(input_ids=IDS).logits.detach()
    with raises_everywhere(ConfigError, text, "tensor_parallel_size, with sequence_parallel too"):
        grad(loss)(_weights(model))
    with raises_everywhere(ConfigError, text):
        vmap(lambda ids: model(input_ids=ids[None], use_cache=False).logits)(IDS)
    embeds = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(3))
    with forward_ad.dual_level():
        assert torch.equal(model(input_ids=IDS).logits, before), "nothing is dual"
        with raises_everywhere(ConfigError, text):
            model(inputs_embeds=forward_ad.make_dual(embeds, embeds))
        if cause[0] != "z":
            dual = {name: forward_ad.make_dual(weight, weight) for name, weight in _weights(model).items()}
            with raises_everywhere(ConfigError, text):
                loss(dual)
    assert torch.equal(model(input_ids=IDS).logits, before)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_transforms_do_not_go_through_says_so() -> None:
    plain = llama(attn_implementation="eager")
    _refused(_parallel(plain, context_parallel_size=2), "context_parallel_size: its ranks exchange rows and states")
    _refused(_parallel(plain, pipeline_parallel_size=2).eval(), "pipeline stages")
    _refused(_parallel(_mixtral("eager").float(), expert_parallel_size=2), "experts that several replicas share")
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded: Any = autopar.initialize(model, {"zero": {"stage": 3}}, optimizer=optimizer)
    _refused(sharded[0], "zero.stage 3")
