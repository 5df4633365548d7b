"""Provide a model's plan, stages, states, shards and activations for any mesh. Each is computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar import registry
from autopar.compat.transformers import ATTENTION, EXPERTS
from autopar.config import ParallelConfig
from autopar.data_parallel.precision import DTYPES, MasterWeights, to_half
from autopar.deferred_init.files import clear_sources
from autopar.distributed.axis import Axis
from autopar.dry_run.inputs import Model, meta_copy, sample_inputs
from autopar.dry_run.plan_model import ModelPlans
from autopar.errors import ConfigError, UnsupportedModelError, first_line
from autopar.plan.stages import StagePlan, rank_of_stage
from autopar.policy.match import is_hugging_face_model
from autopar.policy.schema import Policy
from autopar.tensor_parallel.apply import chunk_head, keep_logits_sharded
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region
from autopar.tools.planner.activations import ForwardCounter
from autopar.tools.planner.candidate import Candidate, Rows
from autopar.tools.planner.model_states import ModelStates
from autopar.tools.planner.stage_costs import ForwardCount


class PlannedModel:
    """A model, with its plans and counts for all meshes.

    Args:
        model: The full model, which is only read. It may be on the meta device.
        sequence: The tokens of each sample.
        loss_chunk, method, dispatch: The configured loss chunk, context-parallel method and expert dispatch.
        dry_run: A flag to run the stages of each split, as ``initialize`` does. The stages of some models have more
            weights than a single forward shows. A search runs only the stages of its results (:meth:`rehearse`).
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str | Path | Mapping[str, Any] | Policy | None = None,
        *,
        sequence: int,
        precision: str = "bf16",
        optimizer: str = "adamw",
        loss_chunk: int = 0,
        method: str = "auto",
        dispatch: str = "all_to_all",
        dry_run: bool = True,
    ) -> None:
        self.plans = ModelPlans.of(model, policy)
        self.prefix, inner, self.policy = self.plans.prefix, self.plans.inner, self.plans.policy
        if not is_hugging_face_model(inner):
            raise ConfigError(
                f"model must be a Hugging Face PreTrainedModel; got {type(model).__name__}, whose forward has unknown "
                "inputs, so its activations cannot be counted"
            )
        self.model, self.inner = model, inner
        self._policy_file = str(policy) if isinstance(policy, str | Path) else ""
        self.sequence, self.precision, self.optimizer = sequence, precision, optimizer
        self._chunk, self._method, self._dispatch, self._dry_run = loss_chunk, method, dispatch, dry_run

    def sections(self, candidate: Candidate) -> dict[str, Any]:
        """Return the configuration of a candidate in the form of a config file."""
        return candidate.sections(self.precision) | ({"policy": self._policy_file} if self._policy_file else {})

    def stages(self, config: ParallelConfig) -> StagePlan:
        """Return the stages of a configuration. Raises the errors of :func:`~autopar.plan.stages.make_stages`."""
        pipeline, ranks = config.pipeline, config.pipeline_parallel_size
        straight = self.plans.stages(ranks, pipeline.chunks, pipeline.layers_per_stage, dry_run=self._dry_run)
        if not pipeline.folded or ranks == 1:
            return straight
        return replace(straight, rank_of=rank_of_stage(ranks, pipeline.chunks, folded=True))  # on other ranks

    def states(self, tp: int, ep: int = 1) -> ModelStates:
        """Return the count of weights, gradients and optimizer state."""
        plan = self.plans.tensors(tp, experts=ep)
        return self.plans.once(("states", tp, ep), lambda: ModelStates(self.model, self.inner, plan, self.optimizer))

    def count(self, rows: Rows, batch: int, saves: tuple[str, ...] = ()) -> ForwardCount:
        """Count a rank's forward of a micro-batch with ``batch`` samples. Recomputed blocks keep ``saves``."""
        return self.plans.once(("count", rows, batch, saves), lambda: self._counted(rows, batch, saves))

    def _counted(self, rows: Rows, batch: int, saves: tuple[str, ...]) -> ForwardCount:
        inner, region, quantized = self.plans.once(("shard", rows), lambda: self._made_shard(rows))
        start = f"{self.prefix}." if self.prefix else ""
        row = self.plans.stages(1)
        elements = [path.removeprefix(start) for path in row.elements]
        region.expect_logits(True)
        region.start()
        try:
            counter = ForwardCounter(inner, elements, row.encoder, quantized, saves)
            return counter.count(inputs_of(inner, batch, self.sequence))
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(self.inner).__name__} does not run without data, so its activations cannot be counted: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        finally:
            region.finish()

    def check_checkpointing(self, every: int = 1) -> None:
        """Raise ConfigError if one of ``every`` blocks cannot be recomputed."""
        registry.need("activation_checkpointing", "activation_checkpointing: true")
        from autopar.features.activation_checkpointing.setup import check

        check(self.inner, self.plans.stages(1).elements, self.policy.where, every)

    def rehearse(self, config: ParallelConfig) -> None:
        """Run the dry runs of ``initialize``. Raises its errors."""
        self.plans.tried(config.tensor_parallel_size, experts=config.expert_parallel_size)
        pipeline, ranks = config.pipeline, config.pipeline_parallel_size
        if ranks > 1:
            self.plans.stages(ranks, pipeline.chunks, pipeline.layers_per_stage, folded=pipeline.folded)

    def _made_shard(self, rows: Rows) -> tuple[Any, Region, list[torch.Tensor]]:
        """Return the Hugging Face model of one rank's shard, in training mode, its region and its quantized weights."""
        plan = self.plans.tensors(rows.tp, experts=rows.ep)
        shard: Any = without_memory(self.model)
        region = Region(Axis("tp", None, range(plan.tp), rows.tp_rank))
        shards = None
        if plan.shards > plan.tp:
            shards = Axis("ep", None, range(plan.shards), rows.sharer * plan.tp + rows.tp_rank)
        apply(shard, plan, region.axis, region, shards)
        if rows.ep > 1:
            from autopar.features.experts.layers import choose_dispatch

            choose_dispatch(shard, self._dispatch)
        inner = shard.get_submodule(self.prefix)
        if plan.tp == 1 and self._chunk:
            chunk_head(inner, region.axis, region)
        if plan.tp > 1 or self._chunk:
            keep_logits_sharded(inner, self._chunk)
        dtype = DTYPES.get(self.precision)
        if dtype is not None:
            to_half(shard, inner, dtype, MasterWeights(), lambda parameter: False)
        if rows.sequence_parallel:
            experts = min(rows.ep, rows.tp)  # only the experts on tp matter for the sequence
            from autopar.features.sequence_parallel import plan as sequence_plan, setup as sequence_parallel

            sequence = sequence_plan.sequence(self.plans, rows.tp, self.plans.stages(1), experts=experts, routers=False)
            sequence_parallel.apply(shard, sequence, sequence_parallel.SequenceState(region))
        if rows.cp > 1:
            from autopar.features.context_parallel import plan as context_plan, setup as context_parallel

            context = context_plan.rows(self.plans, rows.cp)
            context_parallel.apply(inner, context, Axis("cp", None, range(rows.cp), rows.cp_rank), self._method)
        shard.train()
        stored = plan.quantized()
        return inner, region, [parameter for name, parameter in shard.named_parameters() if name in stored]


def without_memory(model: Model, *, grouped: bool = True, cache: bool = False) -> Model:
    """Copy a model without memory, with its attention and experts. SDPA replaces any other fused attention.

    Args:
        grouped: A flag to keep grouped matmuls of experts, which torch does not support on the meta device in fp32.
        cache: A flag to keep the KV cache.
    """
    copied = meta_copy(model, gradients=True)
    for one, other in zip(copied.modules(), model.modules(), strict=True):
        clear_sources(one)  # the weights of a ``lazy_init`` model are not loaded
        one.training = other.training
        config: Any = getattr(other, "config", None)
        attention, calls = getattr(config, ATTENTION, None), getattr(config, EXPERTS, None)
        own: Any = getattr(one, "config", None)
        if attention is not None:
            setattr(own, ATTENTION, "eager" if attention == "eager" else "sdpa")
        if calls is not None and (grouped or calls == "eager"):
            setattr(own, EXPERTS, calls)
        if hasattr(own, "use_cache") and not cache:
            own.use_cache = False
    for parameter, original in zip(copied.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad and original.is_floating_point())
    return copied


def inputs_of(model: PreTrainedModel, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Make a batch without memory, with labels for models that predict tokens."""
    inputs = sample_inputs(model, batch, sequence)
    ids: torch.Tensor | None = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if ids is not None and ids.ndim == 2 and model.get_output_embeddings() is not None:
        inputs["labels"] = ids.clone()  # a separate storage, as in a micro-batch
    return inputs
