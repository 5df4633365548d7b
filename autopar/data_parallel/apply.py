"""Data parallelism of one model: checks of its wrappers and steps; ZeRO, precision and clipping around ``step()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from autopar.checks.experts import SharedExperts
from autopar.checks.step import StepCheck
from autopar.checks.wrappers import WrapperCheck
from autopar.config import ParallelConfig
from autopar.data_parallel.experts import ExpertGradients
from autopar.data_parallel.grad_sync import held_alike
from autopar.data_parallel.gradients import counted_here
from autopar.data_parallel.optimizer_state import keep_stage, rebind, shard_state, stepped_whole
from autopar.data_parallel.precision import DTYPES
from autopar.data_parallel.replica_norm import ReplicaNorm
from autopar.data_parallel.router_loss import RouterLoss
from autopar.distributed.derivatives import check_transforms
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.foreign.modules import own_parameters
from autopar.foreign.transformers import unsplit_modules
from autopar.plan.plan import Plan

if TYPE_CHECKING:
    from autopar.data_parallel.optimizer import ParallelStep

__all__ = ["DataParallel", "blocks_of", "check_offload", "check_tied_experts", "fully_shard"]


class DataParallel:
    """The checks of a model's wrappers and of its optimizers' steps; every rank makes it.

    To be made when weights are sharded over tp, and before pipeline stages release any.

    Args:
        inner: the Hugging Face model in ``model``, or a plain module.

    Attributes:
        wrappers: checks what is wrapped around the model.
        steps: checks the steps of its optimizers.
        norm: of its gradients; also answers for them when torch's own clippers and loss scalers get them.
        step: what happens around the step of the optimizer that :meth:`attach` got; None without one.
    """

    def __init__(
        self, model: nn.Module, inner: nn.Module, plan: Plan, mpu: MPU, config: ParallelConfig, failures: FailureLog
    ) -> None:
        self.model, self.inner, self.plan, self.mpu, self.config = model, inner, plan, mpu, config
        self.failures = failures
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.experts = ExpertGradients(model, plan, mpu, failures) if plan.experts else None
        self.wrappers = WrapperCheck(
            model, mpu, shares_experts=bool(plan.experts), zero_3=config.zero_stage == 3
        )  # reports first what it finds in a step
        several, apart = mpu.dp_cp.size > 1, config.loss_router_aux == "replica"
        self.routers = RouterLoss.of(inner, mpu, failures, apart=apart) if several else None
        compare = config.consistency_check and config.zero_stage != 3
        self.steps = StepCheck(model, inner, mpu, failures, held_alike(model, plan, mpu), compare=compare,
                               whole_every=config.parameters_every, experts=plan.experts,
                               routers_apart=self.routers is None and not apart)  # fmt: skip
        self.shared: SharedExperts | None = None
        if plan.experts:
            self.shared = SharedExperts(model, plan, mpu, failures, self.steps).attach(inner)
        self.norm = ReplicaNorm(model, plan, mpu, failures, scaled=config.precision == "fp16")
        self.step: ParallelStep | None = None

    def attach(self, optimizer: Any, blocks: Sequence[nn.Module] = ()) -> None:
        """Set up ZeRO, precision and clipping. The last step of ``initialize``: the parameters are final. Collective.

        Args:
            optimizer: checked already (:func:`~autopar.data_parallel.optimizer_state.check_optimizer`); or None.
            blocks: of the model.
        """
        model, inner, plan, mpu, config = self.model, self.inner, self.plan, self.mpu, self.config
        if optimizer is not None:
            keep_stage(optimizer, model)
            shard_state(optimizer, self.names, plan, mpu.shards.rank, stepped_whole(optimizer, config))
        if config.zero_stage == 3:
            blocks = [] if isinstance(inner, PreTrainedModel) else blocks
            dtype = DTYPES.get(config.precision)
            fully_shard(model, inner, mpu, dtype, config.zero_cpu_offload, blocks, plan.experts)
            if self.experts is not None:
                self.experts.rebind(model)
            if optimizer is not None:
                rebind(optimizer, self.names, model)
        if optimizer is not None:
            from autopar.data_parallel.optimizer import ParallelStep

            counted = counted_here(dict(model.named_parameters()), plan, mpu)
            self.step = ParallelStep(optimizer, model, inner, plan, mpu, config, counted, self.failures)

    def undo(self) -> None:
        """Remove all of it, and put the fp32 weights back into the model; with ZeRO-1 a collective of the dp axis."""
        self.steps.remove()
        self.wrappers.remove()
        if self.experts is not None and self.shared is not None:
            self.experts.remove(self.model)
            self.shared.remove()
        self.norm.remove()
        if self.routers is not None:
            self.routers.remove()
        if self.step is not None and self.step.model is self.model:  # a copied model is not what the optimizer steps
            self.step.give_back_weights()
            self.step.remove()


# -- ZeRO stage 3: torch's FSDP2 over the data-parallel axis -----------------------------------------------------------


def check_offload(cpu_offload: bool) -> None:
    """Raise ConfigError where FSDP2 cannot offload: it copies through an accelerator's streams."""
    if cpu_offload and not torch.accelerator.is_available():
        raise ConfigError(
            "zero.cpu_offload moves shards between the CPU and an accelerator, and this machine has none; leave it out"
        )


def check_tied_experts(plan: Plan, config: ParallelConfig) -> None:
    """Raise ConfigError where FSDP2 would make two weights of one that two modules of experts share."""
    tied = next((each for name, each in plan.tensors.items() if each.aliases and name in plan.experts), None)
    if tied is not None and config.zero_stage == 3:
        raise ConfigError(
            f"zero.stage=3 does not go with expert_parallel_size={config.expert_parallel_size} above "
            f"tensor_parallel_size={config.tensor_parallel_size} where\n  experts share a weight, as {tied.name} and "
            f"{tied.aliases[0]} do: torch's FSDP2 would make two of it. Use zero.stage 1."
        )


def fully_shard(
    model: nn.Module,
    inner: nn.Module,
    mpu: MPU,
    dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
    blocks: Sequence[nn.Module] = (),
    experts: Set[str] = frozenset(),
) -> None:
    """Shard weights, gradients and the optimizer's future state over dp x cp, block by block, in place.

    ``Parameter`` objects are replaced by ones that hold a ``DTensor``, this rank's shard. Experts that replicas hold
    different ones of are sharded over the ranks with the same ones, of which there may be one. Its gradients are
    averaged over these, as FSDP2 does by itself (:mod:`autopar.tensor_parallel.experts`, note on gradients).

    Args:
        dtype: in which the model computes; weights, gradients and their sums stay in fp32.
        cpu_offload: shards lie in the CPU's memory.
        blocks: of a plain module, what its policy names so.
        experts: names of the parameters of such experts.
    """
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, torch.float32)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
    own = replace(policy, cast_forward_inputs=False)  # the block has cast, and routers' weights may stay in fp32
    for module in _modules_of(model, experts):
        torch_fully_shard(module, mesh=mpu.copies_mesh, mp_policy=own, offload_policy=offload)
    for module in (*blocks_of(inner, blocks), model):
        torch_fully_shard(module, mesh=mpu.dp_cp_mesh, mp_policy=policy, offload_policy=offload)
    model.register_forward_pre_hook(_refuse_transforms, prepend=True, with_kwargs=True)  # before FSDP's own
    encodes = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    if encodes and callable(getattr(model, "generate", None)):  # which calls the encoder by itself
        register_fsdp_forward_method(model, "generate")


def _refuse_transforms(model: nn.Module, *given: Any) -> None:
    check_transforms("zero.stage 3, where torch's FSDP holds the weights", lambda: given)


def _modules_of(root: nn.Module, names: Set[str], path: str = "") -> Iterator[nn.Module]:
    """Yield the outermost modules that have these parameters and no others, adapters around experts among them."""
    held = {path + name for name, _ in root.named_parameters()}
    if held and held <= names:
        yield root
    elif held & names:
        for name, module in root.named_children():
            yield from _modules_of(module, names, f"{path}{name}.")


def blocks_of(inner: nn.Module, blocks: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Return the modules that transformers says must not be split, or recomputes one by one, and ``blocks``.

    Inner ones first; without those that share a weight with a module outside: it would no longer be one weight.
    """
    listed = unsplit_modules(inner)
    named = {id(block) for block in blocks}
    holders = _holders(inner)
    found = [
        module
        for module in inner.modules()
        if module is not inner
        and not isinstance(module, PreTrainedModel)
        and (
            isinstance(module, GradientCheckpointingLayer)
            or any(c.__name__ in listed for c in type(module).__mro__)
            or id(module) in named
        )
        and (own := _holders(module))
        and all(holders[key] == count for key, count in own.items())
    ]
    return found[::-1]


def _holders(root: nn.Module) -> Counter[int]:
    """``id(parameter)`` -> how many modules below ``root`` have it."""
    return Counter(id(p) for module in root.modules() for p in own_parameters(module).values() if p is not None)
