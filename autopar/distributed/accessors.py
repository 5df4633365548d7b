"""Groups, ranks and sizes of an MPU, under OSLO's, Megatron-LM's and DeepSpeed's spellings."""

from __future__ import annotations

import torch.distributed as dist

from autopar.distributed.axis import Axis

__all__ = ["MeshAccessors"]


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
        """Return the process group of one whole model replica: tp x pp."""
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
    get_pipe_parallel_group = get_pipeline_parallel_group
    get_pipe_parallel_rank = get_pipeline_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_parallel_world_size
    get_slice_parallel_group = get_tensor_parallel_group
    get_slice_parallel_rank = get_tensor_parallel_rank
    get_slice_parallel_world_size = get_tensor_parallel_world_size
