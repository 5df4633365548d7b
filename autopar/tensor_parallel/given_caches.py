"""Shard the cache that the user gives (prefix tuning, keys and values of another model) by attention heads.

A cache that the parallelized model filled itself holds this rank's KV heads only, and is left alone: an attribute marks
it. In any other cache, keys and values of all heads are sharded as the attention layer's heads are, inside the graph:
the gradient of each rank's heads is gathered, and that of heads which several ranks hold is summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import Cache

from autopar.distributed.collectives import scatter
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.foreign.transformers import caches_in, holds_states, holds_tokens
from autopar.layout import Block, Layout
from autopar.tensor_parallel.compiled_forward import no_graph_of_its_own

_SHARDED = "_autopar_local"
_NOT_CACHED = ("key_heads", "value_heads", "state_heads")  # of linear attention

Layouts = Mapping[int, tuple[Layout, ...]]
"""Number of a layer -> layouts of the heads of its attentions; one element is one head."""


def cache_layouts(model: nn.Module) -> Layouts:
    """Return the layouts of heads in the attentions of ``model``, which is sharded already; KV heads first."""
    found: dict[int, dict[Any, Layout]] = {}
    for module in model.modules():
        number = vars(module).get("layer_idx")
        if not isinstance(number, int):
            continue
        layouts = [one for inside in module.modules() for one in vars(inside).get("autopar_layouts", {}).values()]
        blocks = [block for one in layouts for block in one.blocks if _is_head(block.unit)]
        for block in sorted(blocks, key=lambda block: "kv" not in block.unit):
            heads = Layout.of(1, [Block(block.unit, block.count, 1, block.ranges)])
            found.setdefault(number, {}).setdefault((block.count, block.ranges), heads)
    return {number: tuple(layouts.values()) for number, layouts in found.items()}


def _is_head(unit: str) -> bool:
    return "heads" in unit and unit not in _NOT_CACHED


class ShardCaches:
    """Forward pre-hook of a Hugging Face model that shards the caches it is given."""

    def __init__(self, mpu: MPU, layouts: Layouts) -> None:
        self.mpu, self.layouts = mpu, layouts

    @no_graph_of_its_own
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                for cache in caches_in(value):
                    if not vars(cache).get(_SHARDED):
                        self._shard(model, cache)
                        setattr(cache, _SHARDED, True)

    def _shard(self, model: nn.Module, cache: Cache) -> None:
        filled = [(number, layer) for number, layer in enumerate(cache.layers) if holds_states(vars(layer))]
        if not filled:
            return
        if self.mpu.pp.size > 1:
            raise ConfigError(
                f"the given cache: this {type(model).__name__} is split into {self.mpu.pp.size} pipeline stages, which "
                "go on only from a cache that they filled themselves.\n"
                "  Give the tokens instead of their keys and values, or use pipeline_parallel_size=1."
            )
        sharded: list[tuple[Any, str, Layout]] = [
            (layer, name, layout) for number, layer in filled for name, layout in self._layouts(model, number, layer)
        ]
        for layer, name, layout in sharded:  # all checks are done
            setattr(layer, name, scatter(getattr(layer, name), self.mpu.tp, layout, dim=1))
            if "num_heads" in vars(layer):
                layer.num_heads = layout.local_size(self.mpu.tp.rank)

    def _layouts(self, model: nn.Module, number: int, layer: Any) -> list[tuple[str, Layout]]:
        """The layer's tensors that have all heads, and their layouts."""
        layouts, rank = self.layouts.get(number, ()), self.mpu.tp.rank
        other = [name for name, value in vars(layer).items() if name not in ("keys", "values") and holds_states(value)]
        place = f"the given cache: layer {number} ({type(layer).__name__})"
        if other:
            raise ConfigError(
                f"{place} comes with {', '.join(other)}, which autopar cannot shard.\n"
                f"  {type(model).__name__} goes on from a cache that it filled itself, or from keys and values."
            )
        if not layouts:
            return []  # replicated attention
        found = []
        for name in ("keys", "values"):
            heads = getattr(layer, name).shape[1]
            full = [layout for layout in layouts if heads == layout.size]
            if full:
                found.append((name, full[0]))
            elif not any(heads == layout.local_size(rank) for layout in layouts):
                due = " or ".join(f"{layout.size} ({layout.local_size(rank)} on this rank)" for layout in layouts)
                raise ConfigError(
                    f"{place} has {name} of {heads} heads; this layer of {type(model).__name__} has {due}.\n"
                    "  Give keys and values of all heads: [batch, heads, length, head width]."
                )
        return found


def goes_on(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a forward is given a cache that the parallelized model has filled, and that was not reset."""
    caches = [list(caches_in(value)) for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    return any(
        all(vars(cache).get(_SHARDED) for cache in leaves) and any(map(holds_tokens, leaves)) for leaves in caches
    )


class MarkCaches:
    """Forward hook of a Hugging Face model that marks the caches it returns as sharded."""

    @no_graph_of_its_own
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        values: Any = output if isinstance(output, tuple) else ()
        if isinstance(output, Mapping):  # also where the last pipeline stage lacks some of them
            values = dict.values(output) if isinstance(output, dict) else output.values()
        for value in values:
            if isinstance(value, Cache):
                for cache in caches_in(value):
                    setattr(cache, _SHARDED, True)
