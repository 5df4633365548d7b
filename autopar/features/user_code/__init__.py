"""User code around a sharded model: full tensors in hooks, warnings about reads of shards, full parameters."""

from autopar.registry import Feature, Step

_HERE = "autopar.features.user_code"

FEATURE = Feature(
    name="user_code",
    about="full tensors for user code: in hooks, full_params and full_tensor; warnings about reads of shards",
    names={
        "full_params": f"{_HERE}.full:full_params",
        "local_hooks": f"{_HERE}.hooks:local_hooks",
        "full_tensor": f"{_HERE}.full:full_tensor",
    },
    steps={"watch_user_code": Step(f"{_HERE}.reads:watch_user_code", after="prepare_optimizer")},
)
