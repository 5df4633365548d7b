"""Check a call of ``initialize`` before anything changes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autopar import registry
from autopar.compat.transformers import router_loss_module
from autopar.config import ParallelConfig
from autopar.data_parallel.fully_sharded import check_layer_drop, check_offload, check_tied_experts
from autopar.data_parallel.optimizer_state import check_optimizer, check_state
from autopar.data_parallel.precision import DTYPES
from autopar.deferred_init.context import in_lazy_init
from autopar.deferred_init.materialize import Materializer, deferred_fingerprint
from autopar.distributed.agree import same_on_every_rank
from autopar.distributed.mesh import MPU
from autopar.dry_run.plan_model import Plans, plan_model, plans_of, uncollected, warn_no_dry_run
from autopar.errors import ConfigError, nearest
from autopar.plan.matching import check_forwards
from autopar.plan.plan import ModulePlan, Plan
from autopar.plan.stages import elements_of
from autopar.policy.match import Described, find_policy, given_policy, model_inside
from autopar.policy.schema import Policy
from autopar.stored import as_plain, quantizers, stored_weights


class Call(NamedTuple):
    """The checked arguments of ``initialize``.

    Attributes:
        prefix, inner: The path and the object of the Hugging Face model; ``""`` and the module itself for a custom one.
        policy: The policy of the model. ``own_policy``: True if the user passed it.
        optimizer: The kind of step and the names of the parameters of each group.
    """

    config: ParallelConfig
    prefix: str
    inner: Any
    policy: Policy
    own_policy: bool
    optimizer: list[list[str]]

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that must be identical on all ranks."""
        return {"config": dataclasses.asdict(self.config), "optimizer": self.optimizer}


def check_call(model: nn.Module, config: Any, policy: Any, optimizer: Any, lr_scheduler: Any) -> Call:
    """Check the arguments of ``initialize`` on this rank, without changing the model.

    Raises:
        ConfigError, UnsupportedModelError, PolicyError: The call is wrong.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    parsed = ParallelConfig.parse(config, world)
    registry.check_settings(parsed)
    if in_lazy_init():
        raise ConfigError("initialize is not supported inside of lazy_init\n  Call it after `with lazy_init():`.")
    _refuse_second(model)
    own = given_policy(model, policy, parsed.policy)
    prefix, inner = model_inside(model, own)
    if torch.is_inference_mode_enabled():
        raise ConfigError("initialize is not supported in torch.inference_mode\n  Call it outside.")
    check_offload(parsed.zero_cpu_offload)
    named = check_optimizer(optimizer, lr_scheduler, model, parsed)
    found = find_policy(inner, own)
    if parsed.compile:
        blocks = elements_of(model, Described(model, prefix, inner, found))[0]
        _check_compiled(inner, blocks, found.where, parsed.compile_backend)
    return Call(parsed, prefix, inner, found, own is not None, named)


def _check_compiled(model: nn.Module, blocks: Sequence[str], policy: object, backend: str) -> None:
    """Raise ConfigError if a policy names no blocks to compile, or torch has no such backend here."""
    if not blocks:
        raise ConfigError(
            f"compile needs a policy with 'blocks'; the policy of {type(model).__name__} has none ({policy}).\n"
            "  Leave compile out, and use torch.compile(model) after autopar.initialize."
        )
    known = torch.compiler.list_backends(exclude_tags=())  # takes a second
    if backend not in known:
        usual = ", ".join(torch.compiler.list_backends())
        raise ConfigError(f"compile.backend: torch has no '{backend}'.{nearest(backend, known)} Usual ones: {usual}")


def _refuse_second(model: nn.Module) -> None:
    for path, module in model.named_modules():
        place = f"{type(module).__name__}{f' at {path}' if path else ''}"
        state = vars(module).get("_autopar")
        if state is not None:
            raise ConfigError(
                f"{place} is parallelized already: {state.mpu.sizes.in_words()}.\n"
                "  Call autopar.deparallelize(model) before you initialize it again."
            )
        plan = vars(module).get("autopar")
        if isinstance(plan, ModulePlan):
            how = "is part of a model that is parallelized already"
            if not plan.where:
                how = "is a parallel layer already; initialize needs a model of ordinary layers"
            raise ConfigError(f"{place} {how}.")


def make_plans(model: nn.Module, call: Call, mpu: MPU, optimizer: Any) -> tuple[Plans, Materializer]:
    """Plan this rank's shards, run them without data, and draw missing weights; identical on all ranks.

    Raises:
        ConfigError, UnsupportedModelError, PolicyError: The model does not fit the config or the policy.
        ConsistencyError: Another rank raises, or has another plan.
    """

    def check(plan: Plan) -> None:
        plan.check_zero(call.config.zero_stage)
        check_forwards(model, plan)
        check_tied_experts(plan, call.config)
        if call.config.fully_sharded and mpu.dp_cp.size > 1:
            check_layer_drop(model, call.config.zero_stage)
        if optimizer is not None:
            check_state(optimizer, model, plan, call.config)

    def make() -> tuple[Plans, Materializer]:
        if mpu.dp_cp.size > 1 and router_loss_module(call.inner) is not None:
            kind = type(call.inner).__name__
            registry.need("router_loss", f"the auxiliary loss of the routers of {kind} over {mpu.dp_cp.size} replicas")
        if mpu.world_size > 1:
            quantizers(type(call.inner).__name__, getattr(call.inner, "hf_quantizer", None))
        if call.config.precision != "fp32":
            for path, stored in stored_weights(model).items():
                stored.check_dtype(path, DTYPES[call.config.precision])
        with as_plain(model):
            plans = plan_model(plans_of(model, call.inner, call.prefix, call.policy), call.config, check)
        if not plans.tried and call.own_policy and plans.tensors.tp > 1:
            warn_no_dry_run(call.inner)
        return plans, Materializer(model, call.inner, plans.tensors, call.config)

    def fingerprint(made: tuple[Plans, Materializer]) -> dict[str, Any]:
        return made[0].fingerprint(model) | {"lazy": deferred_fingerprint(model)}

    with uncollected():
        plans, weights = same_on_every_rank(make, fingerprint)
    weights.sync_parameters(mpu)
    weights.draw(mpu, lambda name: mpu.pp.rank in plans.stages.holders(name))
    return plans, weights
