"""Add PEFT's adapters to a model that is already parallelized.

PEFT creates an adapter with the sizes of its layer, which would be those of a shard, and draws its initial values. So
the model is restored to full weights, gets its adapters with the random numbers of a single process, and is
parallelized again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autopar.api import Parallelized, deparallelize, initialize
from autopar.compat.peft import is_peft_model, is_tuner
from autopar.errors import AutoparError, ConfigError


def get_peft_model(model: Any, peft_config: Any, adapter_name: str = "default", **options: Any) -> Any:
    """Put adapters into a parallelized model, like ``peft.get_peft_model``; every rank must call it.

    Every rank holds the full model during the call. Parameters keep their identity, but ``model.mpu`` is a new object,
    so create the optimizer afterwards. A model that is not parallelized gets its adapters too.

    Args:
        model: Model from ``initialize``, without adapters.
        peft_config: ``LoraConfig`` or another config of PEFT.
        options: Further arguments of ``peft.get_peft_model``.

    Returns:
        The ``PeftModel``, parallelized with the config and policy of ``model``.

    Raises:
        ConfigError: The model was initialized with an optimizer or ``zero.stage`` 2 or 3 (nothing is changed), or the
            adapters cannot be sharded (the model stays parallelized).
    """
    import peft

    state = _state_of(model, "get_peft_model")
    if state is None:
        return peft.get_peft_model(model, peft_config, adapter_name, **options)
    trained = {id(parameter) for parameter in deparallelize(model).parameters() if parameter.requires_grad}

    def undo(adapted: Any) -> Any:
        if is_tuner(adapted.base_model):
            adapted.base_model.unload()
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        return model

    return _again(state, model, lambda: peft.get_peft_model(model, peft_config, adapter_name, **options), undo)


def add_adapter(model: Any, adapter_name: str, peft_config: Any, **options: Any) -> None:
    """Add an adapter to a parallelized ``PeftModel``; every rank must call it. See :func:`get_peft_model`.

    ``model.load_adapter(dir, adapter_name)`` then reads an adapter from files.

    Raises:
        ConfigError: ``model`` is not a ``PeftModel``, or as in :func:`get_peft_model`.
    """
    if not is_peft_model(model):
        raise ConfigError(
            f"add_adapter expected a PeftModel, got {type(model).__name__}\n  Call get_peft_model(model, config) first."
        )
    if adapter_name in model.peft_config:
        raise ConfigError(f"add_adapter: the adapter '{adapter_name}' already exists")
    state = _state_of(model, "add_adapter")
    if state is None:
        model.add_adapter(adapter_name, peft_config, **options)
        return

    def change() -> Any:
        model.add_adapter(adapter_name, peft_config, **options)
        return model

    def undo(adapted: Any) -> Any:
        adapted.delete_adapter(adapter_name)
        return adapted

    deparallelize(model)
    _again(state, model, change, undo)


def _state_of(model: nn.Module, name: str) -> Parallelized | None:
    """Return the state of a parallelized model, or None; raise ConfigError if it cannot be parallelized again."""
    state: Parallelized | None = vars(model).get("_autopar")
    if state is None:
        return None
    stage = f"zero.stage {state.config.zero_stage}"
    held = stage if state.config.fully_sharded else "an optimizer" if state.dp.step is not None else None
    if held is not None:
        raise ConfigError(
            f"{name} is not supported on a model that was initialized with {held}\n"
            "  Add adapters first: model = autopar.initialize(peft.get_peft_model(plain_model, lora_config), config)."
        )
    return state


def _again(state: Parallelized, model: Any, change: Callable[[], Any], undo: Callable[[Any], Any]) -> Any:
    """Change a full model and parallelize it again; without the change if the changed model is not supported."""
    changed = None
    try:
        changed = change()
        return initialize(changed, state.config, policy=state.own_policy)
    except Exception as error:
        if changed is not None and not isinstance(error, AutoparError):
            raise  # maybe on this rank only, so no collective may follow
        initialize(model if changed is None else undo(changed), state.config, policy=state.own_policy)
        raise
