"""The arguments of ``save_parallelized`` and ``from_parallelized``: read, checked, and compared between ranks.

Arguments of OSLO's and transformers' savers and loaders are accepted where they mean the same, else explained.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.checkpoint.format import parse_size
from autopar.checkpoint.offline import check_format
from autopar.checkpoint.rotation import check_keep_last
from autopar.errors import CheckpointError, nearest

HUB_OPTIONS = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")
# Keywords of OSLO's and transformers' savers and loaders -> the value that asks for what happens anyway, besides None.
_FOREIGN: dict[str, dict[str, bool | None]] = {
    "save_parallelized": {
        **dict.fromkeys(("state_dict", "save_function", "mapping", "is_main_process", "variant", "repo_id")),
        **dict.fromkeys(HUB_OPTIONS),
        **dict.fromkeys(("save_config", "safe_serialization", "save_peft_format", "save_original_format"), True),
        **dict.fromkeys(("save_on_each_node", "push_to_hub", "distributed_checkpoint"), False),
    },
    "from_parallelized": {
        **dict.fromkeys(("device_map", "map_location", "dtype", "torch_dtype", "config", "mapping")),
        **dict.fromkeys(("strict", "weights_only"), True),
        "merge_checkpoints": False,
    },
}
_ALIASES = {"save_parallelized": ("save_directory",), "from_parallelized": ("save_directory", "path")}


@dataclass
class SaveRequest:
    """The arguments of one save, checked when it is made. Raises CheckpointError for those that make no sense."""

    directory: Any
    merge_checkpoints: bool
    max_shard_size: Any
    format: str
    keep_last: int | None
    async_save: bool

    def __post_init__(self) -> None:
        self.directory = absolute(self.directory())
        for name in ("merge_checkpoints", "async_save"):
            if type(value := getattr(self, name)) is not bool:
                raise CheckpointError(f"{name}={value!r} must be True or False")
        check_format(self.format)
        if self.format != "safetensors" and not self.merge_checkpoints:
            raise CheckpointError(f"format={self.format!r} needs merge_checkpoints=True; shards are always safetensors")
        if self.keep_last is not None and self.merge_checkpoints:
            raise CheckpointError(
                "keep_last= needs merge_checkpoints=False: a merged folder looks like any model's, and only "
                "checkpoints that are certainly autopar's are deleted"
            )
        if self.keep_last is not None:
            check_keep_last(self.directory, self.keep_last)
        self.max_shard_size = parse_size(self.max_shard_size)


def absolute(directory: object) -> str:
    """Return the absolute path. Raises CheckpointError unless ``directory`` is a path."""
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise CheckpointError(f"directory={directory!r} must be a path")
    return os.path.abspath(os.fsdecode(directory))


def seconds(timeout: object, default: float | None = None) -> float:
    """Return a time-out in seconds. Raises CheckpointError unless it is a positive number or there is a default."""
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0:
        return float(timeout)
    if default is None:
        raise CheckpointError(f"timeout={timeout!r} must be a number of seconds above 0")
    return default


def check_same_call(calls: list[dict[str, Any]]) -> None:
    """Raise CheckpointError unless all ranks were called with the same arguments."""
    for rank, call in enumerate(calls):
        for key, value in calls[0].items():
            if call.get(key) != value:
                raise CheckpointError(
                    f"ranks were called differently: {key} is {value!r} on rank 0 and {call.get(key)!r} on rank {rank}"
                )


def directory_of(method: Callable[..., Any], directory: object, others: Mapping[str, Any]) -> object:
    """Return the folder that a call of ``save_parallelized`` or ``from_parallelized`` names.

    Raises:
        CheckpointError: one of the other keywords means something else here, or nothing; or the folder is named twice.
    """
    name = method.__name__
    aliases, foreign = _ALIASES[name], _FOREIGN[name]
    for key, value in others.items():
        if key in aliases:
            continue
        if key not in foreign:
            known = [known for known in inspect.signature(method).parameters if known not in ("self", "others")]
            raise CheckpointError(f"{name} has no argument {key!r}.{nearest(key, [*known, *aliases])}")
        if value is not None and value is not foreign[key]:
            shown = repr(value) if isinstance(value, bool | int | float | str) else f"<{type(value).__name__}>"
            raise CheckpointError(f"{name} does not take {key}={shown}; it always works as with {key}={foreign[key]}")
    named = {key: others.get(key) for key in aliases if others.get(key) is not None}
    named = ({} if directory is None else {"directory": directory}) | named
    if len(named) > 1:
        (one, first), (other, second), *_ = named.items()
        raise CheckpointError(
            f"{name} got {one}={first!r} and {other}={second!r}, which are the same argument: pass one"
        )
    return next(iter(named.values()), None)
