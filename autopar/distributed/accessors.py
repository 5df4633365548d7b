"""Groups, ranks and sizes of an MPU, under OSLO's, Megatron-LM's and DeepSpeed's spellings."""

from __future__ import annotations

import torch.distributed as dist

from autopar.distributed.axis import Axis

__all__ = ["MeshAccessors"]


class MeshAccessors:
    """The accessors of :class:`~autopar.distributed.mesh.MPU`."""

    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    dp_cp: Axis
    tp_cp: Axis
    tp_pp: Axis
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

    def _data(self, with_context_parallel: bool) -> Axis:
        return self.dp_cp if with_context_parallel else self.dp

    def get_data_parallel_group(self, with_context_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return the process group for ``DistributedDataParallel(model, process_group=...)``.

        With a context-parallel size above 1 that is the one ``with_context_parallel``: gradients are averaged over all
        ranks that hold the same weights, also over those that read the same data.
        """
        return self._data(with_context_parallel).group

    def get_data_parallel_rank(self, with_context_parallel: bool = False) -> int:
        """Return the index of this rank's replica: ``DistributedSampler(rank=...)``."""
        return self._data(with_context_parallel).rank

    def get_data_parallel_world_size(self, with_context_parallel: bool = False) -> int:
        """Return the number of replicas: ``DistributedSampler(num_replicas=...)``."""
        return self._data(with_context_parallel).size

    def get_data_parallel_src_rank(self, with_context_parallel: bool = False) -> int:
        """Return the global rank of the first rank of the data-parallel group."""
        return self._data(with_context_parallel).ranks[0]

    def get_context_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that share this rank's sequences."""
        return self.cp.group

    def get_context_parallel_rank(self) -> int:
        """Return the place of this rank in its context-parallel group."""
        return self.cp.rank

    def get_context_parallel_world_size(self) -> int:
        """Return the size of the context-parallel group; 1: sequences are not split."""
        return self.cp.size

    def get_context_parallel_src_rank(self) -> int:
        """Return the global rank of the first rank of the context-parallel group."""
        return self.cp.ranks[0]

    def get_context_parallel_global_ranks(self) -> list[int]:
        """Return the global ranks of the context-parallel group."""
        return list(self.cp.ranks)

    def get_tensor_and_context_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks of this stage that get the same batch."""
        return self.tp_cp.group

    def get_tensor_and_context_parallel_rank(self) -> int:
        """Return the place of this rank among those of this stage that get the same batch."""
        return self.tp_cp.rank

    def get_tensor_and_context_parallel_world_size(self) -> int:
        """Return the number of ranks of this stage that get the same batch."""
        return self.tp_cp.size

    def get_tensor_and_context_parallel_src_rank(self) -> int:
        """Return the global rank of the first rank of this stage that gets the same batch."""
        return self.tp_cp.ranks[0]

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
        """Return whether this rank holds the embeddings."""
        return self.pp.rank == 0

    def is_pipeline_last_stage(self) -> bool:
        """Return whether this rank holds the head."""
        return self.pp.rank == self.pp.size - 1

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group that holds each shard of the model once: tp x pp."""
        return self.tp_pp.group

    def get_model_parallel_rank(self) -> int:
        """Return the place of this rank in the group of :meth:`get_model_parallel_group`."""
        return self.tp_pp.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that hold each shard of the model once."""
        return self.tp_pp.size

    def get_embedding_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the first and last stage, which hold tied embeddings; None between."""
        return self._embedding.group if self._embedding else None

    def get_data_parallel_group_ranks(self, with_context_parallel: bool = False) -> list[int]:
        """Return the global ranks of the data-parallel group."""
        return list(self._data(with_context_parallel).ranks)

    def get_model_parallel_src_rank(self) -> int:
        """Return the global rank of the first rank of the group of :meth:`get_model_parallel_group`."""
        return self.tp_pp.ranks[0]

    def get_pipeline_parallel_global_ranks_per_group(self) -> list[int]:
        """Return the global ranks of the stages of this replica, the first stage's first."""
        return list(self.pp.ranks)

    def get_embedding_global_ranks(self) -> list[int]:
        """Return the global ranks of the first and the last stage of this replica, one if they are the same."""
        return sorted({self.pp.ranks[0], self.pp.ranks[-1]})

    def is_rank_in_embedding_group(self) -> bool:
        """Return whether this rank holds tied embeddings."""
        return self._embedding is not None

    def get_virtual_pipeline_model_parallel_rank(self) -> None:
        """Return None: which chunks of a schedule a stage holds is the pipeline's affair."""

    def get_virtual_pipeline_model_parallel_world_size(self) -> None:
        """Return None, see :meth:`get_virtual_pipeline_model_parallel_rank`."""

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
