"""Plain models, and the ranks they would be on, with optimizers of every kind. No process group: a rank is the plain
model with its parameters cut, and the plain optimizer's state cut by hand."""

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from transformers.optimization import Adafactor as TransformersAdafactor

from autopar.checkpoint.optimizer_state import OptimizerState, merge_metadata, prepare, take
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan, TensorPlan
from autopar.policy.match import find_policy
from tests.checkpoint.test_plain_data import same
from tests.small import gpt2, llama

Make = Callable[[Any], optim.Optimizer]

MODELS = {
    "gpt2": partial(gpt2, n_layer=1),  # fused q | k | v, 9 heads
    "llama": partial(llama, num_hidden_layers=1, num_key_value_heads=2),  # at 3 ranks two hold the same KV head
}
OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(optim.Adam, lr=torch.tensor(0.01)),
    "AdamW": partial(optim.AdamW, lr=0.01, amsgrad=True, weight_decay=0.1),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "Adadelta": optim.Adadelta,
    "Adagrad": partial(optim.Adagrad, initial_accumulator_value=0.5),
    "RMSprop": partial(optim.RMSprop, centered=True, momentum=0.5),
    "Rprop": optim.Rprop,
    "Muon": optim.Muon,
    "SparseAdam": optim.SparseAdam,
}
FACTORED: dict[str, Make] = {
    "torch": optim.Adafactor,
    "transformers": partial(TransformersAdafactor, lr=0.01, relative_step=False, scale_parameter=False),
}


def plan_of(kind: str, tp: int) -> Plan:
    model = MODELS[kind]()
    return make_plan(model, find_policy(model), tp)


def optimizer_of(model: nn.Module, make: Make) -> optim.Optimizer:
    """In two groups with different options."""
    parameters = [p for p in model.parameters() if p.ndim == 2 or make is not optim.Muon]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02, "weight_decay": 0.0}]
    return make(groups[: 1 + (make is not optim.SparseAdam)])


def trained(kind: str, make: Make, steps: int = 2) -> tuple[nn.Module, optim.Optimizer]:
    """The plain model and optimizer after some steps."""
    model = MODELS[kind]()
    optimizer = optimizer_of(model, make)
    for step in range(steps):
        one_step(model, optimizer, seed=step)
    return model, optimizer


def one_step(model: nn.Module, optimizer: optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
        if isinstance(optimizer, optim.SparseAdam):
            parameter.grad = parameter.grad.to_sparse()
    optimizer.step()


def rank_of(kind: str, make: Make, plan: Plan, rank: int) -> tuple[nn.Module, optim.Optimizer]:
    """A model and an optimizer as one rank has them, without state."""
    model = MODELS[kind]()
    named = {plan.canonical(name): parameter for name, parameter in model.named_parameters()}
    for name, parameter in named.items():
        layout = plan.tensors[name].layout
        if layout is not None:
            parameter.data = layout.shard(parameter.data, rank)
    return model, optimizer_of(model, make)


def share(tensor: Any, due: TensorPlan, rank: int) -> Any:
    """What a rank has of a plain optimizer's state."""
    if isinstance(tensor, torch.Tensor) and tensor.shape == due.shape and due.layout is not None:
        return due.layout.shard(tensor, rank)
    return copy.deepcopy(tensor)


def by_name(model: nn.Module, optimizer: optim.Optimizer, plan: Plan) -> dict[str, dict[str, Any]]:
    names = {id(p): plan.canonical(n) for n, p in model.named_parameters()}
    return {names[id(p)]: state for p, state in optimizer.state.items() if isinstance(p, torch.Tensor)}


def give(plain: Any, target: Any, plan: Plan, rank: int) -> None:
    """Cut the plain optimizer's state and options by hand."""
    states, names = by_name(*plain, plan), {id(p): plan.canonical(n) for n, p in target[0].named_parameters()}
    for group, source in zip(target[1].param_groups, plain[1].param_groups, strict=True):
        group.update({key: copy.deepcopy(value) for key, value in source.items() if key != "params"})
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in states:
                due = plan.tensors[name]
                target[1].state[parameter] = {key: share(value, due, rank) for key, value in states[name].items()}


def saved_by_all(kind: str, make: Make, plan: Plan, plain: Any) -> list[OptimizerState]:
    taken = []
    for rank in range(plan.tp):
        target = rank_of(kind, make, plan, rank)
        give(plain, target, plan, rank)
        taken.append(take(target[1], target[0], plan, rank))
    return taken


def stored(taken: list[OptimizerState]) -> tuple[dict[str, Any], dict[str, TensorPlan], dict[str, torch.Tensor]]:
    """What a checkpoint has afterwards: facts that went through JSON, plans, and whole tensors."""
    facts = json.loads(json.dumps(merge_metadata([one.metadata for one in taken]), allow_nan=False))
    plans = {name: plan for one in taken for name, plan in one.plans.items()}
    whole = {}
    for name, plan in plans.items():
        shards = [one.tensors[name] for one in taken if name in one.tensors]
        shards = shards[: 1 if plan.layout is None else plan.layout.axis_size]  # stages may hold it twice
        whole[name] = shards[0] if plan.layout is None else plan.layout.unshard(shards)
        assert whole[name].shape == plan.shape and str(whole[name].dtype) == f"torch.{plan.dtype}"
    return facts, plans, whole


def restore(target: Any, plan: Plan, rank: int, checkpoint: Any, **more: Any) -> None:
    facts, plans, whole = checkpoint
    targets, finish = prepare(target[1], target[0], plan, rank, facts, plans, **more)
    for name, (tensor, layout) in targets.items():
        source = whole[name] if layout is None else layout.shard(whole[name], rank)
        assert tensor.shape == source.shape and tensor.dtype == source.dtype
        tensor.copy_(source)
    finish()


def assert_same(mine: Any, expected: Any, plan: Plan) -> None:
    got, due = by_name(*mine, plan), by_name(*expected, plan)
    assert got.keys() == due.keys()
    for name, state in due.items():
        assert same(state, got[name]), name
    for group, other in zip(mine[1].param_groups, expected[1].param_groups, strict=True):
        without = [{k: v for k, v in g.items() if k != "params"} for g in (group, other)]
        assert same(*without), without
