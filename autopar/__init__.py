"""Make an unmodified Hugging Face model tensor-, pipeline-, context-, expert- and data-parallel in one line.

Public names are imported at their first use, so that the command line starts without torch.
"""

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
from autopar.registry import OF_FEATURES, lazy_names, public_name

__version__ = "0.1.0"

_HOMES = {
    name: f"autopar.{home}"
    for home, names in {
        "api": "ParallelModel deparallelize initialize",
        "checkpoint": "checkpoint",
        "checkpoint.hf_weights": "hf_weights",
        "checkpoint.rotation": "latest",
        "config": "ParallelConfig",
        "data_parallel.gradients": "average_gradients average_in_backward clip_grad_norm_",
        "data_parallel.precision": "GradScaler",
        "deferred_init.context": "lazy_init",
        "distributed.mesh": "MPU",
        "distributed.agree": "StopSignal",
        "compat.patches": "patches",
        "pretrained": "from_pretrained",
        "tensor_parallel": "tensor_parallel",
    }.items()
    for name in names.split()
}
__all__ = ["__version__"]
__all__ += [name for name in globals() if name.endswith(("Error", "Warning"))]
__all__ += [name for name, home in _HOMES.items() if home != f"autopar.{name}"]
__all__ += list(OF_FEATURES)


__getattr__, __dir__ = lazy_names(
    __name__,
    _HOMES | dict.fromkeys(OF_FEATURES, public_name),
    lambda name: "" if name.startswith("_") else nearest(name, __all__, cutoff=0.7),
)
