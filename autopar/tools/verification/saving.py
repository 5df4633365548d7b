"""Saving: a merged checkpoint and a resharded one, against what ``save_pretrained`` of the plain model writes."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel

from autopar.checkpoint.offline import merge_checkpoint, reshard_checkpoint
from autopar.quantized.layers import stored_weights
from autopar.tools.verification.outputs import Distance, local, measure, of_first
from autopar.tools.verification.report import Row
from autopar.tools.verification.session import Session
from autopar.tools.verification.training import Named, pairs, weights, worst_row


def save(session: Session) -> list[Row]:
    """Save merged; compare names and bits with what the plain model saves."""
    if not _merges(session):
        quantized = bool(stored_weights(session.plain))
        why = (
            "quantized weights with adapters are not merged" if quantized else "the plain module has no save_pretrained"
        )
        return [Row("save", "merged checkpoint", None, note=why)]
    plain: Any = session.plain
    with _folder() as folder:
        session.parallel.save_parallelized(folder / "merged", merge_checkpoints=True)
        found = list[Named]()
        if dist.get_rank() == 0:
            plain.save_pretrained(folder / "plain")
            found = list(_files(folder / "merged", folder / "plain"))
        dist.barrier()
    return [worst_row("save", "merged checkpoint", found, _allowed(session), show=False)]


def reshard(session: Session) -> list[Row]:
    """Save shards, write them again for another mesh, merge those, and load them into the model."""
    tp = 3 if session.mpu.tp.size != 3 else 2
    plain: Any = session.plain
    with _folder() as folder:
        session.parallel.save_parallelized(folder / "shards")
        found = list[Named]()
        if dist.get_rank() == 0:
            reshard_checkpoint(folder / "shards", folder / "again", tp=tp, progress=False)
            if _merges(session):
                plain.save_pretrained(folder / "plain")
                merge_checkpoint(folder / "again", folder / "merged", progress=False)
                found = list(_files(folder / "merged", folder / "plain"))
        dist.barrier()
        with torch.no_grad():
            before = {name: local(mine).clone() for name, mine, _ in pairs(session)}
            for _, mine, _ in pairs(session):
                mine.zero_()
        session.parallel.from_parallelized(folder / "again")
    loaded = weights(session)[0]
    with torch.no_grad():
        for name, mine, _ in pairs(session):
            if not hasattr(mine, "full_tensor"):
                mine.copy_(before[name])  # where loading fails, what follows is not to fail with it
    rows = [Row("reshard", f"loaded from tp {tp}", *_facts(loaded))]
    merged = worst_row("reshard", f"merged from tp {tp}", found, _allowed(session), show=False)
    return [*rows, merged] if _merges(session) else rows


def _merges(session: Session) -> bool:
    """Return whether the model has a merged checkpoint: transformers' own do, without adapters on quantized weights."""
    adapted = any(".base_layer" in path for path in stored_weights(session.plain))
    return isinstance(session.plain, PreTrainedModel) and not adapted


def _facts(row: Row) -> tuple[Any, ...]:
    return row.holds, row.difference, row.allowed, row.name, row.note


def _allowed(session: Session) -> float:
    return 0.0 if session.exact else session.tolerance


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that all ranks know; they are on one machine, or share where temporary files are. No progress bars."""
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    place = of_first(tempfile.mkdtemp(prefix="autopar-verify-") if dist.get_rank() == 0 else "")
    try:
        yield Path(place)
    finally:
        if shown:
            transformers.logging.enable_progress_bar()
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)


def _files(mine: Path, plain: Path) -> Iterator[Named]:
    """Compare the tensors of two checkpoints, one at a time."""
    theirs, ours = _tensors(plain), _tensors(mine)
    for name in theirs.keys() ^ ours.keys():
        where = "is missing" if name in theirs else "is not one of the plain model's"
        yield Named(name, Distance(math.inf, where))
    for name in theirs.keys() & ours.keys():
        with safe_open(theirs[name], "pt") as one, safe_open(ours[name], "pt") as other:
            yield Named(name, measure(other.get_tensor(name), one.get_tensor(name)))


def _tensors(folder: Path) -> dict[str, Path]:
    """Name -> file."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found
