"""The lists of blocks of a model, and what surrounds them.

Stages are cut between blocks, and inside of them layers may be sharded. Around them are tables of words and logits, and
the sections of modules before and behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.foreign.tensors import own_parameters
from autopar.tools.derivation.trace import Trace, is_linear

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
        inner = [one for one in inner if _is_blocks(root.get_submodule(one))]
        inner = [one for one in inner if len({type(child) for child in root.get_submodule(one).children()}) == 1]
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


def note_vocabulary(root: PreTrainedModel, rules: dict[str, Any]) -> str:
    """Note the rules of embeddings of words and of what makes logits of words; returns the count of words."""
    count = ""
    tables = set()
    for _, module in root.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        size = getattr(module.config, "vocab_size", None)
        try:
            words: Any = module.get_input_embeddings()
        except (NotImplementedError, AttributeError):
            words = None
        if not isinstance(words, nn.Embedding) and module is root:
            words = next((m for m in root.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == size), None)
        if isinstance(words, nn.Embedding) and type(size) is int and words.num_embeddings == size:
            tables.add(id(words.weight))
            same = size == getattr(root.config, "vocab_size", None)
            count = "vocab_size" if same and count in ("", "vocab_size") else "inferred"
    for path, module in root.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in tables:
            rules[path] = {"embedding": "vocab"}
    for _, module in root.named_modules():
        if isinstance(module, PreTrainedModel):
            made: Any = module.get_output_embeddings()
            if made is None and module is root:
                size = getattr(root.config, "vocab_size", None)
                linear = [child for child in root.children() if isinstance(child, nn.Linear)]
                made = next((child for child in linear if child.out_features == size), None)
            own = next((p for p, m in root.named_modules() if m is made), "") if made is not None else ""
            sizes = {t.num_embeddings for t in root.modules() if isinstance(t, nn.Embedding) and id(t.weight) in tables}
            if own and isinstance(made, nn.Linear) and made.out_features in sizes:
                rules[own] = {"column": "vocab", "gather_output": True}
    tied = {id(p) for path, rule in rules.items() for p in root.get_submodule(path).parameters()}
    for path, module in root.named_modules():
        if isinstance(module, nn.Linear) and path not in rules and id(module.weight) in tied:
            rules[path] = {"column": "vocab", "gather_output": True}
    return count


def sections_around(
    seen: Trace, covered: Mapping[str, Any], lists: list[BlockList], start: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Modules outside of the blocks: before them, behind them, and outside of the base model."""
    starts = [seen.order.index(block) for each in lists for block in each.blocks if block in seen.order]
    first = min(starts, default=0)
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    head: dict[str, Any] = {}
    for path, rule in covered.items():
        if not path.startswith(start):
            name, _, rest = path.partition(".")
            head[f"{name}?" + (f".{rest}" if rest else "")] = rule
            continue
        own = path[len(start) :]
        called = [n for n, p in enumerate(seen.order) if p == path or p.startswith(path + ".")]
        called = called or [n for n, p in enumerate(seen.order) if p == path.rpartition(".")[0]]
        if not start and isinstance(rule, dict) and "column" in rule:
            head[f"{own}?"] = rule  # the base model is the task model
            continue
        (before if called and called[0] < first else after)[own] = rule
    return before, after, head
