"""The styles of a ``tp_plan`` as rules: one group of modules whose sharded features may meet after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.errors import UnsupportedModelError
from autopar.foreign.modules import own_parameters
from autopar.policy.plan_heads import Heads, heads_of
from autopar.policy.schema import INFERRED, Part, Ratio, Rule, UnitSpec
from autopar.policy.yaml_reader import Where

__all__ = ["StyleRules", "generic"]

_NOTHING = ("local_params", "replicate")  # what is so already: a shard is a plain tensor here
_LINEAR: dict[str, dict[str, Any]] = {
    "colwise": {"kind": "column"},
    "packed_colwise": {"kind": "column", "packed": True},
    "colwise_gather_output": {"kind": "column", "gather_output": True},
    "colwise_rep": {"kind": "column", "gather_output": True},
    "rowwise": {"kind": "row"},
    "packed_rowwise": {"kind": "row", "packed": True},
    "rowwise_split_input": {"kind": "row", "split_input": True},
    "rowwise_rep": {"kind": "row", "split_input": True},
}
_EMBEDDING = {"embedding_rowwise": "vocab", "embedding_colwise": "hidden"}
_SUMMED = "replicated_with_grad_allreduce"
_LATENT, _EXPERTS = "mla_kv_a_proj", "moe_tp_experts"
_KNOWN = (*_LINEAR, *_EMBEDDING, _SUMMED, _LATENT, _EXPERTS)


def generic(path: str) -> str:
    """Return a path with ``*`` for numbers, as plans write it."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


@dataclass(frozen=True)
class _Group:
    """Modules whose sharded features may meet: their names in units, heads if it is attention, and whether latent."""

    shown: str
    heads: Heads | None
    latent: bool

    @property
    def single(self) -> str:
        return f"{self.shown}.features"


class StyleRules:
    """Makes rules, units and attributes of styles.

    Args:
        plan: pattern of a path -> style.
        file: what stands for the plan in messages.
        start: of paths in the base model.

    Attributes:
        rules, attributes: path in ``model`` -> what the policy says of it.
        units: by name.
    """

    def __init__(self, model: PreTrainedModel, plan: Mapping[str, str], file: str, start: str) -> None:
        self.model, self.plan, self.file, self.start = model, plan, file, start
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.rules: dict[str, Rule] = {}
        self.attributes: dict[str, Ratio] = {}
        self.units = {"vocab": self._unit("vocab", INFERRED)}

    def style_of(self, path: str) -> str | None:
        """Return the style of a module or bare parameter; None if it stays as it is.

        Raises:
            UnsupportedModelError: no rule says that style.
        """
        style = self.plan.get(path if path in self.plan else generic(path))
        if style is None or style in _NOTHING:
            return None
        if style not in _KNOWN:
            raise self.refused(path, style, "no rule of a policy says that")
        return style

    def refused(self, path: str, style: str, reason: str) -> UnsupportedModelError:
        """Return the error about one module."""
        kind = type(self.model).__name__
        return UnsupportedModelError(f"the tp_plan of {kind} cannot be imported: {path} is '{style}': {reason}.")

    def where(self, path: str) -> Where:
        """Return the place of an entry of the plan."""
        return Where(self.file, generic(path))

    def ties(self, module: nn.Module) -> bool:
        """Whether a module holds the weight of the word embedding."""
        try:
            embedded: Any = self.model.get_input_embeddings()
        except NotImplementedError:  # of images
            return False
        return embedded is not None and getattr(module, "weight", None) is getattr(embedded, "weight", 0)

    def add(self, path: str, inside: str, tower: str, styles: Mapping[str, str]) -> None:
        """Make the rules of one group.

        Args:
            path: of the module around it; ``inside``: in its block; empty outside of blocks.
            tower: where the model has several lists of blocks, what tells them apart.
            styles: path -> style, of its members.
        """
        shown = ".".join(filter(None, (tower, generic(inside or path or "model"))))
        counted = any(style in ("colwise", "rowwise") for style in styles.values())
        holder = self.modules[path]
        heads = heads_of(holder, self.model, inside) if counted else None
        latent = [member for member, style in styles.items() if style == _LATENT]
        group = _Group(shown, heads, bool(latent))
        for member, style in styles.items():
            self._member(member, style, group, styles)
        for member in latent:
            self._latent(member, group)
        for name, unit in heads.attributes(holder) if heads is not None else ():
            top, _, per = unit.partition(" / ")
            parts = (Part(self._heads_unit(group, top)),)
            self.attributes[f"{path}.{name}"] = Ratio(
                parts, self._heads_unit(group, per) if per else None, self.where(f"{path}.{name}")
            )

    def _member(self, path: str, style: str, group: _Group, styles: Mapping[str, str]) -> None:
        module = self.modules.get(path)
        if style == _LATENT:
            return
        if style in _EMBEDDING:
            if not isinstance(module, nn.Embedding):
                raise self.refused(path, style, "it is no embedding")
            self.rules[path] = Rule("embedding", self.where(path), (Part(_EMBEDDING[style]),))
        elif style == _EXPERTS:
            self._experts(path, module, group, styles)
        elif style == _SUMMED:
            unit = self._heads_unit(group, "heads") if group.heads else self._single(group.single)
            self.rules[path] = Rule("replicated", self.where(path), (Part(unit),))
        elif module is None:
            self._bare(path, style, group, styles)
        else:
            self._layer(path, style, module, group)

    def _layer(self, path: str, style: str, module: nn.Module, group: _Group) -> None:
        said, leaf = _LINEAR[style], path.rpartition(".")[2]
        features = getattr(module, "out_features" if said["kind"] == "column" else "in_features", None)
        if features is None:
            raise self.refused(path, style, f"a {type(module).__name__} has no features to shard")
        if said.get("gather_output") or said.get("split_input"):
            words = not path.startswith(self.start) or self.ties(module)
            unit = "vocab" if words else self._single(f"{group.shown}.{leaf}")
        elif group.heads is not None and not said.get("packed"):
            found = group.heads.unit_of(leaf, features, latent=group.latent)
            if found is None:
                raise self.refused(path, style, f"its {features} features are no multiple of {group.heads}")
            unit = self._heads_unit(group, found)
        else:
            unit = self._single(group.single)
        parts = (Part(unit),) * (2 if said.get("packed") else 1)
        self.rules[path] = Rule(
            said["kind"],
            self.where(path),
            parts,
            gather_output=said.get("gather_output", False),
            split_input=said.get("split_input", False),
        )

    def _bare(self, path: str, style: str, group: _Group, styles: Mapping[str, str]) -> None:
        holder, _, name = path.rpartition(".")
        if holder in styles or name in ("weight", "bias"):
            return  # of a layer or of experts that are sharded as a whole
        parameter = own_parameters(self.modules[holder])[name]
        heads = group.heads
        if parameter is None or style != "colwise" or heads is None or tuple(parameter.shape) != (heads.count,):
            raise self.refused(path, style, "of bare parameters only one number for each head is known")
        unit = Part(self._heads_unit(group, "heads"))
        self.rules[path] = Rule("sharded", self.where(path), (unit,), dim=0)

    def _experts(self, path: str, module: nn.Module | None, group: _Group, styles: Mapping[str, str]) -> None:
        if module is None or not hasattr(module, "is_concatenated"):
            kind = type(module).__name__
            raise self.refused(path, _EXPERTS, f"{kind} is not made by transformers' use_experts_implementation")
        unit = Part(self._single(group.single))
        self.rules[path] = Rule("region", self.where(path), (unit,))
        for name, parameter in own_parameters(module).items():
            if parameter is None:
                continue
            own, style = f"{path}.{name}", styles.get(f"{path}.{name}") or self.style_of(f"{path}.{name}")
            if style not in _LINEAR or parameter.ndim != 3:
                raise self.refused(own, str(style), f"with '{_EXPERTS}' around it only matrices are known, sharded")
            packed, first = style.startswith("packed"), name.startswith(("gate", "up"))
            gated = name.startswith("gate_up") and module.has_gate
            if gated and not (packed and module.is_concatenated):
                raise self.refused(own, style, "gate and up of these experts do not lie so")
            dim = parameter.ndim - (2 if style.endswith("colwise") else 1)
            if (packed and not gated) or (dim == 1) is not (first is not bool(module.is_transposed)):
                raise self.refused(own, style, "that is the other dim of these experts")
            self.rules[own] = Rule("sharded", self.where(own), (unit,) * (2 if packed else 1), dim=dim)

    def _latent(self, path: str, group: _Group) -> None:
        """Latent attention: the rotary part of the keys goes from a whole projection to all heads."""
        holder = path.rpartition(".")[0]
        inner = self.rules.get(f"{holder}.kv_b_proj")
        norm = next((p for n in ("kv_a_layernorm", "kv_a_norm") if (p := f"{holder}.{n}") in self.modules), None)
        if group.heads is None or inner is None or norm is None:
            raise self.refused(path, _LATENT, "beside it no kv_a_layernorm and kv_b_proj are found")
        unit = (Part(self._heads_unit(group, "heads")),)
        self.rules[path] = Rule("enter_output", self.where(path), unit)
        self.rules[norm] = Rule("replicated", self.where(path), unit)
        self.rules[f"{holder}.kv_b_proj"] = replace(inner, inside=True)

    def _unit(self, name: str, count: str, **further: Any) -> UnitSpec:
        return UnitSpec(name, count, Where(self.file, name), **further)

    def _single(self, name: str) -> str:
        self.units.setdefault(name, self._unit(name, INFERRED))
        return name

    def _heads_unit(self, group: _Group, which: str) -> str:
        own, kv, heads = f"{group.shown}.heads", f"{group.shown}.kv_heads", group.heads
        assert heads is not None
        specs: Sequence[UnitSpec] = (
            self._unit(kv, heads.kv_expression, replicate=True),
            self._unit(own, heads.expression, follows=kv),
        )
        for spec in specs:
            known = self.units.setdefault(spec.name, spec)
            if known.count != spec.count:
                reason = f"blocks have {known.count} and {spec.count} {spec.name}, which nothing in a block counts"
                raise self.refused(group.shown, "colwise", reason)
        return own if which == "heads" else kv
