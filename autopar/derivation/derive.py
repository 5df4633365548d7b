"""Derive a policy from the structure of a model and one forward of it without data."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from autopar.derivation.block_lists import block_lists
from autopar.derivation.decide import decide
from autopar.derivation.families import families
from autopar.derivation.policy_tree import policy_tree
from autopar.derivation.trace import Decisions, traced

__all__ = ["derive_tree"]


def derive_tree(model: PreTrainedModel) -> dict[str, Any]:
    """Return what the policy of ``model`` would be, as plain data."""
    models = traced(model)
    root: Any = models[0].model
    lists = block_lists(root)
    blocks = tuple(block for each in lists for block in each.blocks)
    decisions = Decisions()
    while True:
        seen, decisions = decide(models, blocks, decisions)
        found, bad = families(seen, blocks)
        if not bad:
            return policy_tree(root, lists, found, seen, decisions)
        decisions = decisions.without(map(seen.names, bad))
