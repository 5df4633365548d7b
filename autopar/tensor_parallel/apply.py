"""Tensor parallelism of one model: its layers and parameters, its hooks and methods, and all of that undone."""

from __future__ import annotations

import itertools

from torch import nn
from transformers import PreTrainedModel

from autopar.checks.forward import ForwardCheck
from autopar.checks.step import StepCheck
from autopar.config import ParallelConfig
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.plan.plan import Plan
from autopar.plan.stages import StagePlan
from autopar.tensor_parallel import hooks, parameter_marks
from autopar.tensor_parallel.regions import Region

__all__ = ["apply", "attach", "keep_logits_sharded", "mark_parameters", "undo"]

_MODELS = itertools.count(1)  # every rank makes the same ones, in the same order


def apply(model: nn.Module, plan: Plan, mpu: MPU, dispatch: str) -> Region:
    """Swap the layers of ``model`` and shard its parameters, in place; no communication. At tp 1 nothing changes."""
    region = Region(mpu.tp)
    region.model = str(next(_MODELS))
    if plan.shards > 1:
        from autopar.tensor_parallel import parallelize

        parallelize.apply(model, plan, mpu.tp, region, mpu.shards, dispatch)
    region.find_dropout(model)
    return region


def attach(
    inner: nn.Module,
    plan: Plan,
    mpu: MPU,
    config: ParallelConfig,
    region: Region,
    failures: FailureLog,
    steps: StepCheck,
) -> None:
    """Register hooks and methods on the Hugging Face model (or plain module), with memory by now. Collective over tp
    and cp.

    Args:
        region: of :func:`apply`.
        failures: where ``generate`` publishes its errors.
        steps: counts the steps of the model's optimizers.
    """
    check = None
    if config.consistency_check and mpu.tp_cp.size > 1:
        kind, _, number = config.consistency_inputs.partition(" ")
        every = {"auto": 1 if mpu.device.type == "cpu" else 10, "first": 0, "always": 1}.get(kind)
        check = ForwardCheck(mpu, failures, region.draws, steps, int(number) if every is None else every)
        check.find_sharded(inner)
    hooks.attach(inner, plan, mpu, region, failures, check)
    if mpu.tp_cp.size > 1:
        hooks.draw_seeds_alike(inner)
    if plan.tp > 1 and config.loss_gather_logits == "on_read":
        keep_logits_sharded(inner, config.loss_chunk)


def keep_logits_sharded(model: nn.Module, chunk: int) -> None:
    """Let the head of a language model leave its logits sharded until they are read."""
    from autopar.tensor_parallel.parallel_layer import ParallelLayer

    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if not isinstance(head, ParallelLayer) or not head.autopar.gather_output:
        return
    layout = head.autopar_layouts["weight"]
    ranges = [list(layout.ranges(rank)) for rank in range(head.tp.size)]
    one_each = all(len(held) <= 1 for held in ranges) and sorted(ranges) == ranges
    if isinstance(head, nn.Linear) and one_each and not layout.replicated:
        head.chunk = chunk


def mark_parameters(model: nn.Module, plan: Plan, stages: StagePlan, mpu: MPU) -> None:
    """Mark sharded parameters as Megatron-LM does; the last step, on the parameters that stay."""
    parameter_marks.mark(model, plan, stages, mpu)
    if mpu.tp.size > 1:
        from autopar.tensor_parallel import adapters

        adapters.attach(model)


def undo(model: nn.Module, inner: nn.Module, plan: Plan, mpu: MPU) -> None:
    """Give back plain layers with full weights and gradients, without hooks and methods. Collective over tp."""
    if plan.shards > 1:
        from autopar.tensor_parallel import adapters, parallelize

        parallelize.undo(model, plan)
        adapters.detach(model)
    hooks.detach(inner)
    parameter_marks.unmark(model)
