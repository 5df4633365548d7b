"""ZeRO stages 2 and 3: shard weights, gradients and optimizer state over the replicas with torch's FSDP2.

[Note: FSDP2 and pipeline stages] Each block is one parameter group of FSDP2. Stage 3 gathers its weights for each
forward and backward. Stage 2 keeps them from the forward to the backward. In a pass of micro-batches through pipeline
stages FSDP2's reduction is off until the end, which reduces the summed gradients of all micro-batches once. Stage 2
gathers the weights once per pass, stage 3 for each micro-batch. Replicas gather together, so all of them must run the
same blocks in the same order; the order is compared when it changes. Gathered weights are freed after a forward without
gradients and before a step, because a backward may never come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from autopar.compat.c10d import (
    begin_forward,
    drop_gradients,
    end_forward,
    forward_order,
    free_weights,
    gathered_parameters,
    reduce_gradients,
    running,
)
from autopar.compat.patches import hold, release
from autopar.compat.tensors import own_parameters
from autopar.compat.transformers import caches_in, given_cache, holds_tokens, unsplit_modules
from autopar.config import ParallelConfig
from autopar.data_parallel.precision import DTYPES
from autopar.distributed.agree import meet
from autopar.distributed.autograd_functions import refuse_transforms
from autopar.distributed.axis import Axis
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
from autopar.guards.step import forget, listen
from autopar.plan.plan import Plan
from autopar.plan.stages import dropped_blocks


def check_offload(cpu_offload: bool) -> None:
    """Raise ConfigError without an accelerator, whose streams FSDP2 uses to offload."""
    if cpu_offload and not torch.accelerator.is_available():
        raise ConfigError("zero.cpu_offload needs an accelerator, got a machine without one\n  Leave it out.")


def check_tied_experts(plan: Plan, config: ParallelConfig) -> None:
    """Raise ConfigError if two modules of experts share a weight, which FSDP2 would untie."""
    tied = next((each for name, each in plan.tensors.items() if each.aliases and name in plan.experts), None)
    if tied is not None and config.fully_sharded:
        raise ConfigError(
            f"zero.stage={config.zero_stage} is not supported with expert_parallel_size={config.expert_parallel_size} "
            f"above tensor_parallel_size={config.tensor_parallel_size} and tied experts ({tied.name} and "
            f"{tied.aliases[0]})\n  Use zero.stage 1; torch's FSDP2 would untie the weight."
        )


def check_layer_drop(model: nn.Module, stage: int) -> None:
    """Raise ConfigError if replicas would skip different blocks ([Note: FSDP2 and pipeline stages])."""
    dropped = dropped_blocks(model)
    if dropped:
        raise ConfigError(
            f"zero.stage={stage} is not supported with {dropped}, which skips blocks at random: replicas must run the "
            "same blocks\n  Set it to 0 (in the config, before the model is made), or use zero.stage 1."
        )


_ADVICE = (
    "All replicas hold shards: call the model on every rank, each with its batch, and print or save on one of them."
)
_SAME_MODULES = (
    "Replicas gather weights together and must run the same modules in the same order. Use batches that need the same\n"
    "  modules (an image in each, or in none), do not skip blocks at random, or use zero.stage 1."
)


class FullySharded:
    """A model whose parameters FSDP2 shards over dp x cp, block by block, in place.

    FSDP2 replaces ``Parameter`` objects by new ones, which hold this rank's shard as a ``DTensor``. Experts that differ
    between replicas are sharded over the ranks with the same experts; these ranks also average their gradients.

    Args:
        blocks: The blocks of a custom module, by its policy.
        experts: The names of expert parameters that differ between replicas.

    Attributes:
        read: The places in user code that have read values of DTensors, on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        mpu: MPU,
        config: ParallelConfig,
        failures: FailureLog,
        blocks: Sequence[nn.Module] = (),
        experts: Set[str] = frozenset(),
    ) -> None:
        self.failures, self._mpu, self.read = failures, mpu, set[tuple[str, int]]()
        self._compares = config.consistency_check and mpu.dp_cp.size > 1
        self._at, self._ran = (0, ""), 0  # number of blocks run in this forward, and the last one; groups before it
        self._next = dict[tuple[int, str], str]()  # the block that followed in the previous forward; "": the end
        self._meeting = False  # True while this rank waits for the other ranks, and after that wait failed
        self._stage, self._keeps = config.zero_stage, config.zero_stage == 2  # keeps weights until the backward
        dtype = DTYPES.get(config.precision)
        if dtype is not None:
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.float()
        policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, torch.float32)
        own = replace(policy, cast_forward_inputs=False)  # the block casts inputs; routers' weights may stay in fp32
        offload = CPUOffloadPolicy() if config.zero_cpu_offload else OffloadPolicy()
        how: dict[str, Any] = {"offload_policy": offload, "reshard_after_forward": False if self._keeps else None}
        for module in _modules_of(model, experts):
            fully_shard(module, mesh=mpu.copies_mesh, mp_policy=own, **how)
        groups = blocks_of(inner, blocks)
        self._blocks = len(groups)
        for module in (*groups, model):
            fully_shard(module, mesh=mpu.fsdp_mesh, mp_policy=policy, **how)
        for module in model.modules():
            if hasattr(module, "idle_zeros"):  # experts: FSDP2 reduces the same gradients on all ranks
                module.idle_zeros = True  # type: ignore[assignment]
        self.model: Any = model
        self._gathered = self._passing = False  # weights may be gathered; a pass of micro-batches runs
        self._paths = {module: path for path, module in model.named_modules()}
        for module in groups:  # generate may call submodules directly
            module.register_forward_pre_hook(self._before_block)
            module.register_forward_hook(self._after_block)
        self._entered: nn.Module | None = None  # a submodule that user code calls directly
        inside = {each for module in groups for each in module.modules() if each is not module}
        for module in {*model.modules()} - {model} - inside:
            if next(module.parameters(), None) is not None:
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
                module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
        model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)  # before FSDP's own
        model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        encodes = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
        around = encodes or inner is not model  # generate calls the encoder or the wrapped model directly
        if around and callable(getattr(model, "generate", None)):
            register_fsdp_forward_method(model, "generate")
        listen(self)
        hold(self)
        held = ((module, name) for module in model.modules() for name in own_parameters(module))
        self._held = [(module, name, own_parameters(module)[name]) for module, name in held]

    def axis_of(self, mesh: DeviceMesh) -> Axis | None:
        """Return the axis over which ``mesh`` shards parameters of this model; None for an unknown mesh."""
        if mesh == self._mpu.fsdp_mesh:
            return self._mpu.dp_cp
        return self._mpu.copies if self._mpu.copies.size > 1 and mesh == self._mpu.copies_mesh else None

    def remove(self) -> None:
        """Stop listening to steps."""
        forget(self)
        release(self)

    def _check_parameters(self) -> None:
        """Raise ConfigError if user code replaced parameters that FSDP2 holds."""
        found = [(module, name, own, own_parameters(module).get(name)) for module, name, own in self._held]
        others = [(module, name, now) for module, name, own, now in found if now is not own]
        gathered = gathered_parameters(self.model) if others else set()  # generate gathers before a forward
        new = [(module, name) for module, name, now in others if id(now) not in gathered]
        if new:
            listed = ", ".join(f"{self._paths.get(module, '?')}.{name}" for module, name in new[:3])
            raise ConfigError(
                f"{len(new)} parameters were replaced after autopar.initialize ({listed}), which zero.stage "
                f"{self._stage} (FSDP2) does not support\n  Tie or replace weights before autopar.initialize; write "
                "values with parameter.copy_() or model.load_state_dict()."
            )

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        refuse_transforms(lambda: (args, kwargs))
        if not self._passing:
            self._check_parameters()
        if not torch.is_grad_enabled() and not _is_filled(given_cache(kwargs)):
            self._meet()
        self._gathered, self._meeting = True, False
        self._at, self._ran = (0, self._paths[model]), len(forward_order(self.model))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the root's weights for a submodule that user code calls directly."""
        if self._entered is not None or running(self.model) != "IDLE":
            return None
        self._before_forward(module, args, kwargs)
        self._entered = module
        return begin_forward(self.model, args, kwargs)

    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if self._entered is not module:
            return None
        self._entered = None
        output = end_forward(self.model, output)
        self._after_forward(self.model, args, kwargs, output)
        return output

    def _meet(self) -> None:
        """Wait for all ranks before weights are gathered without gradients: one rank may evaluate alone."""
        axis = self._mpu.fsdp
        if axis.size > 1 and not self.failures.in_deadline and not torch.compiler.is_compiling():
            what = f"weights, sharded by zero.stage {self._stage}, in a forward without gradients"
            meet(axis, what, self.failures.timeout, _ADVICE)

    def _before_block(self, module: nn.Module, *_: Any) -> None:
        self._gathered = True
        if not torch.compiler.is_compiling() and running(self.model) == "FORWARD":  # not when a backward runs it again
            self._compare(self._paths[module])

    def _compare(self, path: str) -> None:
        """Wait for the other replicas where this forward differs from the order of the previous forward."""
        at, self._at = self._at, (self._at[0] + 1, path)
        if self._compares and self._next.get(at) != path:
            what = f"the weights of {path} (block {at[0]} of a forward, sharded by zero.stage {self._stage})"
            self._meeting = True
            meet(self._mpu.dp_cp, what if path else "no more weights", self.failures.timeout, _SAME_MODULES)
            self._meeting = False
            self._next[at] = path

    def _end_failed_forward(self) -> None:
        """Bring FSDP2 into the state of the other replicas, so that all can skip a batch that failed on one of them.

        If this rank failed after the last block, they have ended this forward. Otherwise they wait for weights of this
        rank, or have failed as well.
        """
        ended = self._next.get(self._at) == "" or (self._at not in self._next and self._at[0] == self._blocks)
        if ended and not self._meeting:
            with suppress(ConsistencyError):  # the error of this rank says more
                self._compare("")
        if ended and not self._meeting:
            if running(self.model) == "FORWARD":
                end_forward(self.model, None)
        elif not self._passing:
            self.reshard()

    def _after_block(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            made = output[0] if isinstance(output, tuple) else output
            if isinstance(made, torch.Tensor) and made.requires_grad:
                made.register_hook(self._check_order)

    def _check_order(self, gradient: torch.Tensor) -> None:
        """Raise ConfigError in a backward with ``create_graph=True``: FSDP2 frees the weights that it needs."""
        if torch.is_grad_enabled():
            raise ConfigError(
                f"create_graph=True is not supported with zero.stage {self._stage}: torch's FSDP2 frees the weights in "
                "the backward, which a second derivative reads\n  Use zero.stage 1, or tensor_parallel_size."
            )

    def _after_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if output is None:
            self._end_failed_forward()
        else:
            ran = forward_order(self.model)[self._ran :] if self._at[0] == 0 else []  # compiled blocks, without hooks
            for path in (*filter(None, ran), ""):
                self._compare(path)
        if not torch.is_grad_enabled() and given_cache(kwargs) is None:  # generate continues with them
            self.reshard()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.reshard()

    def reshard(self) -> None:
        """Free gathered weights, without communication. Gradients that are not reduced yet stay."""
        if self._gathered:
            self._gathered = False
            free_weights(self.model)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Run the micro-batches of a pass inside the block, and reduce their summed gradients at its end."""
        self._check_parameters()
        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self.model.set_is_last_backward(False)
        self.model.set_requires_gradient_sync(False)
        self.model.set_reshard_after_backward(not self._keeps)
        self._gathered = self._passing = True
        try:
            for module in modules if self._keeps else ():
                module.unshard()
            yield
            reduce_gradients(self.model)
        except BaseException:
            drop_gradients(self.model)  # zero_grad does not reach unreduced gradients
            raise
        finally:
            self._passing = False
            self.reshard()


def _is_filled(cache: Any) -> bool:
    """Return whether an earlier forward has filled a cache; a cache of an unknown class counts as filled."""
    return any(map(holds_tokens, caches_in(cache))) if isinstance(cache, Cache) else cache is not None


def _modules_of(root: nn.Module, names: Set[str], path: str = "") -> Iterator[nn.Module]:
    """Yield the outermost modules with only these parameters, adapters around experts included."""
    held = {path + name for name, _ in root.named_parameters()}
    if held and held <= names:
        yield root
    elif held & names:
        for name, module in root.named_children():
            yield from _modules_of(module, names, f"{path}{name}.")


def blocks_of(inner: nn.Module, blocks: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Return transformers' unsplittable and checkpointed modules, and ``blocks``; inner modules come first.

    Modules that share a weight with a module outside are left out, because FSDP2 would untie it.
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
    """Count the modules of ``root`` that have a parameter: ``id(parameter)`` -> number."""
    return Counter(id(p) for module in root.modules() for p in own_parameters(module).values() if p is not None)
