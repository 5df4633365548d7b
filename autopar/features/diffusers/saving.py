"""Save the adapters of a transformer in the files of diffusers, and replace methods that would be wrong on shards."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.api import deparallelize, initialize
from autopar.checkpoint.arguments import absolute
from autopar.checkpoint.hf_weights import FullWeights
from autopar.checkpoint.methods import PART, refused
from autopar.checkpoint.save import Snapshot, prepare_alike, snapshot
from autopar.checkpoint.staging import fsync
from autopar.checkpoint.state import STATE, local_tensors, state_of
from autopar.checkpoint.state_dict import shard_of
from autopar.compat.patches import patch_member, patches, when_imported
from autopar.compat.peft import plain_name, uses_peft
from autopar.distributed.agree import rank_zero
from autopar.distributed.failures import waiting
from autopar.errors import ConfigError
from autopar.features.diffusers.models import Models
from autopar.setup.steps import Given, Parallelized
from autopar.swap import bind, unbind

_OWNER = "diffusers"
_LOADERS = "diffusers.loaders.lora_pipeline"
_PREFIX = "transformer"  # of the names in files of pipelines
_USE_INSTEAD = (
    "  Use model.save_parallelized(dir, adapter_only=True), on every rank, for a file that the pipeline's "
    "load_lora_weights reads."
)
_CACHE = "  Leave it out: caches of diffusers compare all blocks of a model. Or use tensor_parallel_size."
_TREE = ("load_lora_adapter", "add_adapter", "unload_lora", "delete_adapters")


def adapt_methods(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Let saves handle adapters of diffusers, and replace methods that would change or write shards."""
    inner: Any = state.inner_of(model)
    if not Models.owns(inner):
        return
    kept = state_of(model)
    if kept.save_adapters is None and uses_peft(model):
        vars(model)[STATE] = replace(kept, save_adapters=save_adapters)
    if model is inner and hasattr(inner, "save_lora_adapter"):
        if shard_of(model) is not None:
            when_imported(_LOADERS, _patch_flux)
        methods = {name: _on_full_model(name) for name in _TREE}
        if state.mpu.pp.size > 1 and hasattr(inner, "enable_cache"):
            methods["enable_cache"] = refused("enable_cache", PART + _CACHE)
        bind(model, _OWNER, **methods, save_lora_adapter=refused("save_lora_adapter", PART + _USE_INSTEAD))
        state.undo.append(lambda model, own: unbind(model, _OWNER))


def save_adapters(
    model: nn.Module, directory: Callable[[], object], timeout: float, options: Mapping[str, Any]
) -> None:
    """Write ``pytorch_lora_weights.safetensors`` as a pipeline's ``save_lora_weights`` does. Every rank calls it.

    The adapter ``default`` is written into the folder, and another one into a sub-folder with its name.

    Raises:
        CheckpointError: Another argument is given, a replicated weight differs between ranks, or a rank timed out or
            could not write. Identical on all ranks.
    """
    state = state_of(model)

    def prepare() -> tuple[dict[str, Any], Path, Snapshot]:
        target = absolute(directory())
        return {"adapter_only": True, "directory": target}, Path(target), snapshot(model)

    target, _ = prepare_alike(model, timeout, prepare)
    weights = FullWeights(state, local_tensors(model, fsdp=True))
    names = [name for name in state.plan.tensors if plain_name(model, name) is None]
    with waiting(state.mpu, "gathering the adapters", range(state.mpu.world_size)):
        full = {}
        for name in names:
            tensor = weights.gather(name)
            if state.mpu.is_master:
                full[name.removeprefix(state.hf_prefix)] = tensor.cpu()
    inner = model.get_submodule(state.hf_path)
    rank_zero(state.mpu, lambda: _write(inner, full, target), lambda: f"The adapters in {target} are unchanged.")


def _write(inner: Any, full: dict[str, torch.Tensor], target: Path) -> None:
    """Let diffusers write a file of each adapter into a hidden folder, and move the files into place."""
    from diffusers.loaders.lora_base import LoraBaseMixin
    from peft import get_peft_model_state_dict

    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adapters.tmp-", dir=target, ignore_cleanup_errors=True) as temp:
        for adapter, config in inner.peft_config.items():
            chosen = get_peft_model_state_dict(
                inner, state_dict=dict(full), adapter_name=adapter, save_embedding_layers=False
            )
            layers = LoraBaseMixin.pack_weights({name: tensor.contiguous() for name, tensor in chosen.items()}, _PREFIX)
            settings = LoraBaseMixin.pack_weights(config.to_dict(), _PREFIX)
            LoraBaseMixin.write_lora_layers(layers, temp, True, None, None, True, settings)
            (file,) = Path(temp).iterdir()
            place = target if adapter == "default" else target / adapter
            place.mkdir(exist_ok=True)
            fsync(file)
            os.replace(file, place / file.name)
            fsync(place)


def _on_full_model(name: str) -> Callable[..., Any]:
    """Make a method that calls the class's method on the full model."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _call_on_full(self, name, lambda: getattr(type(self), name)(self, *args, **kwargs))

    return method


def _call_on_full(model: Any, name: str, call: Callable[[], Any]) -> Any:
    """Restore the full model, call ``call``, and parallelize the model again. ``name``: the user's call."""
    state: Parallelized | None = vars(model).get("_autopar") if isinstance(model, nn.Module) else None
    if state is None or shard_of(model) is None:
        return call()
    held = "an optimizer" if state.dp.step is not None else f"zero.stage {state.config.zero_stage}"
    if state.config.fully_sharded or state.dp.step is not None:
        raise ConfigError(
            f"{name} is not supported on a {type(model).__name__} that was parallelized with {held}\n"
            "  Call it before autopar.initialize."
        )
    deparallelize(model)
    try:
        return call()
    finally:
        initialize(model, state.config, policy=state.own_policy)


def _patch_flux() -> None:
    """Let Flux pipelines load adapters into the full transformer, with whose weights they first compare them."""
    if all(each.name != f"{_LOADERS}.FluxLoraLoaderMixin.load_lora_weights" for each in patches()):
        patch_member(sys.modules[_LOADERS].FluxLoraLoaderMixin, "load_lora_weights", _load_lora_weights)


def _load_lora_weights(plain: Callable[..., Any], pipeline: Any, *args: Any, **kwargs: Any) -> Any:
    model = getattr(pipeline, pipeline.transformer_name, None)
    return _call_on_full(model, "load_lora_weights", lambda: plain(pipeline, *args, **kwargs))
