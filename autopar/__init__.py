"""autopar: one line turns a Hugging Face model into a tensor-, pipeline- and data-parallel one.

The public names are loaded when they are first used, so that the command line starts without torch.
"""

from typing import TYPE_CHECKING

from autopar.errors import (
    AutoparError,
    CheckpointError,
    ConfigError,
    ConsistencyError,
    PipelineError,
    PolicyError,
    ShardWarning,
    UnsupportedModelError,
    VerificationError,
    nearest,
)
from autopar.on_demand import lazy_names

if TYPE_CHECKING:
    from autopar.api import deparallelize, initialize
    from autopar.applied.whole import full, whole
    from autopar.checkpoint.hf_weights import hf_weights
    from autopar.checkpoint.rotation import latest
    from autopar.config import ParallelConfig
    from autopar.data_parallel.dataloader import gather_for_metrics, prepare_dataloader
    from autopar.data_parallel.gradients import average_gradients, clip_grad_norm_
    from autopar.data_parallel.precision import GradScaler
    from autopar.deferred_init.context import lazy_init
    from autopar.distributed.mesh import MPU
    from autopar.distributed.stop_signal import StopSignal
    from autopar.foreign.patches import patches
    from autopar.pretrained import from_pretrained
    from autopar.tensor_parallel.experts import expert_load
    from autopar.tensor_parallel.whole_hooks import local_hooks
    from autopar.tools.planner.memory_plan import plan_memory
    from autopar.tools.planner.parallelized import metrics, summary
    from autopar.tools.rehearsal.run import rehearse
    from autopar.tools.verification.verify import verify

__version__ = "0.1.0"

__all__ = [
    "MPU",
    "AutoparError",
    "CheckpointError",
    "ConfigError",
    "ConsistencyError",
    "GradScaler",
    "ParallelConfig",
    "PipelineError",
    "PolicyError",
    "ShardWarning",
    "StopSignal",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
    "average_gradients",
    "clip_grad_norm_",
    "deparallelize",
    "expert_load",
    "from_pretrained",
    "full",
    "gather_for_metrics",
    "hf_weights",
    "initialize",
    "latest",
    "lazy_init",
    "local_hooks",
    "metrics",
    "patches",
    "plan_memory",
    "prepare_dataloader",
    "rehearse",
    "summary",
    "verify",
    "whole",
]

_HOMES = {
    "GradScaler": "autopar.data_parallel.precision",
    "MPU": "autopar.distributed.mesh",
    "ParallelConfig": "autopar.config",
    "StopSignal": "autopar.distributed.stop_signal",
    "average_gradients": "autopar.data_parallel.gradients",
    "clip_grad_norm_": "autopar.data_parallel.gradients",
    "deparallelize": "autopar.api",
    "expert_load": "autopar.tensor_parallel.experts",
    "from_pretrained": "autopar.pretrained",
    "full": "autopar.applied.whole",
    "hf_weights": "autopar.checkpoint.hf_weights",
    "gather_for_metrics": "autopar.data_parallel.dataloader",
    "initialize": "autopar.api",
    "latest": "autopar.checkpoint.rotation",
    "lazy_init": "autopar.deferred_init.context",
    "local_hooks": "autopar.tensor_parallel.whole_hooks",
    "metrics": "autopar.tools.planner.parallelized",
    "patches": "autopar.foreign.patches",
    "plan_memory": "autopar.tools.planner.memory_plan",
    "prepare_dataloader": "autopar.data_parallel.dataloader",
    "rehearse": "autopar.tools.rehearsal.run",
    "summary": "autopar.tools.planner.parallelized",
    "tensor_parallel": "autopar.tensor_parallel",
    "verify": "autopar.tools.verification.verify",
    "checkpoint": "autopar.checkpoint",
    "whole": "autopar.applied.whole",
}


def _hint(name: str) -> str:
    return "" if name.startswith("_") else nearest(name, __all__, cutoff=0.7)


__getattr__, __dir__ = lazy_names(__name__, _HOMES, _hint)
