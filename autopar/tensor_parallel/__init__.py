"""The tensor-parallel toolbox, under Megatron-LM's names.

``ColumnParallelLinear``, ``RowParallelLinear`` and ``VocabParallelEmbedding`` are for a model of one's own.

Every function takes ``group`` as its last argument: a process group, or an MPU (its tp group). There is no module-level
state. :mod:`autopar.api` is built from the same parts. The names are loaded when they are first used.
"""

from typing import TYPE_CHECKING, Any

from autopar import registry
from autopar.errors import nearest
from autopar.on_demand import lazy_names

if TYPE_CHECKING:
    from autopar.distributed.axis import Group, axis_of
    from autopar.distributed.broadcast_data import broadcast_data
    from autopar.distributed.rng_tracker import (
        MODEL_PARALLEL_STREAM,
        RandomStateTracker,
        checkpoint,
        get_cuda_rng_tracker,
        manual_seed,
        model_parallel_cuda_manual_seed,
    )
    from autopar.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from autopar.tensor_parallel.loss import vocab_parallel_cross_entropy
    from autopar.tensor_parallel.parallelize import full_state_dict, load_full_state_dict

__all__ = [
    "MODEL_PARALLEL_STREAM",
    "ColumnParallelLinear",
    "Group",
    "RandomStateTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "axis_of",
    "broadcast_data",
    "checkpoint",
    "full_state_dict",
    "get_cuda_rng_tracker",
    "load_full_state_dict",
    "manual_seed",
    "model_parallel_cuda_manual_seed",
    "vocab_parallel_cross_entropy",
]

_HOMES = {
    "distributed.axis": "Group axis_of",
    "distributed.broadcast_data": "broadcast_data",
    "distributed.rng_tracker": "MODEL_PARALLEL_STREAM RandomStateTracker checkpoint get_cuda_rng_tracker manual_seed "
    "model_parallel_cuda_manual_seed",
    "tensor_parallel.layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
    "tensor_parallel.loss": "vocab_parallel_cross_entropy",
    "tensor_parallel.parallelize": "full_state_dict load_full_state_dict",
}
_TOOLBOX = [name for feature in registry.features() for name in feature.toolbox]
__all__ += list(_TOOLBOX)


def _hint(name: str) -> str:
    if name.startswith("_"):
        return ""
    if any(name in vars(names) for _, names in registry.entries("mesh_names")):
        return f" It is a method of the MPU here: model.mpu.{name}()."
    return registry.missing("megatron", "Names of Megatron-LM") or nearest(name, __all__, cutoff=0.7)


def _tool(name: str) -> Any:
    return registry.entry("toolbox", name)


_NAMES = {name: f"autopar.{home}" for home, names in _HOMES.items() for name in names.split()}
__getattr__, __dir__ = lazy_names(__name__, {**dict.fromkeys(_TOOLBOX, _tool), **_NAMES}, _hint)
