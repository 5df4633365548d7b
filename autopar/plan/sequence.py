"""Sequence parallelism of one model: which modules of its blocks compute with rows, and which with whole sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autopar.plan.plan import ModulePlan, Plan
from autopar.plan.stages import StagePlan

__all__ = ["SequencePlan", "entries_of", "lists_of_blocks"]


@dataclass(frozen=True)
class SequencePlan:
    """The parts of each block that see rows of the sequence (Korthikanti et al. 2022).

    Attributes:
        lists: paths of the blocks, in forward order; of an encoder-decoder model two lists.
        entries: paths of modules whose input is gathered; their region's output is summed into rows.
        wholes: paths of modules that compute with whole sequences, from input to output.
        inputs: names of other arguments of blocks, ``[batch, seq, ...]``, of which each rank's rows are taken.
        seen: names of arguments, of the models around the blocks, that the dry run gave: with others their code may
            read hidden states between the blocks, which are whole there then.
        given: names of arguments that blocks got there; with others a block computes with whole sequences.
        routers_whole: whether what routers return, for a loss that balances experts, is that of whole sequences.
        parameters: block -> names of replicated parameters that work on rows.
    """

    lists: tuple[tuple[str, ...], ...]
    entries: tuple[str, ...] = ()
    wholes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    routers_whole: bool = True
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def lists_of_blocks(stages: StagePlan) -> tuple[tuple[str, ...], ...]:
    """Return the blocks of a model by lists: of an encoder-decoder model the encoder's and the decoder's."""
    at = stages.encoder
    found = (stages.elements,) if at is None else (stages.elements[:at], stages.elements[at + 1 :])
    return tuple(blocks for blocks in found if blocks)


def entries_of(plan: Plan, blocks: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the modules at which rows must become whole: those that a region begins in, and those that mix rows.

    A column-parallel layer begins a region in the module that holds it, whose code reads the length of the sequence;
    where that is the block itself, in the layer.
    """
    entries, wholes = set[str](), set[str]()
    for block in blocks:
        for path, rule in _inside(plan, block):
            parent = path.rpartition(".")[0]
            place = path if parent == block or path == block else parent
            if rule.rule in ("region", "experts", "embedding", "gathered") or rule.gather_output:
                wholes.add(place)
            elif (rule.rule == "column" and not rule.inside) or (rule.rule == "row" and rule.split_input):
                entries.add(place)
    return outermost(entries, wholes), outermost(wholes)


def outermost(paths: set[str], others: set[str] = frozenset()) -> set[str]:  # type: ignore[assignment]
    """Return the paths that do not lie below another one of them, nor below or among the others."""
    return {path for path in paths - others if not any(path.startswith(f"{other}.") for other in paths | others)}


def _inside(plan: Plan, block: str) -> Iterator[tuple[str, ModulePlan]]:
    return ((path, rule) for path, rule in plan.modules.items() if path == block or path.startswith(f"{block}."))
