"""Which rule of a policy meets which module of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.errors import PolicyError, UnsupportedModelError, nearest
from autopar.policy.schema import Policy, Rule, Where

__all__ = ["Use", "all_uses", "blocks_of", "check_overlap", "hugging_face_model", "join", "walk"]


def hugging_face_model(root: nn.Module) -> tuple[str, PreTrainedModel]:
    """The Hugging Face model inside ``root`` (often ``root`` itself) and its path.

    Raises:
        UnsupportedModelError: there is none, or more than one.
    """
    found: list[tuple[str, PreTrainedModel]] = []
    for path, module in root.named_modules():
        inside = any(path.startswith(outer + ".") or not outer for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found.append((path, module))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnsupportedModelError(f"{type(root).__name__} is no Hugging Face model and holds none")
    listed = ", ".join(f"{path} ({type(module).__name__})" for path, module in found)
    raise UnsupportedModelError(
        f"{type(root).__name__} holds {len(found)} Hugging Face models: {listed}; one is supported"
    )


@dataclass(frozen=True)
class Use:
    """One rule met one module, or one bare parameter.

    ``scope`` is the block or section inside which regions must open and close.
    """

    path: str
    module: nn.Module | nn.Parameter
    rule: Rule
    scope: str
    shown: str


def _base(model: PreTrainedModel) -> tuple[str, nn.Module]:
    name = model.base_model_prefix
    base = getattr(model, name, None) if name else None
    return (name, base) if isinstance(base, nn.Module) else ("", model)


def blocks_of(policy: Policy, prefix: str, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    name, base = _base(model)
    found = walk(base, policy.blocks_path, policy.blocks_where)
    if not isinstance(found, tuple) or not isinstance(found[1], nn.ModuleList):
        raise PolicyError(
            f"blocks.path '{policy.blocks_path}' is no ModuleList of {type(base).__name__}", policy.blocks_where
        )
    for index, block in enumerate(found[1]):
        yield join(prefix, name, found[0], str(index)), block


def all_uses(policy: Policy, prefix: str, model: PreTrainedModel) -> Iterator[Use]:
    name, base = _base(model)
    for section in ("prefix", "every_stage", "suffix"):
        yield from _uses(getattr(policy, section), join(prefix, name), base, section)
    for path, block in blocks_of(policy, prefix, model):
        yield from _uses(policy.blocks, path, block, path)
    yield from _uses(policy.head, prefix, model, "head")


def _uses(rules: Mapping[str, Rule], root_path: str, root: nn.Module, scope: str) -> Iterator[Use]:
    for pattern, rule in rules.items():
        found = walk(root, pattern, rule.where)
        if found is not None:
            path, module = found
            yield Use(join(root_path, path), module, rule, scope, path)


def walk(root: nn.Module, pattern: str, where: Where) -> tuple[str, nn.Module | nn.Parameter] | None:
    """The module, or bare parameter, at ``pattern``; None if a segment marked ``?`` is missing (or None)."""
    module: Any = root
    path = ""
    for segment in pattern.split("."):
        name = segment.removesuffix("?")
        known_here = isinstance(module, nn.Module) and (name in module._modules or name in module._parameters)
        child = getattr(module, name) if known_here else None
        if child is None:
            if segment.endswith("?"):
                return None
            known = [known for known, _ in root.named_modules() if known]
            wanted = pattern.replace("?", "")
            raise PolicyError(f"{type(root).__name__} has no module '{wanted}'.{nearest(wanted, known)}", where)
        module, path = child, join(path, name)
    return path, module


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def check_overlap(uses: list[Use]) -> None:
    by_path: dict[str, Use] = {}
    for use in uses:
        if use.path in by_path:
            raise PolicyError(f"{use.path} is covered here and by {by_path[use.path].rule.where}", use.rule.where)
        by_path[use.path] = use
    for path, use in by_path.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            outer = by_path.get(".".join(parts[:end]))
            if outer is not None:
                raise PolicyError(
                    f"{path} is covered here and, with {outer.path}, by {outer.rule.where}", use.rule.where
                )
