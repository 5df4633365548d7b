"""The types of the public names, which ``__init__.py`` loads when they are first used."""

from autopar import checkpoint as checkpoint, tensor_parallel as tensor_parallel
from autopar.api import ParallelModel as ParallelModel, deparallelize as deparallelize, initialize as initialize
from autopar.checkpoint.hf_weights import hf_weights as hf_weights
from autopar.checkpoint.rotation import latest as latest
from autopar.compat.patches import patches as patches
from autopar.config import ParallelConfig as ParallelConfig
from autopar.data_parallel.gradients import (
    average_gradients as average_gradients,
    average_in_backward as average_in_backward,
    clip_grad_norm_ as clip_grad_norm_,
)
from autopar.data_parallel.precision import GradScaler as GradScaler
from autopar.deferred_init.context import lazy_init as lazy_init
from autopar.distributed.agree import StopSignal as StopSignal
from autopar.distributed.mesh import MPU as MPU
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
)
from autopar.features.data_loader.loader import (
    gather_for_metrics as gather_for_metrics,
    prepare_dataloader as prepare_dataloader,
)
from autopar.features.experts.layers import expert_load as expert_load
from autopar.features.user_code.full import full_params as full_params, full_tensor as full_tensor
from autopar.features.user_code.hooks import local_hooks as local_hooks
from autopar.pretrained import from_pretrained as from_pretrained
from autopar.tools.planner.memory_plan import plan_memory as plan_memory
from autopar.tools.planner.parallelized import metrics as metrics, summary as summary
from autopar.tools.rehearsal.run import rehearse as rehearse
from autopar.tools.verification.verify import verify as verify

__version__: str
