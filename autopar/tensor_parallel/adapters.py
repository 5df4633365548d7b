"""Modules of PEFT in a tensor-parallel model that are not parallel layers: dropout in front of adapters, embeddings.

Dropout in front of an adapter zeroes elements of the base layer's input. Where that is replicated (a column-parallel
base layer, which has begun a region by then) all ranks must draw the same mask; where it is sharded (a row-parallel
one, which has ended the region by then) each rank must draw its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from autopar.adapters import is_peft_model, is_tuner
from autopar.distributed.collectives import all_reduce
from autopar.errors import ConfigError
from autopar.layout import Layout
from autopar.stored import stored_weights
from autopar.swap import bind, unbind
from autopar.tensor_parallel.layers import look_up
from autopar.tensor_parallel.region_modules import RegionModule

_OWNER = "tensor parallelism of adapters"


def attach(model: nn.Module) -> None:
    """Replace methods of PEFT that would be wrong on shards; :func:`autopar.swap.unbind` takes them away."""
    for module in model.modules():
        if is_peft_model(module):
            bind(module, _OWNER, add_adapter=_refused("add_adapter"), delete_adapter=_refused("delete_adapter"))
        if is_tuner(module):
            if hasattr(type(module), "_enable_peft_forward_hooks"):
                bind(module, _OWNER, _enable_peft_forward_hooks=_hooks_without_names)
            bind(module, _OWNER, **{name: _refused(name) for name in _OF_TREES if hasattr(type(module), name)})


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`."""
    unbind(model, _OWNER)


def _hooks_without_names(self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("adapter_names") is not None:
        raise ConfigError(
            "adapter_names, another adapter for each sample: PEFT goes through the adapters in an order of its own on "
            "each tensor-parallel rank.\n  Compute the samples of one adapter after the other, with "
            "model.set_adapter(name)."
        )
    return type(self)._enable_peft_forward_hooks(self, *args, **kwargs)


_OF_TREES = ("merge_and_unload", "unload", "delete_adapter", "add_weighted_adapter", "add_adapter")


def _refused(name: str) -> Callable[..., NoReturn]:
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
        if stored_weights(self):
            instead = (
                "With a quantized base\n  this is the only way: merge_checkpoints=True would leave its weights out."
            )
        raise ConfigError(
            f"{name}: the plan of this {type(self).__name__}, whose layers are sharded, names its adapters.\n"
            f"  autopar.deparallelize(model).{name}(...) works on the whole model. {instead}"
        )

    return method


class DropoutAlike(RegionModule):
    """Dropout of a replicated activation inside a region: the same mask on all tp ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.region.outside():
            return super().forward(*args, **kwargs)


class DropoutApart(RegionModule):
    """Dropout of a sharded activation behind a region: a mask of its own on each tp rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.region.draw_per_rank(self.training)  # type: ignore[attr-defined]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.region.leave()


class Magnitude(RegionModule):
    """PEFT's magnitudes of DoRA, of outputs of which this rank has all inputs.

    PEFT takes the weight and its norms as constants. A dry run would follow them, so there they are of no weight.
    """

    def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> torch.Tensor:
        """Return what an adapter adds to this rank's weight, ``[out, in]``."""
        a, b = lora_A.weight.detach(), lora_B.weight.detach()
        return b @ a if not a.is_meta else b.new_empty(b.shape[0], a.shape[1])

    def get_weight_norm(
        self, weight: torch.Tensor, lora_weight: torch.Tensor, scaling: float, adapter_name: str | None = None
    ) -> torch.Tensor:
        """Return the norm of each output's weights, ``[out]``."""
        if weight.is_meta:
            return lora_weight.new_empty(lora_weight.shape[0])
        weight = weight.detach().T if self.fan_in_fan_out else weight.detach()  # type: ignore[attr-defined]
        return self._norm(weight[:, : lora_weight.shape[1]] + scaling * lora_weight.detach())

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        norms: torch.Tensor = torch.linalg.vector_norm(weight, dim=1)
        return norms


class MagnitudeOfParts(Magnitude):
    """The same of outputs of which each rank has some inputs: squares are summed over tp."""

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        return all_reduce(weight.float().square().sum(1), self.tp).sqrt().to(weight.dtype)


class AdapterOfRows(RegionModule):
    """PEFT's LoRA on a vocabulary-parallel embedding: ``A`` [r, vocabulary/tp], ``B`` [hidden, r] replicated."""

    def _embed(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        layout = self.autopar.layout
        assert isinstance(layout, Layout)
        padding: int | None = self.get_base_layer().padding_idx  # type: ignore[attr-defined]
        return self.region.mark_replicated(look_up(input, weight, layout, self.tp, padding))  # [..., r]
