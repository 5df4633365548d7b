"""Methods of PEFT on a parallelized model: those that save and count are for the full model, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn

from autopar.checkpoint.methods import PART, counted, refused
from autopar.checkpoint.state import STATE, state_of
from autopar.checkpoint.state_dict import shard_of
from autopar.compat.peft import is_peft_model, is_tuner, uses_peft
from autopar.errors import ConfigError
from autopar.features.peft.saving import check_merged, save_alone, save_pretrained
from autopar.setup.steps import Given, Parallelized
from autopar.swap import bind, unbind

_OWNER = "adapters"
_PUSH = "Use model.save_pretrained(dir) on every rank, then huggingface_hub.upload_folder on rank 0."


def adapt_methods(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Let saves know adapters, and replace the methods of PEFT that would be wrong on shards."""
    if not uses_peft(model):
        return
    saver = save_alone if any(is_peft_model(module) for module in model.modules()) else None
    vars(model)[STATE] = replace(state_of(model), save_adapters=saver, before_merge=(check_merged,))
    if is_peft_model(model):
        push = refused("push_to_hub", f"{PART}  {_PUSH}")
        bind(model, _OWNER, save_pretrained=save_pretrained, push_to_hub=push)
        bind(model, _OWNER, get_nb_trainable_parameters=_nb_trainable)
    if state.plan.tp > 1:
        quantized = any(tensor.quantized for tensor in state.plan.tensors.values())
        for module in model.modules():
            _refuse_methods(module, quantized)
    state.undo.append(lambda model, own: unbind(model, _OWNER))


def _refuse_methods(module: nn.Module, quantized: bool) -> None:
    names: tuple[str, ...] = ("add_adapter", "delete_adapter") if is_peft_model(module) else ()
    if is_tuner(module):
        names = tuple(name for name in _OF_TREES if hasattr(type(module), name))
        if hasattr(type(module), "_enable_peft_forward_hooks"):
            bind(module, _OWNER, _enable_peft_forward_hooks=_hooks_without_names)
    if names:
        bind(module, _OWNER, **{name: _refused(name, quantized) for name in names})


def _hooks_without_names(self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("adapter_names") is not None:
        raise ConfigError(
            "adapter_names, another adapter for each sample: PEFT goes through the adapters in an order of its own on "
            "each tensor-parallel rank.\n  Compute the samples of one adapter after the other, with "
            "model.set_adapter(name)."
        )
    return type(self)._enable_peft_forward_hooks(self, *args, **kwargs)


_OF_TREES = ("merge_and_unload", "unload", "delete_adapter", "add_weighted_adapter", "add_adapter")


def _refused(name: str, quantized: bool) -> Callable[..., NoReturn]:
    def method(self: Any, *_: Any, **__: Any) -> NoReturn:
        if name == "add_adapter":
            raise ConfigError(
                f"add_adapter: PEFT makes adapters by the sizes of the layers, and those of this {type(self).__name__} "
                "are sharded.\n  Use autopar.integrations.add_adapter(model, name, config). After it, "
                "model.load_adapter(dir, name) reads an adapter's files."
            )
        instead = (
            "model.merge_adapter() merges in place, and then\n  model.save_parallelized(dir, merge_checkpoints=True) "
            "writes the merged model."
        )
        if quantized:
            instead = (
                "With a quantized base\n  this is the only way: merge_checkpoints=True would leave its weights out."
            )
        raise ConfigError(
            f"{name}: the plan of this {type(self).__name__}, whose layers are sharded, names its adapters.\n"
            f"  autopar.deparallelize(model).{name}(...) works on the whole model. {instead}"
        )

    return method


def _nb_trainable(self: Any) -> tuple[int, int]:
    """Count the trained and all parameters of the full model, as ``PeftModel`` prints them; no communication."""
    if shard_of(self) is None:
        return type(self).get_nb_trainable_parameters(self)
    return counted(self, True, False), counted(self, False, False)
