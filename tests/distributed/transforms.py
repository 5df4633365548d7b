"""Losses in the weights of a model, sharded or plain, and what transforms make of them as whole tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from tests.distributed.test_derivatives import HOW
from tests.parity import close, randomise

Tensors = dict[str, torch.Tensor]
IDS = torch.randint(0, 131, (3, 7), generator=torch.Generator().manual_seed(3))
MASK = (torch.arange(7) < torch.tensor([[7], [4], [6]])).long()
LABELS = IDS.masked_fill(MASK == 0, -100)


def parallel_with(plain: Any, how: str = "tp", **sizes: int) -> Any:
    given = HOW[how]
    tensor = {} if sizes else {"tensor_parallel_size": dist.get_world_size()}
    return autopar.initialize(
        copy.deepcopy(plain),
        {**given, "model_parallelism": {**tensor, **sizes, **given.get("model_parallelism", {})}},
    )


def weights_of(model: Any) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def whole_of(model: Any, found: Tensors, samples: bool = False) -> Tensors:
    """Return whole tensors of what has the shape of the parameters' shards, or of samples of them."""
    if not hasattr(model, "mpu"):
        return found
    parameters = dict(model.named_parameters())
    if samples:
        return {n: vmap(lambda one, n=n: autopar.full(one, of=parameters[n]))(x) for n, x in found.items()}
    return {name: autopar.full(x, of=parameters[name]).detach() for name, x in found.items()}


def directions_of(model: Any) -> Tensors:
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

    def samples(self, weights: Tensors | None = None) -> Tensors:
        """Return the gradients of each row, in all weights or in some."""
        one = grad(lambda weights, *row: self.of(weights, *(x[None] for x in row)))
        found: Tensors = vmap(one, in_dims=(None, 0, 0, 0))(weights or weights_of(self.model), IDS, MASK, LABELS)
        return found


def gradients_of(output: torch.Tensor, model: Any, **how: Any) -> Tensors:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(output, list(named.values()), **how)
    return dict(zip(named, found, strict=True))


def second_of(loss: Loss, model: Any) -> Tensors:
    """Return the Hessian times the directions, by two backward passes."""
    directions = directions_of(model)
    first = gradients_of(loss(dict(model.named_parameters())), model, create_graph=True)
    along = torch.stack([(x * directions[name]).sum() for name, x in first.items()]).sum()
    return gradients_of(along, model)


def same(found: Tensors, expected: Tensors, what: str, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        close(found[name] / scale, value / scale, f"{what}: {name}", tolerance)


def small_mixtral(experts: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 4, "initializer_range": 0.1}
    config = MixtralConfig(**sizes, **heads, attn_implementation="eager", experts_implementation=experts)
    return randomise(MixtralForCausalLM(config)).double()
