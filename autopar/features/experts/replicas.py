"""Experts that replicas share: check their forwards, and average their gradients next to ``DistributedDataParallel``.

DDP averages over all replicas, but replicas hold different experts, so DDP must ignore experts. Ranks that hold equal
experts average them here, in the backward passes in which DDP averages the other gradients. See
[Note: gradients over replicas] in :mod:`autopar.features.experts.layers`.
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
    """Let wrappers ignore experts. The step runs before the model is split; FSDP2 averages experts by itself."""
    choose_dispatch(model, state.config.expert_dispatch)
    if state.plan.experts and not state.config.fully_sharded:
        state.features["expert_gradients"] = ExpertGradients(model, state)
        state.dp.wrappers.when_wrapped = partial(_leave_to_us, state.mpu)
        state.undo.append(lambda model, own: own.features.pop("expert_gradients").remove(model))


def check_forwards(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Check the modes of replicas before all other forward hooks, because hooks of FSDP2 wait for other replicas."""
    if state.plan.experts:
        state.inner_of(model).register_forward_pre_hook(SharedExperts(state.mpu, state.failures), prepend=True)
        state.undo.append(lambda model, own: remove_forward_hooks(own.inner_of(model), SharedExperts))


def _leave_to_us(mpu: MPU, wrapper: nn.Module, inside: nn.Module) -> None:
    """Raise ConfigError if a wrapper would average experts, which differ between replicas."""
    states = (vars(module).get("_autopar") for module in inside.modules())  # the model, or a copy of it
    found = [state.features["expert_gradients"] for state in states if state is not None and state.mpu is mpu]
    own = {parameter for experts in found for parameter in experts.parameters}
    names = {name for name, parameter in inside.named_parameters() if parameter in own}
    if names and not (isinstance(wrapper, DistributedDataParallel) and names <= left_out_of_ddp(wrapper)):
        raise ConfigError(
            f"{type(wrapper).__name__} would average experts over all replicas, which hold different ones with "
            f"expert_parallel_size={mpu.ep.size} above tensor_parallel_size={mpu.tp.size}\n"
            f"  One of them is {min(names)}. Wrap the model that autopar.initialize returned in\n"
            "  DistributedDataParallel, which then ignores experts."
        )
    for experts in found if isinstance(wrapper, DistributedDataParallel) else ():
        experts._handles.append(wrapper.register_forward_pre_hook(experts._on_forward))  # averages when DDP averages


class SharedExperts(NotCopied):
    """Compare the modes of the ranks that share experts before a forward, in which different modes would hang."""

    def __init__(self, mpu: MPU, failures: FailureLog) -> None:
        self.mpu, self.failures = mpu, failures

    def __call__(self, model: nn.Module, _: Any) -> None:
        refuse_transforms(lambda: list(model.parameters()))
        if self.failures.in_deadline or torch.compiler.is_compiling():
            return  # inside generate, where replicas already run together
        axis = self.mpu.shards
        with self.failures.wait("the forward of replicas that share experts", axis.ranks):
            mine = torch.tensor([model.training, torch.is_grad_enabled()], dtype=torch.int64, device=self.mpu.device)
            everyone = all_gather(mine, axis, even_layout(2 * axis.size, axis.size)).view(-1, 2).tolist()
        words = (("evaluates", "trains"), ("without", "with"))
        modes = [f"{words[0][train]} {words[1][grad]} gradients" for train, grad in everyone]
        other = next((place for place, mode in enumerate(modes) if mode != modes[0]), None)
        if other is not None:
            raise ConsistencyError(
                f"replicas share the experts of {type(model).__name__} and must run in the same mode: rank "
                f"{axis.ranks[0]} {modes[0]}, rank {axis.ranks[other]} {modes[other]}\n  Train and evaluate on all of "
                f"the ranks {list(axis.ranks)} at the same time, with equally many batches."
            )


class ExpertGradients:
    """The expert parameters of a model, whose gradients are averaged when DDP around it averages."""

    def __init__(self, model: nn.Module, state: Parallelized) -> None:
        self.axis, self.failures = state.mpu.copies, state.failures
        self._averages = False  # True if DDP averages after the current forward
        self._handles: list[Any] = []
        self.parameters = {p: name for name, p in model.named_parameters() if name in state.plan.experts}
        leave_out_of_ddp(model, self.parameters.values())
        self._hooked: set[torch.Tensor] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGradients:
        copied = memo[id(self)] = copy.copy(self)
        copied.parameters = {memo.get(id(p), p): name for p, name in self.parameters.items()}
        copied._averages, copied._handles, copied._hooked = False, [], set()
        return copied

    def _on_forward(self, ddp: nn.Module, _: Any) -> None:
        self._averages = torch.is_grad_enabled() and bool(ddp.require_backward_grad_sync)
        for parameter in self.parameters if self.axis.size > 1 else ():
            if parameter.requires_grad and parameter not in self._hooked:  # hook later if it was frozen before
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
