"""``past_key_values`` that the user gives (prefix tuning, a cache of another model): this rank's heads of them.

A cache that the parallelized model filled itself holds this rank's KV heads only, and is left alone: it is known by an
attribute. Of any other one, keys and values of all heads are cut as the attention layer's heads are, inside the graph:
the gradient of each rank's heads is gathered, that of heads which several ranks hold is summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache

from autopar.distributed.collectives import scatter
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.layout import Block, Layout

__all__ = ["CutCaches", "KnowCaches", "cache_layouts"]

_OURS = "_autopar_local"
_NOT_KEPT = ("key_heads", "value_heads", "state_heads")  # of linear attention

Layouts = Mapping[int, tuple[Layout, ...]]
"""Number of a layer -> how the heads of its attentions lie; one element is one head."""


def cache_layouts(model: nn.Module) -> Layouts:
    """How heads lie in the attentions of ``model``, which is sharded already; KV heads first."""
    found: dict[int, dict[Any, Layout]] = {}
    for module in model.modules():
        number = vars(module).get("layer_idx")
        if not isinstance(number, int):
            continue
        layouts = [one for inside in module.modules() for one in vars(inside).get("autopar_layouts", {}).values()]
        blocks = [block for one in layouts for block in one.blocks if _is_head(block.unit)]
        for block in sorted(blocks, key=lambda block: "kv" not in block.unit):
            heads = Layout.of(1, [Block(block.unit, block.count, 1, block.shares)])
            found.setdefault(number, {}).setdefault((block.count, block.shares), heads)
    return {number: tuple(layouts.values()) for number, layouts in found.items()}


def _is_head(unit: str) -> bool:
    return "heads" in unit and unit not in _NOT_KEPT


class CutCaches:
    """Forward pre-hook of a Hugging Face model."""

    def __init__(self, mpu: MPU, layouts: Layouts) -> None:
        self.mpu, self.layouts = mpu, layouts

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                for cache in _leaves(value):
                    if not vars(cache).get(_OURS):
                        self._take(model, cache)
                        setattr(cache, _OURS, True)

    def _take(self, model: nn.Module, cache: Cache) -> None:
        filled = [(number, layer) for number, layer in enumerate(cache.layers) if _filled(vars(layer))]
        if not filled:
            return
        if self.mpu.pp.size > 1:
            raise ConfigError(
                f"past_key_values: this {type(model).__name__} is cut into {self.mpu.pp.size} pipeline stages, which "
                "go on only from a cache that they filled themselves.\n"
                "  Give the tokens instead of their keys and values, or use pipeline_parallel_size=1."
            )
        cuts: list[tuple[Any, str, Layout]] = [
            (layer, name, layout) for number, layer in filled for name, layout in self._cuts(model, number, layer)
        ]
        for layer, name, layout in cuts:  # all checks are done
            setattr(layer, name, scatter(getattr(layer, name), self.mpu.tp, layout, dim=1))
            if "num_heads" in vars(layer):
                layer.num_heads = layout.local_size(self.mpu.tp.rank)

    def _cuts(self, model: nn.Module, number: int, layer: Any) -> list[tuple[str, Layout]]:
        """Which of the layer's tensors are of all heads, and how they are cut."""
        layouts, rank = self.layouts.get(number, ()), self.mpu.tp.rank
        other = [name for name, value in vars(layer).items() if name not in ("keys", "values") and _filled(value)]
        place = f"past_key_values: layer {number} ({type(layer).__name__})"
        if other:
            raise ConfigError(
                f"{place} comes with {', '.join(other)}, which autopar cannot cut into this rank's part.\n"
                f"  {type(model).__name__} goes on from a cache that it filled itself, or from keys and values."
            )
        if not layouts:
            return []  # attention that every rank computes whole
        cuts = []
        for name in ("keys", "values"):
            heads = getattr(layer, name).shape[1]
            whole = [layout for layout in layouts if heads == layout.size]
            if whole:
                cuts.append((name, whole[0]))
            elif not any(heads == layout.local_size(rank) for layout in layouts):
                due = " or ".join(f"{layout.size} ({layout.local_size(rank)} on this rank)" for layout in layouts)
                raise ConfigError(
                    f"{place} has {name} of {heads} heads; this layer of {type(model).__name__} has {due}.\n"
                    "  Give keys and values of all heads: [batch, heads, length, head width]."
                )
        return cuts


class KnowCaches:
    """Forward hook of a Hugging Face model: caches that it returns are its own."""

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
        for value in values:
            if isinstance(value, Cache):
                for cache in _leaves(value):
                    setattr(cache, _OURS, True)


def _leaves(cache: Cache) -> Iterator[Cache]:
    if isinstance(cache, EncoderDecoderCache):
        yield from _leaves(cache.self_attention_cache)
        yield from _leaves(cache.cross_attention_cache)
    else:
        yield cache


def _filled(value: Any) -> bool:
    """Whether a layer of a cache, or something in it, holds states; counters do not count."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 2 and value.numel() > 0
    if isinstance(value, Mapping):
        return any(map(_filled, value.values()))
    return isinstance(value, list | tuple) and any(map(_filled, value))
