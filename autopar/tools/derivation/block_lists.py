"""The lists of blocks of a model: where stages are cut, and inside of which layers may be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from autopar.foreign.modules import own_parameters
from autopar.tools.derivation.decisions import is_linear

__all__ = ["BlockList", "block_lists"]

_LISTS = (nn.ModuleList, nn.Sequential)
_LAYERS_OF_A_BLOCK = 2


@dataclass(frozen=True)
class BlockList:
    """Lists of blocks that one ``blocks.path`` names (``encoder.layers.*.blocks``).

    Attributes:
        path: from the root, with ``*``.
        blocks: paths of all blocks.
        owner: path of the Hugging Face model around it.
    """

    path: str
    blocks: tuple[str, ...]
    owner: str


def block_lists(root: nn.Module) -> list[BlockList]:
    """Find the outermost lists of blocks with linear layers; of lists of stages the lists in them."""
    found: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for path in _outermost(root):
        members = [f"{path}.{name}" for name, _ in root.get_submodule(path).named_children()]
        inner = [f"{one}.{below}" for one in members for below in _outermost(root.get_submodule(one))]
        inner = [one for one in inner if _is_blocks(root.get_submodule(one)) and _alike(root.get_submodule(one))]
        if inner and all(
            _only_around(root.get_submodule(one), [i[len(one) + 1 :] for i in inner if i.startswith(one + ".")])
            for one in members
        ):
            for one in inner:
                blocks = [f"{one}.{name}" for name, _ in root.get_submodule(one).named_children()]
                below = one[len(path) + 1 :].partition(".")[2]
                found.setdefault(f"{path}.*.{below}", []).extend(blocks)
        else:
            found.setdefault(path, []).extend(members)
    for path, blocks in found.items():
        parents = [
            p
            for p, m in root.named_modules()
            if isinstance(m, PreTrainedModel) and blocks[0].startswith(p + "." if p else "")
        ]
        owner[path] = max(parents, key=len, default="")
    return [BlockList(path, tuple(blocks), owner[path]) for path, blocks in found.items()]


def _outermost(root: nn.Module) -> Iterator[str]:
    below = ""
    for path, module in root.named_modules():
        if below and path.startswith(below):
            continue
        if path and isinstance(module, _LISTS) and _is_blocks(module):
            below = path + "."
            yield path


def _is_blocks(listed: nn.Module) -> bool:
    children = list(listed.children())
    return bool(children) and max(sum(map(_layer, child.modules())) for child in children) >= _LAYERS_OF_A_BLOCK


def _alike(listed: nn.Module) -> bool:
    return len({type(child) for child in listed.children()}) == 1


def _layer(module: nn.Module) -> bool:
    return is_linear(module) or sum(p.ndim > 1 for p in own_parameters(module).values() if p is not None) > 1


def _only_around(stage: nn.Module, inner: list[str]) -> bool:
    """Return whether a member of a list is a stage: what has layers of its own in it lies in inner lists."""
    if not inner:
        return False
    outside = [
        m
        for p, m in stage.named_modules()
        if p and not any(p == i or p.startswith(i + ".") or i.startswith(p + ".") for i in inner)
    ]
    return max((sum(map(_layer, m.modules())) for m in outside), default=0) < _LAYERS_OF_A_BLOCK
