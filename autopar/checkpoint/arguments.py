"""Read and check the arguments of ``save_parallelized`` and ``from_parallelized``, and compare them between ranks.

Arguments of OSLO's and transformers' methods are accepted if they ask for the default behavior; others raise.
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
# Keywords of OSLO's and transformers' methods -> the value, besides None, that asks for the default behavior.
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
    """The arguments of one save. The constructor raises CheckpointError for invalid ones."""

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
                "keep_last= is not supported with merge_checkpoints=True: only sharded checkpoints are deleted\n"
                "  Save shards, and merge the last one with `autopar merge`."
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
    """Return a timeout in seconds, or ``default`` if it is invalid. Raises CheckpointError without a default."""
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0:
        return float(timeout)
    if default is None:
        raise CheckpointError(f"timeout={timeout!r} must be a positive number of seconds")
    return default


def check_same_call(calls: list[dict[str, Any]]) -> None:
    """Raise CheckpointError unless all ranks make the same call."""
    for rank, call in enumerate(calls):
        for key, value in calls[0].items():
            if call.get(key) != value:
                raise CheckpointError(
                    f"ranks made different calls: {key} is {value!r} on rank 0 and {call.get(key)!r} on rank {rank}"
                )


def directory_of(method: Callable[..., Any], directory: object, others: Mapping[str, Any]) -> object:
    """Return the folder in a call of ``save_parallelized`` or ``from_parallelized``.

    Raises:
        CheckpointError: Another keyword is unknown or asks for unsupported behavior, or the folder is given twice.
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
            raise CheckpointError(f"{name} does not support {key}={shown}, only {key}={foreign[key]}")
    named = {key: others.get(key) for key in aliases if others.get(key) is not None}
    named = ({} if directory is None else {"directory": directory}) | named
    if len(named) > 1:
        (one, first), (other, second), *_ = named.items()
        raise CheckpointError(
            f"{name} got {one}={first!r} and {other}={second!r}: pass only one of these names for the folder"
        )
    return next(iter(named.values()), None)
