"""Sizes of a mesh that the model of a checkpoint can run with, told from its manifest and the policy that it names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from autopar.checkpoint.format import Manifest
from autopar.errors import CheckpointError
from autopar.plan.matching import rows_of
from autopar.plan.plan import TensorPlan
from autopar.policy.load import own_policies
from autopar.policy.schema import HIDDEN, Policy, UnitSpec

__all__ = ["MOST", "check_blocks", "check_fits", "check_sizes"]

MOST = 4096  # files that are open at once are bounded by this


def check_sizes(tp: int, pp: int) -> None:
    """Raise CheckpointError unless both sizes can be made."""
    for name, size in (("--tp", tp), ("--pp", pp)):
        if not 1 <= size <= MOST:
            raise CheckpointError(f"{name} {size} must be between 1 and {MOST}")
    if tp * pp > MOST:
        raise CheckpointError(f"--tp {tp} x --pp {pp} = {tp * pp} files are more than {MOST}")


def check_fits(manifest: Manifest, tp: int, pp: int) -> None:
    """Check that the model can run with these sizes. Of a policy of the user's own nothing is known.

    Raises:
        CheckpointError: fewer units than ranks, which several ranks cannot share, or fewer blocks than stages; says the
            largest size that fits.
    """
    counted = _counted(manifest.tensors) if tp > 1 else {}
    if pp == 1 and all(count >= tp for count, _ in counted.values()):
        return
    policy = own_policies().get(manifest.policy)
    if policy is None:
        return
    limits = {unit: found for unit, found in counted.items() if not _may_be_fewer(unit, policy)}
    few = next(((unit, count, where) for unit, (count, where) in limits.items() if count < tp), None)
    if few is not None:
        unit, count, where = few
        raise CheckpointError(
            f"--tp {tp} does not fit this {manifest.model_type} model: {count} {unit} cannot be sharded over {tp} "
            f"ranks.\n  They lie in {where}.\n"
            f"  Largest size that fits this model: {min(n for n, _ in limits.values())}."
        )
    check_blocks(policy, manifest.tensors, manifest.model_type, pp)


def check_blocks(policy: Policy, names: Iterable[str], model_type: str, pp: int) -> None:
    """Raise CheckpointError if there are more stages than blocks; says how many there are."""
    places = [rf"(?:.*\.)?{_pattern(tower.blocks_path)}\.(\w+)\." for tower in policy.towers if tower.blocks_path]
    pattern = re.compile(f"({'|'.join(places)})" if places else "(?!)")
    count = len({found[1] for name in names if (found := pattern.match(name))})
    if 1 < count < pp:  # a single one may be called several times
        raise CheckpointError(
            f"--pp {pp} does not fit this {model_type} model: {count} blocks cannot be split into {pp} stages.\n"
            f"  Largest number of stages that fits this model: {count}."
        )


def _pattern(path: str) -> str:
    """Return the path of a list of blocks as a regular expression."""
    return r"\.".join(r"\w+" if segment == "*" else re.escape(segment.removesuffix("?")) for segment in path.split("."))


def _counted(tensors: Mapping[str, TensorPlan]) -> dict[str, tuple[int, str]]:
    """Return unit -> the smallest number of them in a tensor, and which one that is."""
    counted: dict[str, tuple[int, str]] = {}
    for name, tensor in tensors.items():
        for block in tensor.layout.blocks if tensor.layout is not None else ():
            if block.unit not in counted or block.count < counted[block.unit][0]:
                counted[block.unit] = block.count, name
    return counted


def _may_be_fewer(unit: str, policy: Policy) -> bool:
    """Tell whether there may be fewer of a unit than ranks: several hold the same one, or it is whole or a row."""
    if unit == HIDDEN or unit in rows_of(policy):
        return True
    tables: list[Mapping[str, UnitSpec]] = [*(tower.units for tower in policy.towers), policy.units]
    return all(_is_shared(unit, table) for table in tables if unit in table)  # of a model inside nothing is known


def _is_shared(unit: str, table: Mapping[str, UnitSpec]) -> bool:
    spec: UnitSpec | None = table[unit]
    if spec is not None and spec.replicate:
        return True
    while spec is not None:
        if spec.or_whole:
            return True
        spec = table.get(spec.follows) if spec.follows is not None else None
    return False
