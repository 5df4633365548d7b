"""Upload a parallelized model: merged into a folder by all ranks, sent once, by rank 0, with transformers' own code."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils.hub import PushToHubMixin

from autopar.checkpoint.arguments import HUB_OPTIONS
from autopar.checkpoint.state import state_of
from autopar.distributed.agree import all_ranks, rank_zero
from autopar.errors import CheckpointError


class MergedModel(PushToHubMixin):
    """A folder in Hugging Face's form, as transformers uploads models."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save_pretrained(self, target: str, **_: Any) -> None:
        """Put the files of the folder, not those of folders in it, into another."""
        for path in Path(self.folder).iterdir():
            if path.is_file() and path.name != "README.md":  # transformers writes its own, which a link would share
                try:
                    os.link(path, Path(target) / path.name)
                except OSError:  # another file system
                    shutil.copy2(path, target)


def upload(model: nn.Module, folder: str, repo_id: str, options: Mapping[str, Any]) -> str:
    """Upload a merged folder once, from rank 0; every rank calls it, and returns the address of the commit.

    Args:
        model: parallelized.
        options: of ``PushToHubMixin.push_to_hub``.

    Raises:
        CheckpointError: the same on every rank, with what the hub said.
    """

    def send() -> str:
        tags = options.get("tags") or []
        tags = [*(getattr(model, "model_tags", None) or []), *([tags] if isinstance(tags, str) else tags)]
        given: dict[str, Any] = {**options, "tags": list(dict.fromkeys(tags)) or None}
        return str(MergedModel(folder).push_to_hub(repo_id, **given))

    return rank_zero(state_of(model).mpu, send)


def push_merged(model: Any, repo_id: object, max_shard_size: int | str, options: Mapping[str, Any]) -> str:
    """Merge into a temporary folder of rank 0 (``TMPDIR``, which all nodes must share), and upload it. Collective.

    Raises:
        CheckpointError: the same on every rank; nothing is uploaded if a rank could not write, or was called
            differently.
    """
    mpu, made = state_of(model).mpu, []
    call = {"repo_id": repo_id, **{name: repr(value) for name, value in options.items() if name != "token"}}

    def check() -> dict[str, Any]:
        if not isinstance(repo_id, str) or not repo_id:
            raise CheckpointError(f"push_to_hub: repo_id={repo_id!r} must be a name such as 'user/model'")
        if unknown := [name for name in options if name not in HUB_OPTIONS]:
            raise CheckpointError(f"push_to_hub has no argument {unknown[0]!r}: {', '.join(HUB_OPTIONS)}")
        return call

    def compare(calls: list[dict[str, Any]]) -> None:
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise CheckpointError(f"push_to_hub: rank 0 was called with {calls[0]}, rank {rank} with {other}")

    def start() -> str:
        made.append(tempfile.mkdtemp(prefix="autopar-hub-"))
        return str(made[0])

    all_ranks(mpu, check, check=compare)
    try:
        folder = os.path.join(rank_zero(mpu, start), "merged")
        model.save_parallelized(folder, merge_checkpoints=True, max_shard_size=max_shard_size)
        return upload(model, folder, str(repo_id), options)
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
