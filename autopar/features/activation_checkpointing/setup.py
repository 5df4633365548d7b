"""Activation checkpointing: of a plain module's blocks, of what is not saved, and with inputs in the CPU's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from autopar.compat.tensors import schema_of
from autopar.compat.transformers import RECOMPUTE, recomputed_layers
from autopar.distributed.process import accelerator
from autopar.errors import ConfigError
from autopar.features.activation_checkpointing.tape import Tape
from autopar.swap import swap, unswap


def plan(plans: Any, config: Any, stages: Any) -> None:
    """Check that the blocks of the model can be recomputed; nothing is planned."""
    blocks = () if isinstance(plans.inner, PreTrainedModel) else stages.elements
    check(plans.inner, blocks, plans.policy.where, config.checkpoint_every)


def recompute_blocks(model: nn.Module, state: Any, given: Any) -> None:
    """After sharding, around it: blocks as they are now are run again."""
    config, inner = state.config, state.inner_of(model)
    how: Any = {"on_cpu": config.cpu_checkpointing, "save": config.checkpoint_saves, "every": config.checkpoint_every}
    apply(inner, state.blocks_of(model), **how)
    state.undo.append(lambda model, own: undo(own.inner_of(model)))


def check(model: nn.Module, blocks: Sequence[str], policy: object, every: int = 1) -> None:
    """Raise ConfigError if the activations of a model's blocks cannot be recomputed.

    Args:
        blocks: The paths of a plain module's blocks, which ``policy`` describes.
    """
    known = any(hasattr(module, "gradient_checkpointing") for module in model.modules())
    if not getattr(model, "supports_gradient_checkpointing", True) or (
        isinstance(model, PreTrainedModel) and not known
    ):
        raise ConfigError(f"activation_checkpointing: {type(model).__name__} does not support it; leave it out.")
    if every > 1 and isinstance(model, PreTrainedModel) and not recomputed_layers(model):
        raise ConfigError(
            f"activation_checkpointing.every={every}: {type(model).__name__} recomputes its blocks all or none. Leave "
            "it out."
        )
    if not isinstance(model, PreTrainedModel) and not blocks:
        raise ConfigError(
            f"activation_checkpointing recomputes the blocks of a model, and the policy of {type(model).__name__} "
            f"names no 'blocks' ({policy}); leave it out."
        )


def apply(
    model: nn.Module, blocks: Iterable[nn.Module], *, on_cpu: bool, save: Sequence[str] = (), every: int = 1
) -> None:
    """Recompute the activations of a model's blocks in the backward pass.

    Args:
        blocks: The blocks of a plain module; transformers knows those of a Hugging Face model.
        on_cpu: Whether the inputs of the blocks are kept in the CPU's memory.
        save: Results to keep, which are not computed again: names of :data:`autopar.config.sections.SAVED`.
        every: A block out of this many is recomputed, beginning with the first.
    """
    how: dict[str, Any] = {"use_reentrant": False}
    if save:
        how["context_fn"] = functools.partial(contexts, tuple(save))
    if isinstance(model, PreTrainedModel):
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(how)  # its older name
        chosen = set(recomputed_layers(model, every))
        for layer in recomputed_layers(model):
            layer.gradient_checkpointing = layer in chosen  # type: ignore[assignment]
    else:
        for block in [*blocks][::every]:
            swap(block, _Recomputed, **{RECOMPUTE: functools.partial(checkpoint, **how)})
    for module in model.modules() if on_cpu else ():
        function = vars(module).get(RECOMPUTE)
        if function is not None:
            setattr(module, RECOMPUTE, Offloaded(function))


def undo(model: nn.Module) -> None:
    """Keep activations again: the inverse of :func:`apply`."""
    if isinstance(model, PreTrainedModel):
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    else:
        for module in model.modules():
            unswap(module, _Recomputed, RECOMPUTE)


class _Recomputed:
    """A block of a plain module that keeps its inputs alone and runs again in the backward pass."""

    training: bool
    _gradient_checkpointing_func: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = super().__call__  # type: ignore[misc]
        if not (self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        return self._gradient_checkpointing_func(plain, *args, **kwargs)


_OPERATORS = {  # of torch.ops.aten; those that a version of torch lacks are left out
    "attention": (
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_attention_math", "_scaled_dot_product_fused_attention_overrideable"),
    ),
    "matmuls": ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"),
}


@functools.cache
def saved_operators(save: tuple[str, ...]) -> frozenset[Any]:
    """Return the operators of torch whose results are kept."""
    packets = [getattr(torch.ops.aten, name, None) for kind in save for name in _OPERATORS.get(kind, ())]
    every = [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]
    return frozenset(each for each in every if not schema_of(each).is_mutable)


def contexts(save: tuple[str, ...]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what a block runs in, in its forward and when it is recomputed: torch's ``context_fn``."""
    tape = Tape(collectives="collectives" in save, operators=saved_operators(save))
    return _Again(tape.kept), _Again(tape.played)


class _Again(AbstractContextManager[None]):
    """A context that is made anew each time that it is entered: a second backward recomputes again."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._entered = make, ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._make())

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class Offloaded:
    """A checkpoint function that keeps the inputs of blocks in the CPU's memory, and nothing else that is saved."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = accelerator()
        if found is None:
            return self.plain(*args, **kwargs)
        with save_on_cpu(pin_memory=True, device_type=found.type):  # inside, the recomputation's own hooks take over
            return self.plain(*args, **kwargs)
