"""A model as the planner sees it: its plan, stages, states and activations for any mesh, each made once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.activation_checkpoint import check as check_checkpointing
from autopar.config import ParallelConfig
from autopar.data_parallel.master_weights import DTYPES, MasterWeights, to_half
from autopar.distributed.axis import Axis
from autopar.distributed.failures import first_line
from autopar.dry_run.block_reads import find_reads
from autopar.dry_run.equal_blocks import equal_blocks
from autopar.dry_run.imported_plan import rehearse
from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.errors import AutoparError, ConfigError, UnsupportedModelError
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan
from autopar.plan.stages import Reads, StagePlan, make_stages, rank_of_stage
from autopar.planner.activations import count_forward
from autopar.planner.model_states import ModelStates
from autopar.planner.units import ForwardCount
from autopar.policy.described_model import model_inside
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from autopar.policy.schema import Policy
from autopar.tensor_parallel.apply import keep_logits_sharded
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region

__all__ = ["PlannedModel"]

_EAGER = "eager"


class PlannedModel:
    """Facts about one model for all meshes.

    Args:
        model: whole, only read; on the meta device it needs no memory.
        policy: as in :func:`autopar.initialize`.
        sequence: tokens of each sample.
        precision: ``fp32``, ``bf16`` or ``fp16``, as in the configuration.
        optimizer: one of :data:`~autopar.planner.model_states.OPTIMIZERS`.
        loss_chunk: as in the configuration.
        fp32_gradients: see :class:`~autopar.planner.model_states.ModelStates`.
        dry_run: run the stages of each split, as ``initialize`` does: some models' stages hold more than is read off
            one forward. A search does that for what it has found (:meth:`rehearse`).

    Raises:
        ConfigError, PolicyError, UnsupportedModelError: it is no Hugging Face model, or has no policy.
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
        fp32_gradients: bool = True,
        dry_run: bool = True,
    ) -> None:
        own = None if policy is None else read_user_policy(policy)
        self.prefix, inner = model_inside(model, own)
        self.policy = find_policy(inner, own)
        if not isinstance(inner, PreTrainedModel):
            raise ConfigError(
                f"{type(model).__name__} is no Hugging Face model: what its forward takes is not known, so what it "
                "keeps cannot be counted"
            )
        self.model, self.inner = model, inner
        self.sequence, self.precision, self.optimizer = sequence, precision, optimizer
        self._chunk, self._fp32_gradients, self._dry_run = loss_chunk, fp32_gradients, dry_run
        self._shard: tuple[int, nn.Module, Region] | None = None
        self._plans: dict[int, Plan | AutoparError] = {}
        self._stages: dict[Any, StagePlan | AutoparError] = {}
        self._states: dict[int, ModelStates] = {}
        self._counts: dict[tuple[int, int], ForwardCount] = {}

    def plan(self, tp: int) -> Plan:
        """Return the plan for a tensor-parallel size. Raises what :func:`~autopar.plan.make_plan.make_plan` does."""
        return self._once(self._plans, tp, lambda: make_plan(self.model, self.policy, tp))

    def stages(self, config: ParallelConfig) -> StagePlan:
        """Return the stages of a configuration. Raises what :func:`~autopar.plan.stages.make_stages` does."""
        pipeline, ranks = config.pipeline, config.pipeline_parallel_size
        key = (ranks, pipeline.chunks, pipeline.layers_per_stage)

        def make() -> StagePlan:
            return make_stages(
                self.model,
                self.policy,
                ranks,
                reads=self._reads if ranks > 1 else None,
                chunks=pipeline.chunks,
                layers_per_stage=pipeline.layers_per_stage,
            )

        def folded() -> StagePlan:  # the same stages on other ranks
            straight: StagePlan = self._once(self._stages, key, make)
            return replace(straight, rank_of=rank_of_stage(ranks, pipeline.chunks, folded=True))

        if pipeline.folded and ranks > 1:
            return self._once(self._stages, (*key, "folded"), folded)
        return self._once(self._stages, key, make)

    def states(self, tp: int) -> ModelStates:
        """Return what the ranks hold of the model."""
        if tp not in self._states:
            self._states[tp] = ModelStates(
                self.model, self.inner, self.plan(tp), self.optimizer, fp32_gradients=self._fp32_gradients
            )
        return self._states[tp]

    def count(self, tp: int, batch: int) -> ForwardCount:
        """Count what the first rank's shard keeps of a micro-batch of ``batch`` samples; no rank has more units.

        Raises:
            UnsupportedModelError: the model does not run on the meta device.
        """
        if (tp, batch) not in self._counts:
            self._counts[tp, batch] = self._counted(tp, batch)
        return self._counts[tp, batch]

    def check_checkpointing(self) -> None:
        """Raise ConfigError if the blocks cannot be recomputed."""
        check_checkpointing(self.inner, (), self.policy.where)

    def rehearse(self, config: ParallelConfig) -> None:
        """Try the shards and the stages, as ``initialize`` does. Raises what is wrong with them."""
        rehearse(self.inner, self.prefix, self.plan(config.tensor_parallel_size))
        if config.pipeline_parallel_size > 1:
            make_stages(
                self.model,
                self.policy,
                config.pipeline_parallel_size,
                reads=find_reads(self.model, self.policy),
                chunks=config.pipeline.chunks,
                folded=config.pipeline.folded,
                layers_per_stage=config.pipeline.layers_per_stage,
            )

    @functools.cached_property
    def _reads(self) -> Reads | None:
        reads = find_reads(self.model, self.policy)
        return reads if reads is None or self._dry_run else replace(reads, dry_run=None)

    @staticmethod
    def _once(known: dict[Any, Any], key: Any, make: Any) -> Any:
        if key not in known:
            try:
                known[key] = make()
            except AutoparError as error:
                known[key] = error
        if isinstance(known[key], AutoparError):
            raise known[key]
        return known[key]

    def _counted(self, tp: int, batch: int) -> ForwardCount:
        plan = self.plan(tp)
        if self._shard is None or self._shard[0] != tp:
            self._shard = (tp, *self._make_shard(plan))
        _, shard, region = self._shard
        inner: Any = shard.get_submodule(self.prefix)
        equal = equal_blocks(self.inner, plan) if not self.prefix else []
        start = f"{self.prefix}." if self.prefix else ""
        elements = [path.removeprefix(start) for path in self._one_stage.elements]
        region.expect_logits(True)
        region.start()
        try:
            return count_forward(inner, _with_labels(inner, batch, self.sequence), elements, equal)
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(self.inner).__name__} does not run without data, so what it keeps cannot be counted: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        finally:
            region.finish()

    @functools.cached_property
    def _one_stage(self) -> StagePlan:
        return make_stages(self.model, self.policy, 1)

    def _make_shard(self, plan: Plan) -> tuple[nn.Module, Region]:
        """One rank's shard on the meta device, in the mode, precision and with the attention of the run."""
        shard: Any = meta_copy(self.model, gradients=True, equal=equal_blocks(self.model, plan))
        for parameter, original in zip(shard.parameters(), self.model.parameters(), strict=True):
            parameter.requires_grad_(original.requires_grad and original.is_floating_point())
        for copied, module in zip(shard.modules(), self.model.modules(), strict=True):
            for name in ("_attn_implementation", "_experts_implementation"):
                own = getattr(getattr(module, "config", None), name, None)
                if own is not None:
                    setattr(copied.config, name, own if own == _EAGER or name[1] == "e" else "sdpa")
        region = Region(Axis("tp", None, range(plan.tp), 0))
        apply(shard, plan, region.axis, region)
        inner = shard.get_submodule(self.prefix)
        if plan.tp > 1:
            keep_logits_sharded(inner, self._chunk)
        dtype = DTYPES.get(self.precision)
        if dtype is not None:
            to_half(shard, inner, dtype, MasterWeights(), lambda parameter: False)
        for config in {id(m.config): m.config for m in shard.modules() if hasattr(m, "config")}.values():
            config.use_cache = False
        return shard.train(), region


def _with_labels(model: PreTrainedModel, batch: int, sequence: int) -> dict[str, Any]:
    inputs = sample_inputs(model, batch, sequence)
    ids: torch.Tensor | None = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if ids is not None and ids.ndim == 2 and model.get_output_embeddings() is not None:
        inputs["labels"] = ids
    return inputs
