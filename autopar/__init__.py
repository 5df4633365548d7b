"""autopar: one line turns a Hugging Face model into a tensor-, pipeline- and data-parallel one.

The public names are loaded when they are first used, so that the command line starts without torch.
"""

from typing import TYPE_CHECKING

from autopar.errors import (
    AutoparError as AutoparError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    ConsistencyError as ConsistencyError,
    PipelineError as PipelineError,
    PolicyError as PolicyError,
    ShardWarning as ShardWarning,
    UnsupportedModelError as UnsupportedModelError,
    VerificationError as VerificationError,
    nearest,
)
from autopar.on_demand import lazy_names

if TYPE_CHECKING:
    from autopar.api import deparallelize as deparallelize, initialize as initialize
    from autopar.applied.whole import full as full, whole as whole
    from autopar.checkpoint.hf_weights import hf_weights as hf_weights
    from autopar.checkpoint.rotation import latest as latest
    from autopar.config import ParallelConfig as ParallelConfig
    from autopar.data_parallel.dataloader import (
        gather_for_metrics as gather_for_metrics,
        prepare_dataloader as prepare_dataloader,
    )
    from autopar.data_parallel.gradients import (
        average_gradients as average_gradients,
        clip_grad_norm_ as clip_grad_norm_,
    )
    from autopar.data_parallel.precision import GradScaler as GradScaler
    from autopar.deferred_init.context import lazy_init as lazy_init
    from autopar.distributed.mesh import MPU as MPU
    from autopar.distributed.stop_signal import StopSignal as StopSignal
    from autopar.foreign.patches import patches as patches
    from autopar.pretrained import from_pretrained as from_pretrained
    from autopar.tensor_parallel.experts import expert_load as expert_load
    from autopar.tensor_parallel.whole_hooks import local_hooks as local_hooks
    from autopar.tools.planner.memory_plan import plan_memory as plan_memory
    from autopar.tools.planner.parallelized import metrics as metrics, summary as summary
    from autopar.tools.rehearsal.run import rehearse as rehearse
    from autopar.tools.verification.verify import verify as verify

__version__ = "0.1.0"

_HOMES = {
    name: f"autopar.{home}"
    for home, names in {
        "api": "deparallelize initialize",
        "applied.whole": "full whole",
        "checkpoint": "checkpoint",
        "checkpoint.hf_weights": "hf_weights",
        "checkpoint.rotation": "latest",
        "config": "ParallelConfig",
        "data_parallel.dataloader": "gather_for_metrics prepare_dataloader",
        "data_parallel.gradients": "average_gradients clip_grad_norm_",
        "data_parallel.precision": "GradScaler",
        "deferred_init.context": "lazy_init",
        "distributed.mesh": "MPU",
        "distributed.stop_signal": "StopSignal",
        "foreign.patches": "patches",
        "pretrained": "from_pretrained",
        "tensor_parallel": "tensor_parallel",
        "tensor_parallel.experts": "expert_load",
        "tensor_parallel.whole_hooks": "local_hooks",
        "tools.planner.memory_plan": "plan_memory",
        "tools.planner.parallelized": "metrics summary",
        "tools.rehearsal.run": "rehearse",
        "tools.verification.verify": "verify",
    }.items()
    for name in names.split()
}
__all__ = ["__version__"]
__all__ += [name for name in globals() if name.endswith(("Error", "Warning"))]
__all__ += [name for name, home in _HOMES.items() if home != f"autopar.{name}"]

__getattr__, __dir__ = lazy_names(
    __name__, _HOMES, lambda name: "" if name.startswith("_") else nearest(name, __all__, cutoff=0.7)
)
