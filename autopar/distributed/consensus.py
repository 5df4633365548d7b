"""Work that every rank of the world does, with one verdict: all succeed alike, or all raise."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.distributed.mesh import start_process_group
from autopar.errors import CheckpointError, ConsistencyError

__all__ = ["differences", "on_every_rank"]

Result = TypeVar("Result")

_SHOWN = 4  # differences that an error lists
_LONGEST = 100  # characters of a value


def on_every_rank(step: Callable[[], Result], facts: Callable[[Result], Any]) -> Result:
    """Run ``step`` on every rank of the world; if it fails on one, or its facts differ between ranks, all raise.

    Args:
        facts: what must be the same on all ranks, as JSON; names in it are quoted where it differs.

    Raises:
        ConsistencyError, or CheckpointError after one: on the ranks where nothing failed, quoting the error of the one
            that did; or naming what differs, with both values. A rank that fails raises its own error.
    """
    result: Result | None = None
    error: Exception | None = None
    made: Any = None
    verdict: tuple[str, str]
    try:
        result = step()
        made = facts(result)
        text = json.dumps(made, default=str)
        verdict = ("fine", hashlib.blake2b(text.encode(), digest_size=12).hexdigest())
    except Exception as caught:  # whatever it is, the peers must not wait for this rank
        kind = "checkpoint" if isinstance(caught, CheckpointError) else "error"
        error, verdict = caught, (kind, f"{type(caught).__name__}: {caught}")
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start_process_group()
        verdicts: list[tuple[str, str]] = [verdict] * dist.get_world_size()
        dist.all_gather_object(verdicts, verdict)
        if error is None:
            _raise_for_others(verdicts)
            _raise_for_differences(verdicts, made)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _raise_for_others(verdicts: list[tuple[str, str]]) -> None:
    for rank, (kind, text) in enumerate(verdicts):
        if kind == "checkpoint":
            raise CheckpointError(f"rank {rank} cannot load the model, so no rank does:\n{text}")
        if kind == "error":
            raise ConsistencyError(f"rank {rank} cannot initialize its model, so no rank does:\n{text}")


def _raise_for_differences(verdicts: list[tuple[str, str]], facts: Any) -> None:
    different = [rank for rank, verdict in enumerate(verdicts) if verdict != verdicts[0]]
    if not different:
        return
    mine = json.loads(json.dumps(facts, default=str))
    everyone = [mine] * len(verdicts)
    dist.all_gather_object(everyone, mine if dist.get_rank() in (0, different[0]) else None)
    found = list(islice(differences(everyone[0], everyone[different[0]]), _SHOWN + 1))
    lines = [f"  {name}: rank 0: {one}, rank {different[0]}: {other}" for name, one, other in found[:_SHOWN]]
    raise ConsistencyError(
        f"ranks {different} call autopar.initialize differently than rank 0:\n"
        + "\n".join(lines)
        + ("\n  and more" if len(found) > _SHOWN else "")
        + "\n  Every rank gives it the same model (names, shapes, dtypes, devices, requires_grad), config and policy."
    )


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Find where two values of plain data differ: the name of the place, and both values as text."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            place = f"{name}.{key}" if name else str(key)
            if key not in one or key not in other:
                yield place, _entry(one, key), _entry(other, key)
            else:
                yield from differences(one[key], other[key], place)
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) == len(other):
            for number, (left, right) in enumerate(zip(one, other, strict=True)):
                yield from differences(left, right, f"{name}[{number}]")
        else:
            yield name, f"{len(one)} entries", f"{len(other)} entries"
    elif one != other:
        yield name, _show(one), _show(other)


def _entry(values: Mapping[str, Any], key: str) -> str:
    return _show(values[key]) if key in values else "missing"


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
