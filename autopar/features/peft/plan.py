"""Layouts of PEFT's parameters, and rules for its modules: adapters are sharded like their base layer.

Low-rank adapters (Hu et al., "LoRA", 2021) add ``B A x`` to ``W x``. If ``W`` is column-parallel, ``A`` is replicated
and ``B`` is column-parallel with the layout of ``W``. ``A x`` with ``r`` features enters the region, so the gradient of
``A`` is full. If ``W`` is row-parallel, ``A`` is row-parallel with the layout of ``W``, and ``B`` is replicated. ``A
x`` is summed over the ranks. In both cases ranks exchange ``r`` numbers per token, and ``W + B A`` has the layout of
``W``, which merging needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.compat.peft import swaps_features, tuner_layers
from autopar.errors import ConfigError
from autopar.layout import Layout
from autopar.plan.matching import RuleMatch, join
from autopar.plan.plan import AttributePlan, ModulePlan
from autopar.plan.rules import TensorRule

_LAYERS = {  # module of PEFT -> names of its supported classes
    "peft.tuners.lora.layer": ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ParamWrapper"),
    "peft.tuners.lora.bnb": ("Linear4bit", "Linear8bitLt"),
    "peft.tuners.lora.torchao": ("TorchaoLoraLinear",),
    "peft.tuners.ia3.layer": ("Linear",),
}
_METHODS = ("LORA", "IA3", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
_SETTINGS = ("ensure_weight_tying", "layer_replication")
_INSTEAD = (
    "  Supported over tensor-parallel ranks: LoRA (also rslora, DoRA, lora_bias, several adapters, modules_to_save)\n"
    "  and IA3 on linear layers, LoRA on embeddings; without stages also prompts and prefixes. Train other adapters\n"
    "  on one rank."
)


class Adapters:
    """The adapters of PEFT in a model (:attr:`autopar.registry.Feature.additions`)."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def check(self, tp: int, pp: int) -> None:
        """Raise ConfigError for the first method, layer or setting that is not supported on ``tp`` x ``pp`` ranks."""
        for what in _unsupported(self._root, tp, pp) if tp > 1 or pp > 1 else ():
            size = f"pipeline_parallel_size={pp}" if pp > 1 else f"tensor_parallel_size={tp}"
            raise ConfigError(f"{size} is not supported with {what}.\n{_INSTEAD}")

    def rules(
        self, matches: Sequence[RuleMatch], modules: Mapping[str, ModulePlan], tp: int
    ) -> Iterator[tuple[RuleMatch, TensorRule]]:
        """Yield the rules of all adapters, each with the match of its base layer in ``modules``.

        Raises:
            ConfigError: An adapter does not support the rule of its base layer.
        """
        by_path = {match.path: match for match in matches}
        first = {id(module): path for path, module in self._root.named_modules()}
        for path, layer in tuner_layers(self._root):
            base = first[id(layer.get_base_layer())]
            ends = [base[:end] for end in range(len(base), 0, -1) if end == len(base) or base[end] == "."]
            match = next((by_path[end] for end in ends if end in by_path), None)
            if match is None:
                continue  # a base layer without a rule raises elsewhere
            plan = modules.get(base)
            if plan is not None and plan.rule == "one_expert":
                continue  # the expert with all its adapters is on one rank
            try:
                for what in _of_layer(path, layer):
                    raise ConfigError(f"tensor parallelism is not supported with {what}.\n{_INSTEAD}")
                rules = list(_rules_of(path, layer, plan, match))
            except ConfigError:
                if tp > 1 or (plan is not None and plan.rule == "experts"):
                    raise
                rules = [_replicated(layer)]  # on one rank every adapter works
            if hasattr(layer, "parameter_name") and plan is not None and plan.rule == "experts":
                rules.append(_counts(path, layer, plan))
            yield from ((match, rule) for rule in rules)


def _unsupported(root: nn.Module, tp: int, pp: int) -> Iterator[str]:
    for module in root.modules():
        configs = vars(module).get("_peft_config") or vars(module).get("peft_config") or {}
        for name, config in configs.items() if isinstance(configs, dict) else ():
            kind = getattr(getattr(config, "peft_type", None), "value", None)
            if kind is None:
                continue
            shown = f"{kind} (adapter '{name}')"
            if getattr(config, "is_prompt_learning", False) and pp > 1:
                yield f"PEFT's {shown}, which adds a prefix to the sequence or to the keys of every layer"
            if tp > 1 and kind not in _METHODS:
                yield f"PEFT's {shown}"
            for setting in _SETTINGS if tp > 1 else ():
                if getattr(config, setting, None):
                    yield f"{setting}={getattr(config, setting)!r} of PEFT's {shown}"
    for path, layer in tuner_layers(root) if tp > 1 else ():
        yield from _of_layer(path, layer)


def _of_layer(path: str, layer: Any) -> Iterator[str]:
    kind = next(c for c in type(layer).__mro__ if c.__module__.startswith("peft."))
    if kind is not type(layer) or kind.__name__ not in _LAYERS.get(kind.__module__, ()):
        method = kind.__module__.removeprefix("peft.tuners.").partition(".")[0]
        base = type(layer.get_base_layer()).__name__
        yield f"PEFT's {method} layer {kind.__name__} on a {base} (at {path})"
    for name, variant in getattr(layer, "lora_variant", {}).items():
        if type(variant).__name__ != "DoraLinearVariant":
            shown = type(variant).__name__.removesuffix("Variant")
            yield f"PEFT's {shown} of adapter '{name}' (at {path}), a variant of LoRA"
        elif isinstance(layer.lora_dropout[name], nn.Dropout):
            yield f"lora_dropout of the DoRA adapter '{name}' (at {path}), which then needs the full weight"
    if layer.base_layer is not layer.get_base_layer() and kind.__name__ != "ParamWrapper":  # ParamWrappers may nest
        yield f"adapters on adapters (at {path})"


def _rules_of(path: str, layer: Any, plan: ModulePlan | None, match: RuleMatch) -> Iterator[TensorRule]:
    if hasattr(layer, "parameter_name"):
        return _of_parameter(path, layer, plan, match)
    if hasattr(layer, "ia3_l"):
        return _scaling(path, layer, plan, match)
    if plan is not None and plan.rule == "embedding":
        return _of_embedding(path, layer, plan)
    return _low_rank(path, layer, plan, match)


def _replicated(layer: Any) -> TensorRule:
    base = {id(parameter) for parameter in layer.base_layer.parameters()}
    return TensorRule(None, [(name, p, None) for name, p in layer.named_parameters() if id(p) not in base])


def _low_rank(path: str, layer: Any, plan: ModulePlan | None, match: RuleMatch) -> Iterator[TensorRule]:
    """Yield the rules of ``A`` and ``B`` of linear layers and convolutions."""
    full = plan is None or (plan.rule == "" and not plan.layouts)
    where = str(match.rule.where) if plan is None else plan.where
    for name in layer.lora_A:
        a, b = join(path, "lora_A", name), join(path, "lora_B", name)
        first, second, kind = layer.lora_A[name], layer.lora_B[name], ""
        entering = ModulePlan(b, "enter_output", where, enter_output=True)
        if name in layer.lora_magnitude_vector:
            yield _magnitude(join(path, "lora_magnitude_vector", name), layer, name, None if full else plan, match)
        if plan is None or full or plan.rule == "enter_output":
            yield _full(first)
            yield _full(second, None if full else entering)
            kind = "dropout_alike"
        elif plan.rule == "column":
            # With ``inside`` x has already entered the region, so the gradient of A is partial and must be summed.
            yield _summed(a, first, where) if plan.inside else _full(first)
            yield _sharded(b, second, "column", plan)
            kind = "dropout_alike"
        elif plan.rule == "row":
            yield _sharded(a, first, "row", plan)
            yield _full(second, entering if plan.enter_output else None)
            kind = "dropout_alike" if plan.split_input else "dropout_apart"
        elif plan.rule == "sharded" and isinstance(layer.get_base_layer(), nn.Linear):
            yield from _inside(path, name, layer, plan)
            kind = "dropout_alike" if plan.layouts["weight"].dim == 0 else ""
        elif plan.rule == "replicated" and plan.summed:  # the full base works on sharded activations
            yield _summed(a, first, where)
            yield _summed(b, second, where)
        else:
            raise _cannot_follow(path, plan, match)
        if kind and isinstance(layer.lora_dropout[name], nn.Dropout):
            yield TensorRule(ModulePlan(join(path, "lora_dropout", name), kind, where))


def _magnitude(path: str, layer: Any, name: str, plan: ModulePlan | None, match: RuleMatch) -> TensorRule:
    """Return the rule of DoRA's magnitudes (Liu et al., 2024), which are sharded like the outputs of the weight."""
    module = layer.lora_magnitude_vector[name]
    if plan is None:
        return _full(module)
    if plan.rule == "row":
        return _full(module, ModulePlan(path, "magnitude_of_parts", plan.where))
    if plan.rule != "column" or plan.gather_output or plan.layout is None:
        raise _cannot_follow(path, plan, match)
    layout = Layout.of(0, plan.layout.blocks)
    sharded = ModulePlan(path, "magnitude", plan.where, layout, {"weight": layout})
    return TensorRule(sharded, [("weight", module.weight, layout)])


def _inside(path: str, name: str, layer: Any, plan: ModulePlan) -> Iterator[TensorRule]:
    """Yield the rules of ``A`` and ``B`` of a linear layer inside a region: one sharded, one with partial gradients."""
    blocks, of_output = plan.layouts["weight"].blocks, plan.layouts["weight"].dim == 0
    full, cut = ("lora_A", "lora_B") if of_output else ("lora_B", "lora_A")
    module = getattr(layer, full)[name]
    once = frozenset(n for n, _ in module.named_parameters() if n == "bias")  # outputs are summed later
    yield _summed(join(path, full, name), module, plan.where, once)
    layout = Layout.of(0 if of_output else 1, blocks)
    yield _cut(join(path, cut, name), getattr(layer, cut)[name].named_parameters(), plan.where, layout)


def _sharded(path: str, module: Any, rule: str, base: ModulePlan) -> TensorRule:
    """Return the rule of ``A`` or ``B`` as a parallel layer with the units of the base layer."""
    assert base.layout is not None
    column = rule == "column"
    layout = Layout.of(0 if column else 1, base.layout.blocks)
    layouts = {name: layout for name, _ in module.named_parameters() if column or name == "weight"}
    plan = ModulePlan(
        path,
        rule,
        base.where,
        layout,
        layouts,
        gather_output=column and base.gather_output,
        split_input=not column and base.split_input,
        inside=column and base.inside,
        aside=column,
    )
    return TensorRule(plan, [(name, parameter, layouts.get(name)) for name, parameter in module.named_parameters()])


def _of_embedding(path: str, layer: Any, plan: ModulePlan) -> Iterator[TensorRule]:
    """Yield the rules of ``A`` [r, vocabulary] and ``B`` [hidden, r] of a vocabulary-parallel embedding."""
    if plan.by_hidden:
        raise ConfigError(
            f"adapters at {path} are not supported with an embedding that is sharded by columns ({plan.where})\n"
            "  Remove it from target_modules, or train all of it with modules_to_save."
        )
    assert plan.layout is not None
    layout = Layout.of(1, plan.layout.blocks)
    yield TensorRule(ModulePlan(path, "adapter_of_rows", plan.where, plan.layout))
    yield _cut(join(path, "lora_embedding_A"), layer.lora_embedding_A.items(), plan.where, layout)
    yield TensorRule(None, [(name, parameter, None) for name, parameter in layer.lora_embedding_B.items()])


def _of_parameter(path: str, layer: Any, plan: ModulePlan | None, match: RuleMatch) -> Iterator[TensorRule]:
    """Yield the rules of ``A`` and ``B`` of a bare parameter, such as the weights of all experts.

    Each forward computes ``W + B A``. The factor with the sharded dim is sharded; the other has a partial gradient.
    """
    layout = None if plan is None else plan.layouts.get(layer.parameter_name)
    if plan is None or (layout is None and layer.parameter_name not in plan.summed):
        yield _replicated(layer)
        return
    if match.rule.kind == "experts" and (plan.rule != "experts" or (layout is not None and len(layout.blocks) > 1)):
        raise _cannot_follow(path, plan, match)
    if layout is not None and plan.rule == "experts":
        table = match.scope.table
        yield from _of_full_experts(path, layer, plan, layout, table.tp or table.size)
        return
    dims = layer.get_param().ndim
    if layout is None or layout.replicated or layout.dim < dims - 2:
        raise _cannot_follow(path, plan, match)
    of_output = (layout.dim == dims - 2) is (dims == 2 or swaps_features(layer))
    yield TensorRule(ModulePlan(path, "", plan.where))  # sums gradients while its forward runs
    for name in layer.lora_A:
        cut, other, dim = ("lora_B", "lora_A", 0) if of_output else ("lora_A", "lora_B", 1)
        factor = getattr(layer, cut)[name]
        yield _cut(join(path, cut, name), [("weight", factor.weight)], plan.where, Layout.of(dim, layout.blocks))
        yield _summed(join(path, other, name), getattr(layer, other)[name], plan.where)


def _of_full_experts(path: str, layer: Any, plan: ModulePlan, layout: Layout, tp: int) -> Iterator[TensorRule]:
    """Yield the rules of ``A``, ``[experts * r, in]``, and ``B``, ``[out, r * experts]``, of distributed experts."""
    (block,) = layout.blocks
    few = [rank for rank in range(layout.axis_size) if layout.local_size(rank) == 1]
    if few and layout.size > 1:  # PEFT treats the weights of a single expert like a plain layer
        raise ConfigError(
            f"adapters at {path} require at least two experts per rank, but {layout.size} experts over "
            f"{layout.axis_size} ranks leave one on rank {few[0]}\n  Use an expert_parallel_size of at most "
            f"{layout.size // 2 // tp * tp or 1}."
        )
    for name in layer.lora_A:
        a, b, r = layer.lora_A[name], layer.lora_B[name], layer.r[name]
        rows, columns = Layout.of(0, [replace(block, width=r)]), Layout.of(1, [block] * r)
        yield _cut(join(path, "lora_A", name), [("weight", a.weight)], plan.where, rows)
        yield _cut(join(path, "lora_B", name), [("weight", b.weight)], plan.where, columns)


def _counts(path: str, layer: Any, plan: ModulePlan) -> TensorRule:
    """Return the rule of the attribute ``num_experts``, which adapters of expert weights read."""
    assert plan.layout is not None
    counts = tuple(plan.layout.local_size(rank) for rank in range(plan.layout.axis_size))
    return TensorRule(None, attributes=(AttributePlan(path, "num_experts", plan.where, layer.num_experts, counts),))


def _scaling(path: str, layer: Any, plan: ModulePlan | None, match: RuleMatch) -> Iterator[TensorRule]:
    """Yield the rule of (IA)3's vector (Liu et al., 2022): one factor per input or output feature of the base layer."""
    if plan is None or (plan.rule == "" and not plan.layouts):
        yield _replicated(layer)
        return
    dim = 1 if layer.is_feedforward else 0  # [1, in] or [out, 1]
    of_column = plan.rule == "column" and not layer.is_feedforward and not plan.gather_output
    of_row = plan.rule == "row" and layer.is_feedforward and not plan.split_input
    layout = plan.layout
    if (of_column or of_row) and layout is not None and not layout.replicated:
        yield _cut(join(path, "ia3_l"), layer.ia3_l.items(), plan.where, Layout.of(dim, layout.blocks))
    elif of_column or of_row or plan.rule not in ("column", "row") or plan.inside or plan.enter_output:
        raise _cannot_follow(path, plan, match)
    else:
        yield _replicated(layer)


def _cut(path: str, named: Iterable[tuple[str, torch.Tensor]], where: str, layout: Layout) -> TensorRule:
    """Return the rule of a module whose parameters are all sharded by one layout."""
    tensors: list[tuple[str, torch.Tensor, Layout | None]] = [(name, tensor, layout) for name, tensor in named]
    return TensorRule(ModulePlan(path, "sharded", where, layout, {name: layout for name, *_ in tensors}), tensors)


def _summed(path: str, module: nn.Module, where: str, once: frozenset[str] = frozenset()) -> TensorRule:
    """Return the rule of a full module whose partial gradients are summed."""
    names = frozenset(name for name, _ in module.named_parameters())
    return _full(module, ModulePlan(path, "replicated", where, summed=names, once=once))


def _full(module: nn.Module, plan: ModulePlan | None = None) -> TensorRule:
    return TensorRule(plan, [(name, parameter, None) for name, parameter in module.named_parameters()])


def _cannot_follow(path: str, plan: ModulePlan, match: RuleMatch) -> ConfigError:
    units = ", ".join(match.rule.units)
    return ConfigError(
        f"adapters at {path} are not supported with the rule '{plan.rule or match.rule.kind}' of {units or 'all'} of "
        f"the base layer ({plan.where})\n"
        "  Remove this layer from target_modules, or train all of it with modules_to_save."
    )
