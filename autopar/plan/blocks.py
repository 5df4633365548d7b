"""The blocks of a model in forward order, and the stages on which the tensors around them are needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from autopar.foreign.transformers import CACHES
from autopar.plan.matching import Scope, all_scopes, around, join, matches_of
from autopar.policy.match import Described

# Tensors that the forward of every decoder takes.
_USUAL = {
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "cache_position", "labels"),
    *CACHES,
    *("head_mask", "logits_to_keep"),
    *("encoder_hidden_states", "encoder_attention_mask", "decoder_input_ids"),
}


class Blocks:
    """The blocks of a model in forward order, and what lies in front of, behind and beside them.

    Args:
        described: The model, its path and its policy.

    Attributes:
        paths: of the blocks; of an encoder-decoder model the encoder's first.
        lists: paths of the lists of blocks.
        encoder_place: of the encoder among the elements (:mod:`autopar.plan.stages`); None without one.
    """

    def __init__(self, described: Described) -> None:
        self.prefix, self.model = prefix, model = described.prefix, described.model
        scopes = list(all_scopes(described.policy, prefix, model, 1, described.policy_of))
        chains: dict[str, list[Scope]] = {}
        for scope in scopes:
            if scope.block is not None:
                chains.setdefault(scope.path.rpartition(".")[0], []).append(scope)
        first, main = _choose(chains, prefix, model)
        self.lists = [path for path in (first, main) if path]
        before, after = ([scope.path for scope in chains.get(path, ())] for path in (first, main))
        self.paths = [*before, *after]
        self._place_of = {path: place for place, path in reversed(list(enumerate(self.paths)))}
        self.encoder_place = len(before) if before else None
        self._encoder = _tower(first, main) if before else ""
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
        """Yield the paths of the blocks, and of the encoder behind its own."""
        for place, path in enumerate(self.paths):
            if place == self.encoder_place:
                yield self._encoder
            yield path

    def element(self, block: int) -> int:
        """Return the bound among the elements for a bound among the blocks: the encoder ends with its last block."""
        return block + 1 if self.encoder_place is not None and block >= self.encoder_place else block

    def block(self, element: int) -> int:
        """Return the block of an element; of the encoder its last one."""
        return element - 1 if self.encoder_place is not None and element >= self.encoder_place else element

    def costs(self) -> list[int]:
        """Count the parameters of each block, with those around the blocks at the block that they lie beside."""
        costs = [0] * len(self.paths)
        counted: set[tuple[int, int]] = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False) if costs else ():
            place = self._beside(join(self.prefix, name))
            if place is not None and (id(parameter), place) not in counted:
                counted.add((id(parameter), place))
                costs[place] += parameter.numel()
        return costs

    def _holding(self, name: str) -> int | None:
        """Return the block in which a tensor lies; None for one outside of them."""
        return min((self._place_of[path] for path in around(name) if path in self._place_of), default=None)

    def _beside(self, name: str) -> int | None:
        """Return the block in which or beside which a tensor is used; None: beside all."""
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
        """Yield each name of a parameter or buffer with its stages: those that read it, else where the policy puts it.

        Args:
            stage_of: place of an element -> stage.
            read_at: parameters -> places of the elements that were seen to read them; None if nothing was seen.
            within: what names of the model that was seen begin with.
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
            else:  # a buffer beside parameters (running statistics) is right where they are
                yield name, held_by.get(name.rpartition(".")[0], everywhere)

    def _read_by_all(self, root: nn.Module, read_at: Mapping[str, set[int]] | None, within: str) -> set[str]:
        """Return parameters in front of the blocks that all stages need, as far as can be told from what was seen."""
        if len(self.paths) < 2:
            return set()
        tensors = dict(root.named_parameters(remove_duplicate=False))
        behind = [*self._behind, *self._behind_encoder]
        start = join(self.prefix, "x")[:-1]
        before = {n for n in tensors if n.startswith(start) and self._holding(n) is None and not _any_above(n, behind)}
        if read_at is None:  # the sections of a plain module's policy are trusted; its first forward checks them
            return before if isinstance(self.model, PreTrainedModel) else set()
        read = {id(tensors[name]) for name in read_at}  # by any of its names
        unread = {n for n, p in tensors.items() if id(p) not in read and n.startswith(within)}
        unread = {n for n in unread if not _any_above(n, behind)}
        assert isinstance(self.model, PreTrainedModel)
        return unread & before if self._read_further(self.model, unread, read_at) else set()

    def _read_further(self, model: PreTrainedModel, unread: set[str], reads: Mapping[str, set[int]]) -> bool:
        """Return whether blocks seem to read more than what lies between the words at the first one.

        Parameters are ``unread`` where the forward was seen with other inputs (text alone). An image encoder makes what
        is put between the words: then it belongs in front of the first block, and only there. Or later blocks look at
        the image too: then every stage needs it. A sign of that which misleads costs memory; where there is none though
        blocks do look, the first forward with an image is refused (:mod:`autopar.pipeline_parallel.stage_forward`).
        """
        if any(self._holding(name) is not None for name in unread):
            return True  # blocks have parameters for it (cross-attention)
        around = {path.rpartition(".")[0].rpartition(".")[0] for path in self.paths}
        if any(name.startswith(f"{path}." if path else "") for name in unread for path in around):
            return True  # so does the module that runs the blocks
        words = {id(p) for p in _embedding(model).parameters()}
        read_at = [reads.get(join(self.prefix, n), set()) for n, p in model.named_parameters() if id(p) in words]
        entries = {0, len(list(self.elements()))}  # where words are read in any model
        entries |= {self.encoder_place + 1} if self.encoder_place is not None else set()
        if any(places - entries for places in read_at):
            return True  # blocks read what lies between the words again
        decoder = model.get_decoder()
        if decoder is model or not isinstance(decoder, nn.Module):
            return False
        taken = inspect.signature(decoder.forward).parameters.values()
        return any("Tensor" in str(each.annotation) and each.name not in _USUAL for each in taken)


def _embedding(model: PreTrainedModel) -> nn.Module:
    try:
        found = model.get_input_embeddings()
    except NotImplementedError:
        found = None
    return found if isinstance(found, nn.Module) else nn.Identity()


def _tower(inner: str, other: str) -> str:
    """Return the outermost module around one list of blocks that is not around the other."""
    parts = inner.split(".")
    outer = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next(path for path in outer if not lies_in(other, path))


def _choose(chains: Mapping[str, list[Scope]], prefix: str, model: nn.Module) -> tuple[str, str]:
    """Return the lists of blocks that are split into stages: of an encoder-decoder model two, else "" and one."""
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
    """Check whether a path is ``outer`` or that of something in it; everything lies in the model itself, ``""``."""
    return not outer or path == outer or path.startswith(outer + ".")


def _any_above(name: str, paths: Sequence[str]) -> bool:
    return any(lies_in(name, path) for path in paths)


def dropped_blocks(model: nn.Module) -> str | None:
    """Return the probability, above 0, by which a forward in training leaves out blocks (LayerDrop); None without."""
    for module in model.modules():
        config = getattr(vars(module).get("config"), "__dict__", {})
        for place, values in ((type(module).__name__, vars(module)), ("config", config)):
            for name, value in values.items():
                if "layerdrop" in name and isinstance(value, int | float) and value > 0:
                    return f"{place}.{name}={value:g}"
    return None
