"""Pipeline stages: which blocks, and which tensors, each stage of a model holds. Pure, plain data, no process group.

A model is a row of *elements* in forward order: its blocks; of an encoder-decoder model the encoder's blocks, then the
encoder itself (its output is what the decoder reads), then the decoder's blocks. A stage is a contiguous run of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.adapters import check_adapters
from autopar.errors import ConfigError, UnsupportedModelError
from autopar.plan.blocks import Blocks
from autopar.policy.described_model import model_inside
from autopar.policy.schema import Policy

_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass
class Reads:
    """Reads of a model's own forward, and their places (:func:`autopar.dry_run.pipeline_parallel.trace_reads`).

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
    """Which blocks and tensors of one model lie on which pipeline stage, and which stage on which rank.

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
        """Return the stages of one rank, in forward order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the ranks of the axis that hold a tensor, ascending."""
        return tuple(sorted({self.rank_of[stage] for stage in self.tensors[name]}))

    def stage_of(self, place: int) -> int:
        """Return the stage that runs the element at ``place``."""
        return next(stage for stage in range(self.stages) if place < self.bounds[stage + 1])

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


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
    """Split the blocks of ``root`` into pipeline stages, ``chunks`` on each of ``ranks`` ranks. The model is only read.

    Args:
        chunks: of one rank always 1.
        folded: see :func:`rank_of_stage`.
        layers_per_stage: blocks of each stage by hand (encoder's and decoder's in one row); empty: by parameters.
        reads: what the forward was seen to read; None if it was not seen: then the policy's sections decide.

    Raises:
        ConfigError: more stages than blocks, or ``layers_per_stage`` does not add up.
        UnsupportedModelError: the blocks are not a chain, or a stage cannot run by itself.
    """
    check_adapters(root, 1, ranks)
    blocks = Blocks(policy, *model_inside(root, policy))
    chunks = chunks if ranks > 1 else 1
    stages = ranks * chunks
    refuse_collected(blocks.model, stages, {})
    bounds = _bounds(blocks, ranks, chunks, layers_per_stage, reads) if stages > 1 else [0, len(blocks.paths)]
    costs = blocks.costs()
    plan = StagePlan(
        ranks=ranks,
        elements=tuple(blocks.elements()),
        bounds=tuple(blocks.element(bound) for bound in bounds),
        rank_of=rank_of_stage(ranks, chunks, folded=folded),
        encoder=blocks.encoder_place,
        costs=tuple(sum(costs[start:stop]) for start, stop in pairwise(bounds)),
    )
    read_at, within = (None, "") if reads is None else (reads.parameters, reads.within)
    plan = replace(plan, tensors=dict(blocks.stages_of_tensors(root, plan.stages, plan.stage_of, read_at, within)))
    while reads is not None and reads.dry_run is not None and stages > 1:
        more = reads.dry_run(plan)
        if not more:
            break
        wider = {name: tuple(sorted({*plan.tensors[name], *read_by})) for name, read_by in more.items()}
        plan = replace(plan, tensors={**plan.tensors, **wider})
    return plan


def elements_of(root: nn.Module, policy: Policy) -> tuple[tuple[str, ...], int | None]:
    """Return the elements of a model in forward order, and the place of its encoder among them."""
    blocks = Blocks(policy, *model_inside(root, policy))
    return tuple(blocks.elements()), blocks.encoder_place


def refuse_collected(model: nn.Module, stages: int, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model is to return what it collects from all of its layers, in several stages.

    Args:
        arguments: of its forward; its config may ask for it too.
    """
    if not isinstance(model, PreTrainedModel):
        return
    configs = [model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs)]
    for name in _COLLECTED if stages > 1 else ():
        if arguments.get(name) or any(getattr(each, name, False) for each in configs):
            raise ConfigError(
                f"{name}=True collects from every layer of {type(model).__name__}, which is split into {stages} "
                "pipeline stages: each has only its own. Leave it out"
                + (" (config.output_router_logits: the routers' auxiliary loss)." if "router" in name else ".")
            )


def _bounds(blocks: Blocks, ranks: int, chunks: int, by_hand: Sequence[int], reads: Reads | None) -> list[int]:
    """Return the bounds of the stages among the blocks."""
    count, stages = len(blocks.paths), ranks * chunks
    place = f"{type(blocks.model).__name__} ({', '.join(blocks.lists) or 'no list of blocks'})"
    splits = list(range(count + 1)) if reads is None else _split_points(blocks, reads, place)
    if by_hand:
        bounds = _by_hand(by_hand, count, stages, place)
        for bound in bounds:
            if bound not in splits:
                raise ConfigError(
                    f"pipeline.layers_per_stage={list(by_hand)} splits {place} in front of block {bound}, where later "
                    "blocks read more than the output of the one before.\n  It can be split in front of: "
                    f"{', '.join(map(str, splits[1:-1])) or 'none'}."
                )
        return bounds
    if stages > len(splits) - 1:
        groups = ""
        if len(splits) <= count:
            groups = f" (but later ones, or the head, read what earlier ones made: they form {len(splits) - 1} groups)"
        raise ConfigError(
            f"pipeline_parallel_size={ranks}{f' x chunks={chunks}' if chunks > 1 else ''} does not fit {place}: "
            f"{count} blocks{groups} cannot be split into {stages} stages.\n  Largest number of stages that fits "
            f"this model: {max(len(splits) - 1, 1)}."
        )
    costs = blocks.costs()
    return [splits[bound] for bound in partition([sum(costs[a:b]) for a, b in pairwise(splits)], stages)]


def _split_points(blocks: Blocks, reads: Reads, place: str) -> list[int]:
    """Return the blocks in front of which the model can be split: nothing behind reads more than the output there."""
    if any(first >= second for first, second in pairwise(reads.order)) or not reads.order:
        raise UnsupportedModelError(
            f"{place} cannot be split into pipeline stages: its forward does not call each block once, in order "
            f"(it calls {', '.join(map(str, reads.order[:8])) or 'none'}{' ...' if len(reads.order) > 8 else ''})"
        )
    if reads.own_backward:
        raise UnsupportedModelError(
            f"{place} cannot be split into pipeline stages: its forward runs the blocks where no gradients are "
            "recorded (it has a backward pass of its own, or keeps them fixed)"
        )
    last = len(blocks.paths) - 1
    splits = set(range(last + 2))
    for reader, origins in reads.earlier.items():
        called = [done for done in reads.order if done < reader]
        for origin in origins:
            if origin != called[-1]:  # an element between that was not called left its output where it was
                splits -= set(range(blocks.block(origin) + 1, min(blocks.block(reader), last) + 1))
    return sorted(splits)


def _by_hand(layers: Sequence[int], count: int, stages: int, place: str) -> list[int]:
    if len(layers) != stages or sum(layers) != count:
        raise ConfigError(
            f"pipeline.layers_per_stage={list(layers)} has {len(layers)} stages with {sum(layers)} blocks in all; "
            f"there are {stages} stages, and {place} has {count} blocks."
        )
    return [0, *accumulate(layers)]


def rank_of_stage(ranks: int, chunks: int, *, folded: bool = False) -> tuple[int, ...]:
    """Map stages to ranks: round and round, or (``folded``) to the last rank and back: first and last together."""
    return tuple(
        ranks - 1 - stage % ranks if folded and stage // ranks % 2 else stage % ranks for stage in range(ranks * chunks)
    )


def partition(costs: Sequence[int], stages: int) -> list[int]:
    """Return the bounds of the contiguous split of ``costs`` into non-empty stages whose largest sum is the smallest.

    If there are several, return the most even one (the smallest sum of squares).

    Raises:
        ConfigError: more stages than costs.
    """
    count = len(costs)
    if stages > count:
        raise ConfigError(f"{count} blocks cannot be split into {stages} stages")
    sums = [0, *accumulate(costs)]
    best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [0])}  # end -> (largest, squares), bounds
    for stage in range(1, stages + 1):
        row = {}
        for end in range(stage, count - (stages - stage) + 1):
            options: list[tuple[tuple[int, int], list[int]]] = []
            smallest = sums[count] + 1
            for start in range(end - 1, stage - 2, -1):
                cost = sums[end] - sums[start]
                if cost > smallest:  # and so are those of all longer stages
                    break
                if start in best:
                    (worst, squares), bounds = best[start]
                    smallest = min(smallest, max(worst, cost))
                    options.append(((max(worst, cost), squares + cost * cost), bounds))
            chosen, bounds = min(options)
            row[end] = (chosen, [*bounds, end])
        best = row
    return best[count][1]
