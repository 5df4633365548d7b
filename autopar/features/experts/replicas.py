"""Experts that replicas share: checked before a forward, and averaged next to ``DistributedDataParallel``.

DDP averages over all replicas, whose groups hold different experts, so it leaves experts out. Ranks that hold the same
experts average them here, in a backward pass in which DDP averages the other gradients. Where no two ranks do, nothing
is left to average (:mod:`autopar.features.experts.layers`, note on gradients).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autopar.compat.c10d import leave_out_of_ddp, left_out_of_ddp
from autopar.compat.tensors import remove_forward_hooks
from autopar.distributed.autograd_functions import refuse_transforms
from autopar.distributed.collectives import all_gather, even_layout
from autopar.distributed.failures import FailureLog
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
from autopar.features.experts.layers import choose_dispatch
from autopar.setup.steps import Given, Parallelized
from autopar.swap import NotCopied


def share_experts(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Let wrappers leave out the experts of all stages of the undivided model. FSDP2 averages them by itself."""
    choose_dispatch(model, state.config.expert_dispatch)
    if state.plan.experts and not state.config.fully_sharded:
        state.features["expert_gradients"] = ExpertGradients(model, state)
        state.dp.wrappers.when_wrapped = partial(_leave_to_us, state.mpu)
        state.undo.append(lambda model, own: own.features.pop("expert_gradients").remove(model))


def check_forwards(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Compare what replicas do before any other hook of a forward: those of FSDP2 wait for the other replicas."""
    if state.plan.experts:
        state.inner_of(model).register_forward_pre_hook(SharedExperts(state.mpu, state.failures), prepend=True)
        state.undo.append(lambda model, own: remove_forward_hooks(own.inner_of(model), SharedExperts))


def _leave_to_us(mpu: MPU, wrapper: nn.Module, inside: nn.Module) -> None:
    """Raise ConfigError if a wrapper would average experts, which differ between replicas."""
    states = (vars(module).get("_autopar") for module in inside.modules())  # of the model, or of a copy
    found = [state.features["expert_gradients"] for state in states if state is not None and state.mpu is mpu]
    own = {parameter for experts in found for parameter in experts.parameters}
    names = {name for name, parameter in inside.named_parameters() if parameter in own}
    if names and not (isinstance(wrapper, DistributedDataParallel) and names <= left_out_of_ddp(wrapper)):
        raise ConfigError(
            f"{type(wrapper).__name__} would average experts over all replicas: with expert_parallel_size="
            f"{mpu.ep.size} above tensor_parallel_size={mpu.tp.size}\n  replicas hold different ones, "
            f"{min(names)} for instance. Wrap DistributedDataParallel around what\n  autopar.initialize returned "
            "itself, which has told it to leave them out."
        )
    for experts in found if isinstance(wrapper, DistributedDataParallel) else ():
        experts.inside(wrapper)


class SharedExperts(NotCopied):
    """Compare the modes of all ranks with experts of a layer, before a forward in which one would wait."""

    def __init__(self, mpu: MPU, failures: FailureLog) -> None:
        self.mpu, self.failures = mpu, failures

    def __call__(self, model: nn.Module, _: Any) -> None:
        refuse_transforms(lambda: list(model.parameters()))
        if self.failures.in_deadline or torch.compiler.is_compiling():
            return  # inside of generate, whose replicas continue together
        axis = self.mpu.shards
        with self.failures.wait("the forward of replicas that share experts", axis.ranks):
            mine = torch.tensor([model.training, torch.is_grad_enabled()], dtype=torch.int64, device=self.mpu.device)
            everyone = all_gather(mine, axis, even_layout(2 * axis.size, axis.size)).view(-1, 2).tolist()
        words = (("evaluates", "trains"), ("without", "with"))
        modes = [f"{words[0][train]} {words[1][grad]} gradients" for train, grad in everyone]
        other = next((place for place, mode in enumerate(modes) if mode != modes[0]), None)
        if other is not None:
            raise ConsistencyError(
                f"replicas share the experts of {type(model).__name__}, and do different things with it: rank "
                f"{axis.ranks[0]} {modes[0]},\n  rank {axis.ranks[other]} {modes[other]}. Tokens of all of ranks "
                f"{list(axis.ranks)} meet in each layer: train and evaluate\n  on all of them at the same time, with "
                "as many batches each."
            )


class ExpertGradients:
    """The experts' parameters of a model, averaged with the DDP around it."""

    def __init__(self, model: nn.Module, state: Parallelized) -> None:
        self.axis, self.failures = state.mpu.copies, state.failures
        self._averages = False  # whether the forward was one after which DDP averages
        self._handles: list[Any] = []
        self.parameters = {p: name for name, p in model.named_parameters() if name in state.plan.experts}
        leave_out_of_ddp(model, self.parameters.values())
        self._hooked: set[torch.Tensor] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGradients:
        copied = memo[id(self)] = copy.copy(self)
        copied.parameters = {memo.get(id(p), p): name for p, name in self.parameters.items()}
        copied._averages, copied._handles, copied._hooked = False, [], set()
        return copied

    def inside(self, ddp: DistributedDataParallel) -> None:
        """Average when ``ddp`` does."""
        self._handles.append(ddp.register_forward_pre_hook(self._on_forward))

    def _on_forward(self, ddp: nn.Module, _: Any) -> None:
        self._averages = torch.is_grad_enabled() and bool(ddp.require_backward_grad_sync)
        for parameter in self.parameters if self.axis.size > 1 else ():
            if parameter.requires_grad and parameter not in self._hooked:  # it may have been frozen until now
                self._hooked.add(parameter)
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._average))

    @torch.no_grad()
    def _average(self, parameter: torch.Tensor) -> None:
        if self._averages and parameter.grad is not None:
            gradient = parameter.grad.div_(self.axis.size)
            with self.failures.blame("averaging the gradients of experts", self.axis.ranks):
                all_reduce(gradient, group=self.axis.group)

    def remove(self, model: nn.Module) -> None:
        """Remove the hooks."""
        leave_out_of_ddp(model, ())
        for handle in self._handles:
            handle.remove()
