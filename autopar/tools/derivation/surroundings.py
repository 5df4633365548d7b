"""The surroundings of the blocks: tables of words and logits, and the sections of modules before and behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.tools.derivation.block_lists import BlockList
from autopar.tools.derivation.decisions import Trace

__all__ = ["note_vocabulary", "sections_around"]


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
