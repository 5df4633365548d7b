"""Pipeline stages: which blocks, and which tensors, each stage of a model holds. Pure, plain data, no process group.

A model is a row of *elements* in forward order: its blocks; of an encoder-decoder model the encoder's blocks, then the
encoder itself (its output is what the decoder reads), then the decoder's blocks. A stage is a contiguous run of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.errors import ConfigError, UnsupportedModelError
from autopar.plan.cross_reads import looks_further
from autopar.plan.matching import Scope, all_scopes, join, uses_of
from autopar.plan.model_outputs import refuse_collected
from autopar.plan.partition import partition, rank_of_stage
from autopar.policy.described_model import model_inside
from autopar.policy.schema import Policy

__all__ = ["Reads", "StagePlan", "elements_of", "make_stages"]


@dataclass
class Reads:
    """What a model's own forward reads where (:func:`autopar.dry_run.block_reads.trace_reads`).

    Attributes:
        order: places of the elements in the order in which they were called.
        parameters: name -> places of the elements that read it; ``len(elements)``: what comes behind the last one does.
        earlier: place -> places of elements before the previous one whose output is read there.
        own_backward: whether blocks run where no gradients are recorded: then the model has a backward of its own.
        within: what names of the model that was seen begin with.
        dry_run: runs the stages of a plan; tensors that they read beside those that they hold: name -> stages.
    """

    order: list[int] = field(default_factory=list)
    parameters: dict[str, set[int]] = field(default_factory=dict)
    earlier: dict[int, set[int]] = field(default_factory=dict)
    own_backward: bool = False
    within: str = ""
    dry_run: Callable[[StagePlan], Mapping[str, set[int]]] | None = None


@dataclass(frozen=True)
class StagePlan:
    """Who holds what of one model.

    Attributes:
        ranks: size of the pipeline-parallel axis.
        elements: module paths in forward order.
        bounds: stage ``s`` runs the elements ``bounds[s]`` up to, not including, ``bounds[s + 1]``.
        rank_of: stage -> place on the pipeline-parallel axis; several stages may lie on one rank.
        encoder: place of the encoder among the elements; None without one.
        tensors: every name of a parameter or buffer -> the stages that hold it. Tied weights lie on several.
        costs: parameters of each stage.
    """

    ranks: int
    elements: tuple[str, ...]
    bounds: tuple[int, ...]
    rank_of: tuple[int, ...]
    encoder: int | None = None
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    costs: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, in forward order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def holders(self, name: str) -> tuple[int, ...]:
        """The ranks of the axis that hold a tensor, ascending."""
        return tuple(sorted({self.rank_of[stage] for stage in self.tensors[name]}))

    def stage_of(self, place: int) -> int:
        """The stage that runs the element at ``place``."""
        return next(stage for stage in range(self.stages) if place < self.bounds[stage + 1])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ranks": self.ranks,
            "elements": list(self.elements),
            "bounds": list(self.bounds),
            "rank_of": list(self.rank_of),
            "encoder": self.encoder,
            "tensors": {name: list(stages) for name, stages in self.tensors.items()},
            "costs": list(self.costs),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StagePlan:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on malformed data."""
        return cls(
            ranks=int(data["ranks"]),
            elements=tuple(map(str, data["elements"])),
            bounds=tuple(map(int, data["bounds"])),
            rank_of=tuple(map(int, data["rank_of"])),
            encoder=None if data["encoder"] is None else int(data["encoder"]),
            tensors={str(name): tuple(map(int, stages)) for name, stages in data["tensors"].items()},
            costs=tuple(map(int, data["costs"])),
        )


def make_stages(
    root: nn.Module,
    policy: Policy,
    ranks: int,
    *,
    chunks: int = 1,
    folded: bool = False,
    layers_per_stage: Sequence[int] = (),
    reads: Reads | None = None,
) -> StagePlan:
    """Share the blocks of ``root`` out over ``ranks`` ranks with ``chunks`` stages each. The model is only read.

    Args:
        layers_per_stage: blocks of each stage by hand (encoder's and decoder's in one row); empty: by parameters.
        reads: what the forward was seen to read; None if it was not seen: then the policy's sections decide.

    Raises:
        ConfigError: more stages than blocks, or ``layers_per_stage`` does not add up.
        UnsupportedModelError: the blocks are no chain, or a stage cannot run by itself.
    """
    prefix, model = model_inside(root, policy)
    row = _Row(policy, prefix, model)
    count, stages = len(row.blocks), ranks * chunks
    refuse_collected(model, stages, {})
    place = f"{type(model).__name__} ({', '.join(row.lists) or 'no list of blocks'})"
    together = _together(row, reads, place) if reads is not None and stages > 1 else list(range(count + 1))
    if stages == 1:
        bounds = [0, count]
    elif layers_per_stage:
        bounds = _by_hand(layers_per_stage, count, stages, place)
        for bound in bounds:
            if bound not in together:
                raise ConfigError(
                    f"pipeline.layers_per_stage={list(layers_per_stage)} cuts {place} in front of block {bound}, where "
                    f"later blocks read more than the output of the one before.\n  It can be cut in front of: "
                    f"{', '.join(map(str, together[1:-1])) or 'none'}."
                )
    elif stages > len(together) - 1:
        whole = ""
        if len(together) <= count:
            whole = f" (but later ones, or the head, read what earlier ones made: they form {len(together) - 1} groups)"
        raise ConfigError(
            f"pipeline_parallel_size={ranks}{f' x chunks={chunks}' if chunks > 1 else ''} does not fit {place}: "
            f"{count} blocks{whole} cannot be shared out over {stages} stages.\n  Largest number of stages that fits "
            f"this model: {max(len(together) - 1, 1)}."
        )
    else:
        block_costs = row.costs()
        groups = [sum(block_costs[start:stop]) for start, stop in pairwise(together)]
        bounds = [together[bound] for bound in partition(groups, stages)]
    costs = row.costs()
    made = StagePlan(
        ranks=ranks,
        elements=tuple(row.elements()),
        bounds=tuple(row.element(bound) for bound in bounds),
        rank_of=rank_of_stage(ranks, chunks, folded=folded),
        encoder=row.encoder_place,
        costs=tuple(sum(costs[start:stop]) for start, stop in pairwise(bounds)),
    )
    made = replace(made, tensors=dict(row.tensors(root, made, reads)))
    while reads is not None and reads.dry_run is not None and stages > 1:
        more = reads.dry_run(made)
        if not more:
            break
        wider = {name: tuple(sorted({*made.tensors[name], *read_by})) for name, read_by in more.items()}
        made = replace(made, tensors={**made.tensors, **wider})
    return made


def elements_of(root: nn.Module, policy: Policy) -> tuple[tuple[str, ...], int | None]:
    """The elements of a model in forward order, and the place of its encoder among them."""
    row = _Row(policy, *model_inside(root, policy))
    return tuple(row.elements()), row.encoder_place


def _together(row: _Row, reads: Reads, place: str) -> list[int]:
    """The blocks in front of which the model can be cut: nothing behind reads more than the output before the cut."""
    if any(first >= second for first, second in pairwise(reads.order)) or not reads.order:
        raise UnsupportedModelError(
            f"{place} cannot be cut into pipeline stages: its forward does not call each block once, in order "
            f"(it calls {', '.join(map(str, reads.order[:8])) or 'none'}{' ...' if len(reads.order) > 8 else ''})"
        )
    if reads.own_backward:
        raise UnsupportedModelError(
            f"{place} cannot be cut into pipeline stages: its forward runs the blocks where no gradients are recorded "
            "(it has a backward pass of its own, or keeps them fixed)"
        )
    cuts = set(range(len(row.blocks) + 1))
    for reader, origins in reads.earlier.items():
        called = [done for done in reads.order if done < reader]
        for origin in origins:
            if origin != called[-1]:  # an element between that was not called left its output where it was
                cuts -= set(range(row.block(origin) + 1, min(row.block(reader), len(row.blocks) - 1) + 1))
    return sorted(cuts)


def _by_hand(layers: Sequence[int], count: int, stages: int, place: str) -> list[int]:
    if len(layers) != stages or sum(layers) != count:
        raise ConfigError(
            f"pipeline.layers_per_stage={list(layers)} has {len(layers)} stages with {sum(layers)} blocks in all; "
            f"there are {stages} stages, and {place} has {count} blocks."
        )
    bounds = [0]
    for size in layers:
        bounds.append(bounds[-1] + size)
    return bounds


class _Row:
    """The blocks of a model in forward order, and where everything around them belongs."""

    def __init__(self, policy: Policy, prefix: str, model: nn.Module) -> None:
        self.prefix, self.model = prefix, model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        scopes = list(all_scopes(policy, prefix, model, 1))
        chains: dict[str, list[Scope]] = {}
        for scope in scopes:
            if scope.block is not None:
                chains.setdefault(scope.path.rpartition(".")[0], []).append(scope)
        self.first, self.main = _choose(chains, prefix, model)
        self.lists = [path for path in (self.first, self.main) if path]
        before, after = ([scope.path for scope in chains.get(path, ())] for path in (self.first, self.main))
        self.blocks = [*before, *after]
        self.encoder_place = len(before) if before else None
        self.encoder = self._tower(self.first, self.main) if before else ""
        self.everywhere: list[str] = []
        self.leaving: list[str] = []  # the encoder's modules behind its blocks
        self.behind: list[str] = []
        for scope in scopes:
            if scope.block is not None:
                continue
            section = scope.name.rpartition("/")[2]
            own = [path for path in self.lists if chains[path][0].table is scope.table]
            paths = [use.path for use in uses_of(scope)] if section in ("every_stage", "suffix", "head") else []
            if section == "every_stage":
                self.everywhere += paths
            elif section == "suffix" and self.main in own:
                self.behind += paths
            elif section == "suffix" and self.first in own:
                self.leaving += paths
            elif section == "head" and _below(self.main, scope.path):
                self.behind += paths

    def _tower(self, inner: str, other: str) -> str:
        """The outermost module around one list of blocks that is not around the other."""
        parts = inner.split(".")
        return next(
            path for path in (".".join(parts[:end]) for end in range(1, len(parts) + 1)) if not _below(other, path)
        )

    def elements(self) -> Iterator[str]:
        for place, path in enumerate(self.blocks):
            if place == self.encoder_place:
                yield self.encoder
            yield path

    def element(self, block: int) -> int:
        """Bound among the elements that belongs to a bound among the blocks: the encoder ends with its last block."""
        return block + 1 if self.encoder_place is not None and block >= self.encoder_place else block

    def block(self, element: int) -> int:
        """The block of an element; of the encoder its last one."""
        return element - 1 if self.encoder_place is not None and element >= self.encoder_place else element

    def costs(self) -> list[int]:
        """Parameters of each block, with those around the blocks at the block that they lie beside."""
        costs = [0] * len(self.blocks)
        counted: set[tuple[int, int]] = set()
        if not costs:
            return costs
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            place = self._block_of(join(self.prefix, name))
            if place is not None and (id(parameter), place) not in counted:
                counted.add((id(parameter), place))
                costs[place] += parameter.numel()
        return costs

    def _block_of(self, name: str) -> int | None:
        """The block beside which a tensor is used; None: beside all."""
        for place, path in enumerate(self.blocks):
            if name.startswith(path + "."):
                return place
        if _any_above(name, self.everywhere):
            return None
        first_of_main = self.encoder_place or 0
        if self.encoder and _below(name, self.encoder):
            return first_of_main - 1 if _any_above(name, self.leaving) else 0
        return len(self.blocks) - 1 if _any_above(name, self.behind) or not _below(name, self.prefix) else first_of_main

    def tensors(self, root: nn.Module, plan: StagePlan, seen: Reads | None) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each name of a parameter or buffer, with its stages: those that read it, else where the policy puts it."""
        everywhere = tuple(range(plan.stages))
        reads = seen.parameters if seen is not None else {}
        wide = self._wide(root, seen)
        ends = len(plan.elements) - 1
        by_id: dict[int, set[int]] = {}
        places: list[tuple[str, int]] = []
        for name, parameter in root.named_parameters(remove_duplicate=False):
            block = self._block_of(name) if self.blocks else None
            held = everywhere if block is None else (self._stage(block, plan),)
            if name in reads and not self._in_block(name):
                held = tuple(plan.stage_of(min(place, ends)) for place in reads[name])
            elif name in wide:
                held = everywhere
            by_id.setdefault(id(parameter), set()).update(held)
            places.append((name, id(parameter)))
        for name, key in places:
            yield name, tuple(sorted(by_id[key]))
        held_by = {name.rpartition(".")[0]: tuple(sorted(by_id[key])) for name, key in places}
        for name, _ in root.named_buffers(remove_duplicate=False):
            owner = next((p for p, path in enumerate(self.blocks) if name.startswith(path + ".")), None)
            if owner is not None:
                yield name, (self._stage(owner, plan),)
            else:  # a buffer beside parameters (running statistics) is right where they are
                yield name, held_by.get(name.rpartition(".")[0], everywhere)

    def _wide(self, root: nn.Module, seen: Reads | None) -> set[str]:
        """Parameters in front of the blocks that all stages need, as far as can be told without seeing them read."""
        if len(self.blocks) < 2:
            return set()
        names = [name for name, _ in root.named_parameters(remove_duplicate=False)]
        start = join(self.prefix, "x")[:-1]
        before = {name for name in names if name.startswith(start) and not self._in_block(name)}
        before -= {name for name in before if _any_above(name, [*self.behind, *self.leaving])}
        if seen is None:  # the sections of a plain module's policy are taken at their word; its first forward checks it
            return before if isinstance(self.model, PreTrainedModel) else set()
        tensors = dict(root.named_parameters(remove_duplicate=False))
        read = {id(tensors[name]) for name in seen.parameters}  # by any of its names
        unread = {name for name in names if id(tensors[name]) not in read and name.startswith(seen.within)}
        unread -= {name for name in unread if _any_above(name, [*self.behind, *self.leaving])}
        entries = {0, len(list(self.elements()))}
        entries |= {self.encoder_place + 1} if self.encoder_place is not None else set()
        assert isinstance(self.model, PreTrainedModel)
        further = looks_further(self.model, self.prefix, self.blocks, unread, seen.parameters, entries)
        return unread & before if further else set()

    def _in_block(self, name: str) -> bool:
        return any(name.startswith(path + ".") for path in self.blocks)

    def _stage(self, block: int, plan: StagePlan) -> int:
        place = block + 1 if self.encoder_place is not None and block >= self.encoder_place else block
        return plan.stage_of(place)


def _choose(chains: Mapping[str, list[Scope]], prefix: str, model: nn.Module) -> tuple[str, str]:
    """The lists of blocks that are cut: of an encoder-decoder model two, else one (beside "")."""
    paths = {id(module): join(prefix, path) for path, module in model.named_modules()}
    sizes = {
        path: sum(p.numel() for scope in scopes if scope.block is not None for p in scope.block.parameters())
        for path, scopes in chains.items()
    }

    def chief(inside: str, but: str = "") -> str:
        found = [path for path in sizes if _below(path, inside) and not (but and _below(path, but))]
        return max(found, key=lambda path: (-path.count("."), sizes[path]), default="")  # the outermost, the largest

    if not isinstance(model, PreTrainedModel):
        return "", chief(prefix)
    decoder = paths.get(id(model.get_decoder()), prefix)
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = paths.get(id(model.get_encoder()), prefix)
        if encoder != prefix and decoder != prefix and chief(encoder) and chief(decoder, but=encoder):
            return chief(encoder), chief(decoder, but=encoder)
    return "", chief(decoder) or chief(prefix)


def _below(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(outer + ".")


def _any_above(name: str, paths: Sequence[str]) -> bool:
    return any(_below(name, path) for path in paths)
