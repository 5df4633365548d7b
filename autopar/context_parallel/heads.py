"""A module that mixes rows, sharded as its policy says: each rank computes all rows of some heads.

Attention that does not go through transformers' functions (BLOOM, GPT-J, T5), and recurrent layers, run with all rows.
Where the tensor-parallel rules of the policy shard such a module, they also say which heads (or channels) a rank can
compute by itself: for the time of its forward the module has slices of its whole parameters, and sizes of this rank.
The outputs of its row-parallel layers are summed over the ranks, forward and backward. Behind them every rank has all
rows again, and keeps its own (:class:`~autopar.context_parallel.block_boundary.NeedsAllRows`), and the gradients of all
rows.

A rank has the gradients of its heads, zeros elsewhere. The average over ranks sums them with those of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import copy, reduce
from autopar.foreign.tensors import own_buffers, own_parameters
from autopar.plan.plan import AttributePlan, InputPlan, ModulePlan, Plan
from autopar.plan.stages import lies_in
from autopar.swap import drop_value, set_value, view_of_config
from autopar.tensor_parallel.parallelize import resize
from autopar.tensor_parallel.region_modules import GlobalMeans, shard_input, with_inputs

# Of these nothing is left but cuts and sums: what sums gradients where a region begins is done by whoever averages.
_RULES = frozenset(("", "column", "row", "sharded", "replicated", "enter_output", "norm_over"))


@dataclass(frozen=True)
class Heads:
    """Attributes of a module while it computes this rank's heads; paths begin at the module.

    Attributes:
        modules: that have slices of their parameters.
        attributes: that have other values, ``values[rank]``.
        inputs: arguments of the module that are sliced.
    """

    modules: Mapping[str, ModulePlan]
    attributes: tuple[AttributePlan, ...] = ()
    inputs: tuple[InputPlan, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Heads:
        return self

    @contextmanager
    def of_rank(self, module: nn.Module, axis: Axis) -> Iterator[None]:
        """Let ``module`` compute the heads of ``axis.rank``."""
        with ExitStack() as stack:
            for path, plan in self.modules.items():
                stack.enter_context(_sliced(module.get_submodule(path), plan, axis))
            for attribute in self.attributes:
                stack.enter_context(_set(module.get_submodule(attribute.path), attribute, axis.rank))
            yield

    def slice_inputs(self, kind: Any, args: Any, kwargs: Any, axis: Axis) -> Any:
        """Return the arguments of a module of class ``kind``, of which some are this rank's heads."""
        return with_inputs(
            kind,
            self.inputs,
            args,
            kwargs,
            lambda x, layout: shard_input(x, layout, lambda x, dim: layout.shard(x, axis.rank, dim)),
        )

    def fits(self, module: nn.Module) -> bool:
        """Return whether the parameters are whole tensors here; the same on every rank.

        FSDP2 may have sharded them, or experts in it lie on ranks as a whole.
        """
        if any("autopar_layouts" in vars(inside) for inside in module.modules()):
            return False
        return not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def heads_of(path: str, module: nn.Module, plan: Plan) -> Heads | None:
    """Return how the module at ``path`` is sharded by ``plan``, one for as many tensor-parallel ranks; None if not.

    It is where the plan does nothing inside but cut parameters, sizes and arguments, and a row-parallel layer ends it.
    """
    inside = {_relative(at, path): planned for at, planned in plan.modules.items() if lies_in(at, path)}
    if {"column", "row"} - {planned.rule for planned in inside.values()}:
        return None
    if not all(_only_cuts(planned, module.get_submodule(at)) for at, planned in inside.items()):
        return None
    attributes = [
        AttributePlan(_relative(a.path, path), a.name, a.where, a.whole, a.values)
        for a in plan.attributes
        if lies_in(a.path, path)
    ]
    if any(planned.inputs for at, planned in inside.items() if at):
        return None  # a module inside gets them: nobody is in front of it
    outer = inside.get("")
    return Heads(inside, tuple(attributes), outer.inputs if outer else ())


def _only_cuts(plan: ModulePlan, module: nn.Module) -> bool:
    if plan.rule not in _RULES or plan.once or plan.gather_output or plan.split_input:
        return False
    if plan.rule in ("column", "row") and not isinstance(module, nn.Linear | Conv1D):
        return False
    return all(name in own_parameters(module) or name in own_buffers(module) for name in plan.layouts)


def _relative(path: str, outer: str) -> str:
    return path[len(outer) + 1 :]


@contextmanager
def _sliced(module: nn.Module, plan: ModulePlan, axis: Axis) -> Iterator[None]:
    """Let a module read slices; its registered parameters stay where they are, behind them."""
    own = vars(module)
    shadows: dict[str, Any] = {}
    for name, layout in plan.layouts.items():
        whole = own_parameters(module)[name] if name in own_parameters(module) else own_buffers(module)[name]
        shadows[name] = None if whole is None else layout.shard(whole, axis.rank)
    if plan.rule == "row":
        shadows["forward"] = _Summed(module, axis)
        bias = own_parameters(module).get("bias")
        if bias is not None:  # added behind the sum
            shadows["bias"] = torch.zeros_like(bias) if isinstance(module, Conv1D) else None
    if plan.rule == "norm_over":
        shadows["forward"] = _NormOver(module, plan, axis)
    try:
        own.update(shadows)
        resize(module, plan, axis.rank)
        yield
    finally:
        for name in shadows:
            own.pop(name, None)
        resize(module, plan, None)


class _Summed:
    """The forward of a row-parallel layer, ``[..., in/cp] -> [..., out]``: summed over the ranks, as is its gradient.

    Every rank keeps other rows of what it returns, so each has another part of the gradient.
    """

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        self.forward, self.bias, self.axis = module.forward, own_parameters(module).get("bias"), axis

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = copy(reduce(self.forward(x), self.axis), self.axis)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _NormOver:
    """The forward of a norm over features of which this rank has some; its means are those of all."""

    def __init__(self, module: nn.Module, plan: ModulePlan, axis: Axis) -> None:
        self.forward, self.plan, self.axis = module.forward, plan, axis

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with GlobalMeans(self.plan, self.axis, (*args, *kwargs.values())):
            return self.forward(*args, **kwargs)


@contextmanager
def _set(module: Any, plan: AttributePlan, rank: int) -> Iterator[None]:
    name = plan.name.removeprefix("config.")
    if name == plan.name:
        before = getattr(module, name)
        setattr(module, name, plan.values[rank])
        try:
            yield
        finally:
            setattr(module, name, before)
        return
    name = (getattr(module.config, "attribute_map", None) or {}).get(name, name)
    set_value(view_of_config(module), name, plan.values[rank])
    try:
        yield
    finally:
        drop_value(module, name)
