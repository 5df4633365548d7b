"""Refuse what diffusers adds to a model that does not work with shards or stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from autopar.errors import ConfigError
from autopar.features.diffusers.models import Models

_HOOKS = "_diffusers_hook"  # of a module: the registry of diffusers' hooks around its forward


class Checks:
    """The checks of a model of diffusers (:attr:`autopar.registry.Feature.additions`)."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def check(self, tp: int, pp: int) -> None:
        """Raise ConfigError for the first setting that is not supported on ``tp`` x ``pp`` ranks."""
        found = ((path, module) for path, module in self._root.named_modules() if Models.owns(module))
        for path, module in found if tp > 1 or pp > 1 else ():
            for what, instead in unsupported(module):
                size = f"pipeline_parallel_size={pp}" if pp > 1 else f"tensor_parallel_size={tp}"
                place = f"{type(module).__name__}{f' at {path}' if path else ''}"
                raise ConfigError(f"{size} is not supported with {what} of {place}.\n  {instead}")

    def rules(self, matches: Sequence[Any], modules: Mapping[str, Any], tp: int) -> Iterator[Any]:
        """Yield no rules: the policy describes all modules."""
        yield from ()


def unsupported(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings of a model that are not supported, each with a way out."""
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        advice = "Call from_pretrained without it; initialize moves shards to each rank's GPU."
        yield f"the device_map ({', '.join(devices)})", advice
    if getattr(model, "_parallel_config", None) is not None:
        yield "enable_parallelism", "Leave it out: it is diffusers' own parallelism of the same layers."
    for path, module in model.named_modules():
        for name in getattr(getattr(module, _HOOKS, None), "hooks", ()):
            ways = "enable_group_offload, enable_layerwise_casting and enable_cache"
            yield f"the hook '{name}' at {path or 'the root'}", f"Call initialize without {ways}."
        if getattr(module, "_compiled_call_impl", None) is not None:
            yield (
                f"the compiled {path or 'forward'}",
                ("Leave out compile_repeated_blocks; 'compile: {enable: true}' in the configuration compiles blocks."),
            )
