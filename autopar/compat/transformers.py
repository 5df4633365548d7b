"""Private names of transformers: models, caches and continuous batching."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

ATTENTION = "_attn_implementation"  # of a config: name of the attention function
ROUTER_LOSS = "load_balancing_loss_func"  # of a module of transformers: auxiliary loss of the routers
EXPERTS = "_experts_implementation"  # of a config: name of the function that multiplies the experts
RECOMPUTE = "_gradient_checkpointing_func"  # of a module: function that recomputes its forward
OWN_ADAPTERS = "_hf_peft_config_loaded"  # of a model: True if its add_adapter has inserted PEFT's layers
ACCELERATE_HOOK = "_hf_hook"  # of a module: hook of accelerate around its forward
SET_LOSS = "_loss_function"  # of a model: user-defined loss; absent for the default loss of the class
_CONVERSIONS = "_weight_conversions"  # of a loaded model: conversions of the tensors of the files
# Arguments and outputs that hold keys, values and states of earlier tokens; 5.24 introduced the first name.
CACHES = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past", "layer_state")
INITIALIZED = "_is_hf_initialized"  # of a module or tensor: True if it was loaded and must not be initialized


def from_config(kind: Any, config: Any, **options: Any) -> Any:
    """Make a model with random weights; attention and dtype are chosen as in ``from_pretrained``."""
    return kind._from_config(config, **options)


def initialize_weights(model: Any, module: nn.Module) -> None:
    """Initialize the weights of one module as its model does."""
    model._init_weights(module)


def unsaved_keys(model: Any) -> set[str]:
    """Return patterns of the names that ``save_pretrained`` omits."""
    return {str(key) for key in model._keys_to_ignore_on_save or ()}


@contextlib.contextmanager
def as_never_quantized(model: Any) -> Iterator[None]:
    """Let transformers save dequantized weights without quantizing them again."""
    kept = vars(model).get(_CONVERSIONS) or ()
    quantizes = any(getattr(step, "hf_quantizer", None) for one in kept for step in getattr(one, "operations", ()))
    if quantizes:
        del vars(model)[_CONVERSIONS]
    try:
        yield
    finally:
        if quantizes:
            vars(model)[_CONVERSIONS] = kept


def fp32_modules(model: Any, *, strict: bool) -> set[str]:
    """Return the names of modules that stay in fp32 in an fp16 model, or with ``strict`` in a bf16 model too.

    A model of another library (diffusers) has one list for both.
    """
    name = "_keep_in_fp32_modules_strict" if strict and isinstance(model, PreTrainedModel) else "_keep_in_fp32_modules"
    return set(getattr(model, name, None) or ())


def dtype_plan(model: Any, dtype: Any) -> dict[str, Any]:
    """Return the dtype in which each parameter is loaded, by name."""
    if not isinstance(model, PreTrainedModel):  # of another library
        return dict.fromkeys(getattr(model, "_keep_in_fp32_modules", None) or (), torch.float32)
    return cast("dict[str, Any]", model._get_dtype_plan(dtype))


def attention_of(config: Any) -> str | None:
    """Return the name of the attention function in a config, or None."""
    return getattr(config, ATTENTION, None)


def unsplit_modules(model: nn.Module) -> set[str]:
    """Return the class names of modules that stay on one device (blocks)."""
    return set(getattr(model, "_no_split_modules", None) or ())


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """Return the tensor-parallel plan of a model in transformers: pattern of names -> style."""
    return dict(getattr(model, "_tp_plan", None) or {})


def is_initialized(module: nn.Module) -> bool:
    """Return whether the weights of a module were loaded and must not be initialized."""
    return bool(getattr(module, INITIALIZED, False))


def router_loss_module(model: nn.Module) -> ModuleType | None:
    """Return the module of transformers with the auxiliary router loss of ``model``, or None."""
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return next((module for module in modules if getattr(module, ROUTER_LOSS, None) is not None), None)


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a forward, under any of its names, or None."""
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def caches_in(cache: Cache) -> Iterator[Cache]:
    """Yield the caches inside an encoder-decoder cache, or the cache itself."""
    if isinstance(cache, EncoderDecoderCache):
        yield from caches_in(cache.self_attention_cache)
        yield from caches_in(cache.cross_attention_cache)
    else:
        yield cache


def holds_tokens(cache: Cache) -> bool:
    """Return whether any layer of a cache holds states of tokens; counters of a ``reset`` layer are 0.

    A cache with counters on a GPU counts as filled, since reading them would wait for the GPU.
    """
    for layer in cache.layers:
        held = vars(layer)
        seen = held.get("cumulative_length", held.get("has_previous_state", True))
        if isinstance(seen, torch.Tensor) and not seen.is_cpu:
            seen = True
        if holds_states(held) and (any(seen.values()) if isinstance(seen, Mapping) else bool(seen)):
            return True
    return False


def holds_states(value: Any) -> bool:
    """Return whether a layer of a cache, or a value in it, holds states; counters are ignored."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 2 and value.numel() > 0
    inner = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list | tuple) and any(map(holds_states, inner))


def kept_manager(model: Any) -> Any:
    """Return the manager that a model keeps for a later session, or None."""
    return vars(model).get("_cached_continuous_batching_manager")


def free_part() -> float:
    """Return the available fraction of the host memory outside this process; transformers treats all of it as free."""
    with contextlib.suppress(ImportError):  # a plain installation lacks psutil, and transformers asks for it
        import psutil  # type: ignore[import-untyped]

        return min(1.0, (ram := psutil.virtual_memory()).available / (ram.total - psutil.Process().memory_info().rss))
    return 1.0


def recomputed_layers(model: nn.Module, every: int = 1) -> list[nn.Module]:
    """Return the blocks of a Hugging Face model to recompute: the first, and every ``every``-th after it."""
    found: list[nn.Module] = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    return found[::every]
