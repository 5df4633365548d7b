"""Plan the pipeline stages of a model: the blocks and tensors of each stage, as plain data without a process group.

A model is a list of elements in forward order: its blocks, or for an encoder-decoder model the encoder's blocks, the
encoder itself (the decoder reads its output), and the decoder's blocks. A stage is a contiguous run of elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar import registry
from autopar.compat.transformers import CACHES
from autopar.errors import ConfigError, UnsupportedModelError
from autopar.plan.matching import Scope, all_scopes, around, join, matches_of
from autopar.policy.match import Described, base_of
from autopar.policy.schema import Policy

# The arguments of every decoder's forward.
_USUAL = {
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "cache_position", "labels"),
    *("head_mask", "logits_to_keep", "encoder_hidden_states", "encoder_attention_mask", "decoder_input_ids", *CACHES),
}


class Blocks:
    """The blocks of a model in forward order, and the tensors before, after and next to them.

    Attributes:
        paths: The paths of the blocks, the encoder's blocks first.
        lists: The paths of the lists of blocks.
        encoder_place: The index of the encoder among the elements (:mod:`autopar.plan.stages`); None without one.
    """

    def __init__(self, described: Described) -> None:
        self.prefix, self.model = prefix, model = described.prefix, described.model
        scopes = list(all_scopes(described.policy, prefix, model, 1, described.policy_of))
        chains: dict[str, list[Scope]] = {}
        for scope in scopes:
            if scope.block is not None:
                chains.setdefault(scope.path.rpartition(".")[0], []).append(scope)
        first, main = _choose(chains, prefix, model)
        base = join(prefix, base_of(model)[0])
        towers = ([join(base, each.blocks_path) for each in tower.lists] for tower in described.policy.towers)
        mains = next((lists for lists in towers if len(lists) > 1 and main in lists), [main])  # run one after another
        self.lists = [path for path in (first, *mains) if path in chains]
        before = [scope.path for scope in chains.get(first, ())]
        after = [scope.path for path in mains for scope in chains.get(path, ())]
        self.paths = [*before, *after]
        self._place_of = {path: place for place, path in reversed(list(enumerate(self.paths)))}
        self.encoder_place = len(before) if before else None
        outer = first.split(".")
        # The encoder is the outermost module around its blocks that is not around the decoder's.
        around_it = (".".join(outer[: end + 1]) for end in range(len(outer)))
        self._encoder = next(path for path in around_it if not lies_in(main, path)) if before else ""
        self._everywhere: list[str] = []
        self._behind_encoder: list[str] = []
        self._behind: list[str] = []
        for scope in scopes:
            section = scope.name.rpartition("/")[2]
            if scope.block is not None or section not in ("every_stage", "suffix", "head"):
                continue
            own = [path for path in self.lists if chains[path][0].table is scope.table]
            paths = [match.path for match in matches_of(scope)]
            if section == "every_stage":
                self._everywhere += paths
            elif (section == "suffix" and main in own) or (section == "head" and lies_in(main, scope.path)):
                self._behind += paths
            elif section == "suffix" and first in own:
                self._behind_encoder += paths

    def elements(self) -> Iterator[str]:
        """Yield the paths of the blocks, and the path of the encoder after its blocks."""
        for place, path in enumerate(self.paths):
            if place == self.encoder_place:
                yield self._encoder
            yield path

    def element(self, block: int) -> int:
        """Convert a bound among the blocks to a bound among the elements; the encoder belongs to its last block."""
        return block + 1 if self.encoder_place is not None and block >= self.encoder_place else block

    def block(self, element: int) -> int:
        """Return the block of an element; for the encoder, its last block."""
        return element - 1 if self.encoder_place is not None and element >= self.encoder_place else element

    def costs(self) -> list[int]:
        """Count the parameters of each block; parameters outside of blocks count for the block next to them."""
        costs = [0] * len(self.paths)
        counted: set[tuple[int, int]] = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False) if costs else ():
            place = self._beside(join(self.prefix, name))
            if place is not None and (id(parameter), place) not in counted:
                counted.add((id(parameter), place))
                costs[place] += parameter.numel()
        return costs

    def _holding(self, name: str) -> int | None:
        """Return the block that contains a tensor, or None."""
        return min((self._place_of[path] for path in around(name) if path in self._place_of), default=None)

    def _beside(self, name: str) -> int | None:
        """Return the block that contains a tensor or is next to it; None for all blocks."""
        place = self._holding(name)
        if place is not None or _any_above(name, self._everywhere):
            return place
        first_of_main = self.encoder_place or 0
        if self._encoder and lies_in(name, self._encoder):
            return first_of_main - 1 if _any_above(name, self._behind_encoder) else 0
        return (
            len(self.paths) - 1 if _any_above(name, self._behind) or not lies_in(name, self.prefix) else first_of_main
        )

    def stages_of_tensors(
        self,
        root: nn.Module,
        stages: int,
        stage_of: Callable[[int], int],
        read_at: Mapping[str, set[int]] | None,
        within: str,
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the stages of each parameter or buffer, by observed reads or by the policy's sections.

        Args:
            stage_of: A function that returns the stage of the element at an index.
            read_at: Parameter -> indices of the elements that read it; None if reads were not observed.
            within: The prefix of the names of the observed model.
        """
        everywhere = tuple(range(stages))
        reads = read_at or {}
        on_all = self._read_by_all(root, read_at, within)
        last = len(list(self.elements())) - 1
        by_id: dict[int, set[int]] = {}
        places: list[tuple[str, int]] = []
        for name, parameter in root.named_parameters(remove_duplicate=False):
            block = self._beside(name) if self.paths else None
            held = everywhere if block is None else (stage_of(self.element(block)),)
            if name in reads and self._holding(name) is None:
                held = tuple(stage_of(min(place, last)) for place in reads[name])
            elif name in on_all:
                held = everywhere
            by_id.setdefault(id(parameter), set()).update(held)
            places.append((name, id(parameter)))
        for name, key in places:
            yield name, tuple(sorted(by_id[key]))
        held_by = {name.rpartition(".")[0]: tuple(sorted(by_id[key])) for name, key in places}
        for name, _ in root.named_buffers(remove_duplicate=False):
            block = self._holding(name)
            if block is not None:
                yield name, (stage_of(self.element(block)),)
            else:  # a buffer (running statistics) stays with the parameters of its module
                yield name, held_by.get(name.rpartition(".")[0], everywhere)

    def _read_by_all(self, root: nn.Module, read_at: Mapping[str, set[int]] | None, within: str) -> set[str]:
        """Return the parameters before the blocks that all stages need, by the observed reads."""
        if len(self.paths) < 2:
            return set()
        tensors = dict(root.named_parameters(remove_duplicate=False))
        behind = [*self._behind, *self._behind_encoder]
        start = join(self.prefix, "x")[:-1]
        before = {n for n in tensors if n.startswith(start) and self._holding(n) is None and not _any_above(n, behind)}
        if read_at is None:  # a custom module's policy decides, and its first forward checks it
            return before if isinstance(self.model, PreTrainedModel) else set()
        read = {id(tensors[name]) for name in read_at}  # by any of its names
        unread = {n for n, p in tensors.items() if id(p) not in read and n.startswith(within)}
        unread = {n for n in unread if not _any_above(n, behind)}
        if not isinstance(self.model, PreTrainedModel):  # a model of another library
            return unread & before
        return unread & before if self._read_further(self.model, unread, read_at) else set()

    def _read_further(self, model: PreTrainedModel, unread: set[str], reads: Mapping[str, set[int]]) -> bool:
        """Guess whether later blocks also read the output of ``unread`` parameters, such as an image encoder's.

        These parameters are unread because the forward ran on text only. Usually an encoder's output replaces word
        embeddings before the first block, and only the first stage needs it. If later blocks read it too, every stage
        needs it. A wrong True costs memory; a wrong False raises in the first forward with an image
        (:mod:`autopar.pipeline_parallel.stage_forward`).
        """
        if any(self._holding(name) is not None for name in unread):
            return True  # blocks have parameters for it (cross-attention)
        around = {path.rpartition(".")[0].rpartition(".")[0] for path in self.paths}
        if any(name.startswith(f"{path}." if path else "") for name in unread for path in around):
            return True  # the module that runs the blocks has parameters for it
        try:
            embedding = model.get_input_embeddings()
        except NotImplementedError:
            embedding = None
        words = {id(p) for p in embedding.parameters()} if isinstance(embedding, nn.Module) else set()
        read_at = [reads.get(join(self.prefix, n), set()) for n, p in model.named_parameters() if id(p) in words]
        entries = {0, len(list(self.elements()))}  # every model reads word embeddings there
        entries |= {self.encoder_place + 1} if self.encoder_place is not None else set()
        if any(places - entries for places in read_at):
            return True  # later blocks read the embeddings again
        decoder = model.get_decoder()
        if decoder is model or not isinstance(decoder, nn.Module):
            return False
        taken = inspect.signature(decoder.forward).parameters.values()
        return any("Tensor" in str(each.annotation) and each.name not in _USUAL for each in taken)


def _choose(chains: Mapping[str, list[Scope]], prefix: str, model: nn.Module) -> tuple[str, str]:
    """Return the encoder's and the decoder's list of blocks; without an encoder, ``""`` and the list of blocks."""
    paths = {id(module): join(prefix, path) for path, module in model.named_modules()}
    sizes = {
        path: sum(p.numel() for scope in scopes if scope.block is not None for p in scope.block.parameters())
        for path, scopes in chains.items()
    }

    def chief(inside: str, but: str = "") -> str:
        found = [path for path in sizes if lies_in(path, inside) and not (but and lies_in(path, but))]
        return max(found, key=lambda path: (-path.count("."), sizes[path]), default="")  # the outermost, the largest

    if not isinstance(model, PreTrainedModel):
        return "", chief(prefix)
    decoder = paths.get(id(model.get_decoder()), prefix)
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = paths.get(id(model.get_encoder()), prefix)
        if encoder != prefix and decoder != prefix and chief(encoder) and chief(decoder, but=encoder):
            return chief(encoder), chief(decoder, but=encoder)
    return "", chief(decoder) or chief(prefix)


def lies_in(path: str, outer: str) -> bool:
    """Return whether a path is ``outer`` or inside of it; every path is inside of the model, ``""``."""
    return not outer or path == outer or path.startswith(outer + ".")


def _any_above(name: str, paths: Sequence[str]) -> bool:
    return any(lies_in(name, path) for path in paths)


def dropped_blocks(model: nn.Module) -> str | None:
    """Return the attribute and its value if the model skips blocks at random in training (LayerDrop), or None."""
    for module in model.modules():
        config = getattr(vars(module).get("config"), "__dict__", {})
        for place, values in ((type(module).__name__, vars(module)), ("config", config)):
            for name, value in values.items():
                if "layerdrop" in name and isinstance(value, int | float) and value > 0:
                    return f"{place}.{name}={value:g}"
    return None


_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass
class Reads:
    """The observed reads of a model's forward (:func:`autopar.dry_run.pipeline_parallel.trace_reads`).

    Attributes:
        order: The indices of the elements in the order of their calls.
        parameters: Name -> indices of the elements that read it; ``len(elements)`` for code after the last one.
        earlier: Index -> indices of elements before the previous one whose output is read there.
        own_backward: True if blocks run without recording gradients, so that the model has a custom backward.
        within: The prefix of the names of the observed model.
        dry_run: A function that runs the stages of a plan and returns name -> stages that read a tensor without holding
            it.
    """

    order: list[int] = field(default_factory=list)
    parameters: dict[str, set[int]] = field(default_factory=dict)
    earlier: dict[int, set[int]] = field(default_factory=dict)
    own_backward: bool = False
    within: str = ""
    dry_run: Callable[[StagePlan], Mapping[str, set[int]]] | None = None


@dataclass(frozen=True)
class StagePlan:
    """The blocks and tensors of each pipeline stage of a model, and the rank of each stage.

    Attributes:
        ranks: The size of the pipeline-parallel axis.
        elements: The module paths in forward order.
        bounds: The bounds of the stages: stage ``s`` runs the elements ``bounds[s]`` to ``bounds[s + 1] - 1``.
        rank_of: Stage -> rank of the pipeline-parallel axis; a rank may have several stages.
        encoder: The index of the encoder among the elements; None without one.
        tensors: Name of a parameter or buffer -> the stages that hold it; several for tied weights.
        costs: The number of parameters of each stage.
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
        """The number of stages."""
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
    policy: Policy | Described,
    ranks: int,
    *,
    chunks: int = 1,
    folded: bool = False,
    layers_per_stage: Sequence[int] = (),
    reads: Reads | None = None,
) -> StagePlan:
    """Split the blocks of ``root`` into pipeline stages, ``chunks`` on each of ``ranks`` ranks.

    Args:
        chunks: The number of stages per rank; 1 if there is one rank.
        folded: True if the second half of the stages runs back over the ranks (:func:`rank_of_stage`).
        layers_per_stage: The number of blocks of each stage (encoder's and decoder's in one list); empty to balance
            parameters.
        reads: The observed reads of the forward; None to use the policy's sections.

    Raises:
        ConfigError: There are more stages than blocks, or ``layers_per_stage`` does not add up.
        UnsupportedModelError: The blocks are not a chain, or a stage cannot run by itself.
    """
    for _, addition in registry.entries("additions"):
        addition(root).check(1, ranks)
    blocks = Blocks(Described.of(root, policy))
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


def elements_of(root: nn.Module, policy: Policy | Described) -> tuple[tuple[str, ...], int | None]:
    """Return the elements of a model in forward order, and the place of its encoder among them."""
    blocks = Blocks(Described.of(root, policy))
    return tuple(blocks.elements()), blocks.encoder_place


def refuse_collected(model: nn.Module, stages: int, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if a forward through stages must return outputs of all layers."""
    if not isinstance(model, PreTrainedModel) or stages == 1:
        return
    configs = [model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs)]
    for name in _COLLECTED:
        if arguments.get(name) or any(getattr(each, name, False) for each in configs):
            raise ConfigError(
                f"{name}=True is not supported with {stages} pipeline stages: it collects from every layer of "
                f"{type(model).__name__}\n  Leave it out"
                + (" (config.output_router_logits: the routers' auxiliary loss)." if "router" in name else ".")
            )


def _bounds(blocks: Blocks, ranks: int, chunks: int, by_hand: Sequence[int], reads: Reads | None) -> list[int]:
    """Return the bounds of the stages among the blocks."""
    count, stages = len(blocks.paths), ranks * chunks
    place = f"{type(blocks.model).__name__} ({', '.join(blocks.lists) or 'no list of blocks'})"
    splits = list(range(count + 1)) if reads is None else _split_points(blocks, reads, place)
    if by_hand:
        if len(by_hand) != stages or sum(by_hand) != count:
            raise ConfigError(
                f"pipeline.layers_per_stage={list(by_hand)} has {len(by_hand)} stages with {sum(by_hand)} "
                f"blocks in all; there are {stages} stages, and {place} has {count} blocks."
            )
        bounds = [0, *accumulate(by_hand)]
        for bound in bounds:
            if bound not in splits:
                raise ConfigError(
                    f"pipeline.layers_per_stage={list(by_hand)} splits {place} before block {bound}, where later "
                    "blocks read more than the output of the previous block.\n  Possible splits are before the blocks: "
                    f"{', '.join(map(str, splits[1:-1])) or 'none'}."
                )
        return bounds
    if stages > len(splits) - 1:
        most = len(splits) - 1
        read = f" (later blocks or the head read outputs of earlier blocks, which leaves {most} groups)"
        raise ConfigError(
            f"pipeline_parallel_size={ranks}{f' x chunks={chunks}' if chunks > 1 else ''} does not fit {place}: "
            f"{count} blocks{read if most < count else ''} cannot be split into {stages} stages.\n"
            f"  Largest number of stages that fits this model: {max(most, 1)}."
        )
    costs = blocks.costs()
    return [splits[bound] for bound in partition([sum(costs[a:b]) for a, b in pairwise(splits)], stages)]


def _split_points(blocks: Blocks, reads: Reads, place: str) -> list[int]:
    """Return the blocks before which the model can be split, because later blocks read only the output there."""
    if any(first >= second for first, second in pairwise(reads.order)) or not reads.order:
        raise UnsupportedModelError(
            f"{place} is not supported with pipeline stages: its forward must call each block once, in order "
            f"(it calls {', '.join(map(str, reads.order[:8])) or 'none'}{' ...' if len(reads.order) > 8 else ''})"
        )
    if reads.own_backward:
        raise UnsupportedModelError(
            f"{place} is not supported with pipeline stages: its forward runs the blocks without recording gradients "
            "(it has a custom backward, or freezes them)"
        )
    last = len(blocks.paths) - 1
    splits = set(range(last + 2))
    for reader, origins in reads.earlier.items():
        called = [done for done in reads.order if done < reader]
        for origin in origins:
            if origin != called[-1]:  # the elements between were not called
                splits -= set(range(blocks.block(origin) + 1, min(blocks.block(reader), last) + 1))
    return sorted(splits)


def rank_of_stage(ranks: int, chunks: int, *, folded: bool = False) -> tuple[int, ...]:
    """Map stages to ranks: cyclically, or, if ``folded``, to the last rank and back."""
    return tuple(
        ranks - 1 - stage % ranks if folded and stage // ranks % 2 else stage % ranks for stage in range(ranks * chunks)
    )


def partition(costs: Sequence[int], stages: int) -> list[int]:
    """Return the bounds of the contiguous split of ``costs`` into non-empty stages with the smallest maximum sum.

    Among equal splits, the one with the smallest sum of squares is returned.
    """
    count = len(costs)
    sums = [0, *accumulate(costs)]
    best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [0])}  # end -> (largest, squares), bounds
    for stage in range(1, stages + 1):
        row = {}
        for end in range(stage, count - (stages - stage) + 1):
            options: list[tuple[tuple[int, int], list[int]]] = []
            smallest = sums[count] + 1
            for start in range(end - 1, stage - 2, -1):
                cost = sums[end] - sums[start]
                if cost > smallest:  # longer stages cost more
                    break
                if start in best:
                    (worst, squares), bounds = best[start]
                    smallest = min(smallest, max(worst, cost))
                    options.append(((max(worst, cost), squares + cost * cost), bounds))
            chosen, bounds = min(options)
            row[end] = (chosen, [*bounds, end])
        best = row
    return best[count][1]
