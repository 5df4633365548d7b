"""Which model types and policies stand for others where real ranks are needed."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from autopar.policy.load import own_policies
from autopar.policy.schema import Rule, Tower
from tests.changed import touched_policies

REPRESENTATIVES = {
    "gpt2": "fused q, k, v in Conv1D layers, whose weights are transposed; tied head",
    "llama": "rotary embeddings, fewer KV heads, gated MLP",
    "phi3": "q, k, v of different widths fused in one Linear; gate and up fused",
    "qwen3": "a norm over each head",
    "falcon": "one KV head for all, fused with the queries; attention and MLP side by side",
    "bloom": "q, k, v fused head by head; ALiBi slopes by head",
    "bert": "an encoder with biases; the head's transform and decoder",
    "deberta-v2": "attention by relative positions, with projections that layers use twice",
    "t5": "encoder and decoder; a bias by head in the first layer, for all layers",
    "bart": "encoder and decoder with learned positions and cross-attention",
    "mixtral": "experts stacked in one tensor",
    "deepseek_v3": "latent attention, routed and shared experts",
    "llama4_text": "layers of several kinds; experts beside a shared one",
    "mamba2": "a state-space mixer with several parts in one projection",
    "zamba2": "state-space layers and one attention block that layers share",
    "rwkv": "linear attention, recurrent",
    "gemma2": "soft caps, norms after each part",
    "vit": "images: a convolution makes the patches",
    "swin": "windows of attention, widths that grow",
    "chinese_clip": "CLIP: towers for images and text, and projections into one space",
    "llava": "a vision tower, a projector and a language model, each by its own policy",
    "mllama": "cross-attention layers for images between those for text",
    "qwen2_vl": "a vision tower with one fused q, k, v and rotary embeddings of its own",
    "whisper": "audio through convolutions; generate of an encoder and decoder",
    "wav2vec2": "audio with a convolution over positions",
    "encoder-decoder": "two models with policies of their own",
}
"""Model type -> what it stands for."""

IN_EVERY_RUN = (
    *("gpt2", "llama", "phi3", "qwen3", "falcon", "bert", "deberta-v2", "t5", "mixtral", "deepseek_v3", "mamba2"),
    *("llava", "qwen2_vl", "whisper"),
)
"""Representatives that ``make test`` compares with the plain model."""


def first_types(first: Collection[str], model_types: Sequence[str], *, later: str) -> list[Any]:
    """Return model types as parameters: the first ones and changed ones in the test's tier, others in a later one."""
    touched = touched_policies()
    changed = {each for name, policy in own_policies().items() if name in touched for each in policy.model_types}
    return _split({*first, *(changed if touched else ())}, model_types, later)


def first_policies(first: Collection[str], names: Sequence[str], *, later: str) -> list[Any]:
    """Return names of policies as :func:`first_types` does."""
    return _split({*first, *touched_policies()}, names, later)


def _split(first: Collection[str], names: Sequence[str], later: str) -> list[Any]:
    return [name if name in first else pytest.param(name, marks=pytest.mark.tier(later)) for name in names]


def one_of_each_structure(model_types: Collection[str]) -> list[str]:
    """Policies of these model types that hold a tower of another structure than those before."""
    found, seen = [], set[Any]()
    for name, policy in own_policies().items():
        structures = {_structure(tower) for tower in policy.towers}
        if set(policy.model_types) & set(model_types) and not structures <= seen:
            found.append(name)
            seen |= structures
    return found


def every_fourth(names: Sequence[str], start: int) -> list[str]:
    """Return each fourth policy, from the one at ``start`` on; and those that have been changed."""
    return [*dict.fromkeys([*names[start::4], *(name for name in names if name in touched_policies())])]


def _structure(tower: Tower) -> Any:
    """What a tower says, without names of modules and config attributes: equal ones are cut and summed alike."""
    units = {(u.name, u.follows, u.replicate, u.or_whole, u.align) for u in tower.units.values()}
    rules = [{_rule(r) for r in rules.values()} for rules in (tower.blocks, tower.prefix, tower.suffix)]
    ratios = [{(r.parts, r.per) for r in rules.values()} for rules in (tower.block_attributes, tower.attributes)]
    inputs = [{(i.unit, i.dim) for i in rules.values()} for rules in (tower.block_inputs, tower.inputs)]
    return tuple(frozenset(part) for part in (units, *rules, *ratios, *inputs))


def _rule(rule: Rule) -> Any:
    facts = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    for name in ("by_expert", "within", "repeat"):  # paths and config attributes
        facts[name] = facts[name] is not None
    del facts["where"]
    parts = tuple((part.unit, part.width is None) for part in facts.pop("parts"))
    return (parts, *facts.values())
