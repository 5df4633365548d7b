"""User code around a sharded model: its hooks get full tensors, its reads of shards a warning; ``full``, ``whole``."""

from autopar.registry import Feature, Step

_HERE = "autopar.features.user_code"

FEATURE = Feature(
    name="user_code",
    about="full tensors for user code: in hooks, by full and whole; warnings of reads of shards",
    names={
        "full": f"{_HERE}.full:full",
        "local_hooks": f"{_HERE}.hooks:local_hooks",
        "whole": f"{_HERE}.full:whole",
    },
    steps={"watch_user_code": Step(f"{_HERE}.reads:watch_user_code", after="prepare_optimizer")},
)
