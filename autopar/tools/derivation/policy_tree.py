"""Make a policy from families and the modules around them, as plain data and as YAML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import yaml
from torch import nn
from transformers import PreTrainedModel

from autopar.compat.tensors import own_modules, own_parameters
from autopar.plan.matching import around, join
from autopar.policy.match import base_of, config_of, library_of
from autopar.tools.derivation.families import Family, Member, Named, named_families
from autopar.tools.derivation.trace import BlockList, Decisions, Trace, is_linear

_UNNAMED = ("*", "layers", "layer", "blocks", "block", "model", "h")  # parts of paths that do not name a tower


def policy_tree(
    root: PreTrainedModel,
    lists: list[BlockList],
    found: list[Family],
    seen: Trace,
    decisions: Decisions,
    *,
    words: bool = True,
) -> tuple[dict[str, Any], list[list[Named]]]:
    """Return a model's policy without attributes, in the form of ``policies/README.md``, and its families.

    Args:
        words: A flag to shard word embeddings and logits.
    """
    base_path, _ = base_of(root)
    start = f"{base_path}." if base_path else ""
    by_list = [(each, named_families(root, each, found, seen)) for each in lists]
    rules: dict[str, Any] = {}
    vocab = note_vocabulary(root, rules) if words else ""
    towers = [_tower(root, each, named, seen, decisions, start) for each, named in by_list]
    inside_blocks = tuple(block + "." for each in lists for block in each.blocks)
    _outside(root, found, by_list, seen, inside_blocks, rules)
    covered = _covered(root, rules, inside_blocks)
    before, after, head = sections_around(seen, covered, lists, start)
    units = {"vocab": vocab} if vocab else {}
    library = library_of(root)
    listed = {library.name: [type(root).__name__]} if library else {"model_type": [root.config.model_type]}
    tree: dict[str, Any] = {"match": listed}
    if not towers:
        tree |= {"units": units, "prefix": {**before, **after}}
    elif len(towers) == 1 and "config" not in towers[0]:
        tree |= {"units": {**towers[0].pop("units"), **units}, "prefix": before, **towers[0], "suffix": after}
    else:
        tree |= {"units": units, "prefix": before}
        names: list[str] = []
        for each in lists:
            free = (part for part in reversed(each.path.split(".")) if part not in {*_UNNAMED, *names})
            names.append(next(free, f"tower{len(names)}"))
        tree["towers"] = dict(zip(names, towers, strict=True))
        towers[-1]["suffix"] = after
    tree |= {"head": head, "units": tree["units"] or {"ffn": "inferred"}}
    return {name: value for name, value in tree.items() if value}, [named for _, named in by_list]


def _tower(
    root: nn.Module, each: BlockList, named: list[Named], seen: Trace, decisions: Decisions, start: str
) -> dict[str, Any]:
    modules: dict[str, Any] = {}
    rules = {block: _rules_of_block(root, block, named, seen, decisions) for block in each.blocks}
    split = {outer for block, own in rules.items() for path in own for outer in around(seen.names.below(block, path))}
    listed = [root.get_submodule(block) for block in each.blocks]
    for block, module in zip(each.blocks, listed, strict=True):
        paths = [path for path, _ in (*module.named_modules(), *module.named_parameters()) if path]
        busy = [path for path in paths if seen.names.below(block, f"{block}.{path}") in split]
        own_rules = {path[len(block) + 1 :]: rule for path, rule in rules[block].items()}
        for path, rule in _covered(module, own_rules, (), busy).items():
            key = seen.names.below(block, f"{block}.{path}")
            if modules.get(key, "replicated") == "replicated":
                modules[key] = rule
    tower: dict[str, Any] = {"units": {unit: count for n in named for unit, count in n.counts.items()}}
    wanted, own_config = config_of(root.get_submodule(each.owner)), config_of(root)
    parts = {name: value for name, value in vars(own_config).items() if hasattr(value, "model_type")}
    parts |= {f"{name}.{inner}": below for name, value in parts.items() for inner, below in vars(value).items()}
    if wanted is not own_config and (config := next((name for name, part in parts.items() if part is wanted), "")):
        tower["config"] = config
    path = each.path[len(start) :] if each.path.startswith(start) else each.path
    marked_rules = {marked(key, reached(listed, key)[1]): rule for key, rule in modules.items()}
    return tower | {"blocks": {"path": path, "modules": marked_rules}}


def reached(blocks: list[nn.Module], key: str) -> tuple[list[Any], set[str]]:
    """Return the modules or parameters at a path below ``blocks``, and the parts of the path that some blocks lack."""
    found: list[Any] = blocks
    parts, lacking = key.split(".") if key else [], set[str]()
    for end, part in enumerate(parts):
        below: list[Any] = []
        for module in found:
            child = own_modules(module).get(part)
            child = own_parameters(module).get(part) if child is None else child
            if part == "*":
                below += module.children()
            elif child is None:
                lacking.add(".".join(parts[: end + 1]))
            else:
                below.append(child)
        found = below
    return found, lacking


def marked(key: str, lacking: set[str]) -> str:
    parts = key.split(".")
    return ".".join(part + ("?" if ".".join(parts[: n + 1]) in lacking else "") for n, part in enumerate(parts))


def _covered(
    root: nn.Module, rules: Mapping[str, Any], blocks: tuple[str, ...], more: Iterable[str] = ()
) -> dict[str, Any]:
    """Return rules for all parameters below ``root``: ``rules``, and ``replicated`` for the other modules."""
    busy = {"", *more}
    for path in (*rules, *(block[:-1] for block in blocks)):
        busy |= {path, *around(path)}
    result: dict[str, Any] = {}

    def visit(path: str, module: nn.Module) -> None:
        if path in rules:
            result[path] = rules[path]
            opens = isinstance(rules[path], dict) and {"region", "column", "row", "embedding"} & set(rules[path])
            if not opens:
                return
        for name, parameter in own_parameters(module).items():
            own = join(path, name)
            of_layer = path in rules and name in ("weight", "bias") and own not in rules
            if parameter is not None and not of_layer:
                result[own] = rules.get(own, "replicated")
        for name, child in own_modules(module).items():
            own = join(path, name)
            if child is None or own + "." in blocks:
                continue
            if own in busy:
                visit(own, child)
            elif any(True for _ in child.parameters()):
                result[own] = "replicated"

    visit("", root)
    return result


def _outside(
    root: nn.Module,
    found: list[Family],
    by_list: list[tuple[BlockList, list[Named]]],
    seen: Trace,
    blocks: tuple[str, ...],
    rules: dict[str, Any],
) -> None:
    """Add the rules of parameters outside of the blocks that are sharded by units of blocks."""
    live = [n for _, many in by_list for n in many if not n.gathered]
    for family in (f for f in found if not f.block):
        for named in [n for n in live if set(n.first.units) & set(family.units)][:1]:
            for member in family.members:
                rules.update(_rule_of(root, member, named, seen))
    for name in sorted(seen.tracking.inside):
        holder = name.rpartition(".")[0]
        if not name.startswith(blocks) and name not in rules and holder not in rules and live:
            rules[name] = {"replicated": live[0].unit}


def _rules_of_block(
    root: nn.Module, block: str, named: list[Named], seen: Trace, decisions: Decisions
) -> dict[str, Any]:
    """Return path from the root -> rule for a block, except for replicated modules."""
    rules: dict[str, Any] = {}
    own = [n for n in named if block in n.of_blocks]
    for each in own:
        for member in each.of_blocks[block].members:
            rules.update(_rule_of(root, member, each, seen))
    own = [n for n in own if not n.gathered]
    for name in sorted(seen.tracking.inside):
        holder, _, _ = name.rpartition(".")
        if not name.startswith(block + ".") or name in rules or holder in rules or not own:
            continue
        unit = _nearest(own, block, name, seen).unit
        module = root.get_submodule(holder)
        listed = {f"{holder}.{n}" for n, p in own_parameters(module).items() if p is not None}
        if name in seen.tracking.once:
            rules[name] = {"once": unit}
        elif not own_modules(module) and listed <= seen.tracking.inside - rules.keys() - seen.tracking.once:
            rules[holder] = {"enter_output": unit} if holder in seen.entered else {"replicated": unit}
        else:
            rules[name] = {"replicated": unit}
    for path in seen.entered:
        if path.startswith(block + ".") and path not in rules and own:
            rules[path] = {"enter_output": _nearest(own, block, path, seen).unit}
    for path, _ in root.named_modules():
        if path.startswith(block + ".") and seen.names(path) in decisions.regions:
            near = [n for n in own if any(m.path.startswith(path + ".") for m in n.of_blocks[block].members)]
            if near:
                rules[path] = {"region": near[0].unit}
    return rules


def _nearest(named: list[Named], block: str, path: str, seen: Trace) -> Named:
    """Return the family that a module is computed with, or the family with the most similar path."""
    unit = int(seen.tracking.components.of(torch.tensor(seen.tracking.near.get(path, 0))))
    if unit and (found := [each for each in named if unit in each.of_blocks[block].units]):
        return found[0]

    def common(each: Named) -> int:
        own = path.split(".")
        return max(
            sum(1 for a, b in zip(own, m.path.split("."), strict=False) if a == b)
            for m in each.of_blocks[block].members
        )

    return max(named, key=common)


def _rule_of(root: nn.Module, member: Member, named: Named, seen: Trace) -> dict[str, Any]:
    """Return path from the root -> rule for a member."""
    parts = named.parts(member.widths)
    listed: Any = parts[0] if len(parts) == 1 else parts
    if named.gathered:
        flag = {"column": "gather_output", "row": "split_input"}.get(member.kind)
        return {member.path: {member.kind: listed, flag: True}} if flag else {}
    if member.kind == "column":
        extra = {"inside": True} if seen.sources[member.path] else {}
        return {member.path: {"column": listed, **extra}}
    if member.kind == "row":
        extra = {"enter_output": True} if member.path in seen.entered else {}
        return {member.path: {"row": listed, **extra}}
    if member.kind == "norm":
        numbers = [v for k, v in vars(root.get_submodule(member.path)).items() if "group" in k and type(v) is int]
        count = len(named.first.units)
        grouped = any(value in (count, len(member.line) // count) and value > 1 for value in numbers)
        return {member.path: {"norm_over": listed, **({"within": named.unit} if grouped else {})}}
    holder, _, _ = member.path.rpartition(".")
    module = root.get_submodule(holder)
    layer = is_linear(module) or isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d)
    path = holder if layer and not own_modules(module) else member.path
    return {path: {"sharded": listed, **({"dim": member.dim} if member.dim else {})}}


def note_vocabulary(root: PreTrainedModel, rules: dict[str, Any]) -> str:
    """Add the rules of word embeddings and logit layers. Return the count of words."""
    modules = dict(root.named_modules())
    models = [module for module in modules.values() if isinstance(module, PreTrainedModel)]
    tables = {path: module for path, module in modules.items() if isinstance(module, nn.Embedding)}
    all_words = getattr(root.config, "vocab_size", None)
    count, tied = "", set[int]()
    for module in models:
        size = getattr(module.config, "vocab_size", None)
        try:
            words: Any = module.get_input_embeddings()
        except (NotImplementedError, AttributeError):
            words = None
        if not isinstance(words, nn.Embedding) and module is root:
            words = next((table for table in tables.values() if table.num_embeddings == size), None)
        if isinstance(words, nn.Embedding) and type(size) is int and words.num_embeddings == size:
            tied.add(id(words.weight))
            count = "vocab_size" if size == all_words and count in ("", "vocab_size") else "inferred"
    found = {path: table for path, table in tables.items() if id(table.weight) in tied}
    sizes = {table.num_embeddings for table in found.values()}
    for module in models:
        made: Any = module.get_output_embeddings()
        if made is None and module is root:
            linear = (child for child in root.children() if isinstance(child, nn.Linear))
            made = next((child for child in linear if child.out_features == all_words), None)
        if isinstance(made, nn.Linear) and made.out_features in sizes:
            tied.add(id(made.weight))
    for path, each in modules.items():
        if path in found:
            rules[path] = {"embedding": "vocab"}
        elif isinstance(each, nn.Linear) and id(each.weight) in tied:
            rules[path] = {"column": "vocab", "gather_output": True}
    return count


def sections_around(
    seen: Trace, covered: Mapping[str, Any], lists: list[BlockList], start: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the rules before the blocks, after them, and outside of the base model."""
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


def yaml_text(tree: dict[str, Any], comments: list[str]) -> str:
    """Return a policy as YAML, with comments at the top."""
    alone = json.loads(json.dumps(tree))  # without shared values, which YAML would write as aliases
    text = yaml.safe_dump(alone, default_flow_style=None, width=1000, sort_keys=False)
    return "\n".join([*(f"# {line}" for line in comments), text])
