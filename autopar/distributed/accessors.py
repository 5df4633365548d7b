"""Groups, ranks and sizes of an MPU, under OSLO's, Megatron-LM's and DeepSpeed's spellings."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.errors import ConfigError

__all__ = ["MeshAccessors"]


def _refuse_unmarked_norm(frame: Any) -> None:
    """Raise ConfigError if DeepSpeed clips by a norm of tensors without the marks that say which are shards."""
    if frame.f_code.co_name != "get_weight_norm" or frame.f_globals.get("__name__") != "deepspeed.runtime.utils":
        return
    optimizer = frame.f_back.f_locals.get("self")
    marked = any(hasattr(tensor, "tensor_model_parallel") for tensor in frame.f_locals["parameters"])
    if getattr(optimizer, "clip_grad", 0) and not marked:
        raise ConfigError(
            f"DeepSpeed's {type(optimizer).__name__} (half precision without ZeRO) takes the norm of gradients without "
            "asking whose they are,\n  and so counts the shards of the first rank only: gradient_clipping would be "
            "wrong. Use zero_optimization.stage 1 or 2,\n  or leave gradient_clipping out of DeepSpeed's config."
        )


class MeshAccessors:
    """The accessors of :class:`~autopar.distributed.mesh.MPU`."""

    tp: Axis
    dp: Axis
    pp: Axis
    model: Axis
    _embedding: Axis | None

    def get_tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that hold the other shards of this rank's layers."""
        return self.tp.group

    def get_tensor_parallel_rank(self) -> int:
        """Return the place of this rank in its tensor-parallel group."""
        return self.tp.rank

    def get_tensor_parallel_world_size(self) -> int:
        """Return the size of the tensor-parallel group."""
        return self.tp.size

    def get_tensor_parallel_src_rank(self) -> int:
        """Return the global rank of the first rank of the tensor-parallel group."""
        return self.tp.ranks[0]

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group for ``DistributedDataParallel(model, process_group=...)``."""
        return self.dp.group

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank's replica: ``DistributedSampler(rank=...)``."""
        return self.dp.rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas: ``DistributedSampler(num_replicas=...)``."""
        return self.dp.size

    def get_data_parallel_src_rank(self) -> int:
        """Return the global rank of the first rank of the data-parallel group."""
        return self.dp.ranks[0]

    def get_pipeline_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the stages of this replica."""
        return self.pp.group

    def get_pipeline_parallel_rank(self) -> int:
        """Return the stage of this rank."""
        return self.pp.rank

    def get_pipeline_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pp.size

    def get_pipeline_parallel_first_rank(self) -> int:
        """Return the global rank of the first stage."""
        return self.pp.ranks[0]

    def get_pipeline_parallel_last_rank(self) -> int:
        """Return the global rank of the last stage."""
        return self.pp.ranks[-1]

    def get_pipeline_parallel_next_rank(self) -> int:
        """Return the global rank of the following stage; the last one's is the first."""
        return self.pp.ranks[(self.pp.rank + 1) % self.pp.size]

    def get_pipeline_parallel_prev_rank(self) -> int:
        """Return the global rank of the preceding stage; the first one's is the last."""
        return self.pp.ranks[(self.pp.rank - 1) % self.pp.size]

    def is_pipeline_first_stage(self) -> bool:
        """Whether this rank holds the embeddings."""
        return self.pp.rank == 0

    def is_pipeline_last_stage(self) -> bool:
        """Whether this rank holds the head."""
        return self.pp.rank == self.pp.size - 1

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of one whole model replica: tp x pp.

        Raises:
            ConfigError: DeepSpeed asks while it clips by a norm that counts the shards of the first rank only.
        """
        if self.tp.size > 1:
            _refuse_unmarked_norm(sys._getframe(1))
        return self.model.group

    def get_model_parallel_rank(self) -> int:
        """Return the place of this rank in its model replica."""
        return self.model.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of one model replica."""
        return self.model.size

    def get_embedding_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the first and last stage, which hold tied embeddings; None between."""
        return self._embedding.group if self._embedding else None

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks that hold the same shard as this rank."""
        return list(self.dp.ranks)

    def get_model_parallel_src_rank(self) -> int:
        """Return the global rank of the first rank of the model replica."""
        return self.model.ranks[0]

    def get_pipeline_parallel_global_ranks_per_group(self) -> list[int]:
        """Return the global ranks of the stages of this replica, the first stage's first."""
        return list(self.pp.ranks)

    def get_embedding_global_ranks(self) -> list[int]:
        """Return the global ranks of the first and the last stage of this replica, one if they are the same."""
        return sorted({self.pp.ranks[0], self.pp.ranks[-1]})

    def is_rank_in_embedding_group(self) -> bool:
        """Whether this rank holds tied embeddings."""
        return self._embedding is not None

    def get_virtual_pipeline_model_parallel_rank(self) -> None:
        """Return None: which chunks of a schedule a stage holds is the pipeline's affair."""

    def get_virtual_pipeline_model_parallel_world_size(self) -> None:
        """Return None, see :meth:`get_virtual_pipeline_model_parallel_rank`."""

    def get_context_parallel_rank(self) -> int:
        """Return 0: sequences are not split."""
        return 0

    def get_context_parallel_world_size(self) -> int:
        """Return 1: sequences are not split."""
        return 1

    get_tensor_model_parallel_group = get_tensor_parallel_group
    get_tensor_model_parallel_rank = get_tensor_parallel_rank
    get_tensor_model_parallel_world_size = get_tensor_parallel_world_size
    get_tensor_model_parallel_src_rank = get_tensor_parallel_src_rank
    get_pipeline_model_parallel_group = get_pipeline_parallel_group
    get_pipeline_model_parallel_rank = get_pipeline_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipeline_parallel_world_size
    get_pipeline_model_parallel_first_rank = get_pipeline_parallel_first_rank
    get_pipeline_model_parallel_last_rank = get_pipeline_parallel_last_rank
    get_pipeline_model_parallel_next_rank = get_pipeline_parallel_next_rank
    get_pipeline_model_parallel_prev_rank = get_pipeline_parallel_prev_rank
    get_pipeline_model_parallel_global_ranks_per_group = get_pipeline_parallel_global_ranks_per_group
    get_embedding_tied_group = get_embedding_group
    get_pipe_parallel_group = get_pipeline_parallel_group
    get_pipe_parallel_rank = get_pipeline_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_parallel_world_size
    get_slice_parallel_group = get_tensor_parallel_group
    get_slice_parallel_rank = get_tensor_parallel_rank
    get_slice_parallel_world_size = get_tensor_parallel_world_size
