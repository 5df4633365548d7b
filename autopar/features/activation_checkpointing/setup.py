"""Activation checkpointing: recompute blocks in the backward pass, except for results that a tape keeps.

[Note: why not torch's selective checkpointing] It keeps the return values of operators, but a collective writes into a
tensor and returns nothing. So the tape hooks into :func:`autopar.distributed.collectives.run`, which runs all
collectives of activations. torch also keeps results, not copies. A block that changes a result in place through another
tensor (``y += x`` after a linear layer) would silently get the changed value back. The tape keeps copies, of results of
operators too. Both runs of a block make the same calls in the same order; the recomputation may end earlier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from autopar.compat.tensors import no_dispatch_modes, schema_of, tree_map_only
from autopar.compat.transformers import RECOMPUTE, recomputed_layers
from autopar.distributed.collectives import running
from autopar.distributed.process import accelerator
from autopar.errors import ConfigError, ConsistencyError
from autopar.swap import swap, unswap
from autopar.tensor_tracking import TensorTracking


def plan(plans: Any, config: Any, stages: Any) -> None:
    """Check that the blocks of the model can be recomputed; return no plan."""
    blocks = () if isinstance(plans.inner, PreTrainedModel) else stages.elements
    check(plans.inner, blocks, plans.policy.where, config.checkpoint_every)


def recompute_blocks(model: nn.Module, state: Any, given: Any) -> None:
    """Set up recomputation; the step runs after sharding, since sharded blocks are recomputed."""
    config, inner = state.config, state.inner_of(model)
    how: Any = {"on_cpu": config.cpu_checkpointing, "save": config.checkpoint_saves, "every": config.checkpoint_every}
    apply(inner, state.blocks_of(model), **how)
    state.undo.append(lambda model, own: undo(own.inner_of(model)))


def check(model: nn.Module, blocks: Sequence[str], policy: object, every: int = 1) -> None:
    """Raise ConfigError if the blocks of a model cannot be recomputed.

    Args:
        blocks, policy: Paths of the blocks of a plain module, and place of the policy that names them, for messages.
    """
    name, known = type(model).__name__, any(hasattr(module, "gradient_checkpointing") for module in model.modules())
    if not isinstance(model, PreTrainedModel):
        if not blocks:
            raise ConfigError(
                f"activation_checkpointing requires 'blocks' in the policy of {name} ({policy})\n"
                "  Name the blocks there, or remove activation_checkpointing."
            )
    elif not model.supports_gradient_checkpointing or not known:
        raise ConfigError(f"activation_checkpointing is not supported with {name}\n  Remove it from the config.")
    elif every > 1 and not recomputed_layers(model):
        raise ConfigError(
            f"activation_checkpointing.every={every} is not supported with {name}: it recomputes all blocks or none\n"
            "  Remove 'every' from the config."
        )


def apply(
    model: nn.Module, blocks: Iterable[nn.Module], *, on_cpu: bool, save: Sequence[str] = (), every: int = 1
) -> None:
    """Recompute the activations of a model's blocks in the backward pass.

    Args:
        blocks: Blocks of a plain module; transformers finds the blocks of a Hugging Face model.
        on_cpu: True to keep the inputs of blocks in CPU memory.
        save: Kinds of results to keep instead of recomputing them, from :data:`autopar.config.sections.SAVED`.
        every: Recompute one block out of this many, starting with the first.
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
            setattr(module, RECOMPUTE, functools.partial(offloaded, function))


def undo(model: nn.Module) -> None:
    """Keep activations again: the inverse of :func:`apply`."""
    if isinstance(model, PreTrainedModel):
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    else:
        for module in model.modules():
            unswap(module, _Recomputed, RECOMPUTE)


class _Recomputed:
    """A block of a plain module that keeps only its inputs and is recomputed in the backward pass."""

    training: bool
    _gradient_checkpointing_func: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = super().__call__  # type: ignore[misc]
        if not (self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        return self._gradient_checkpointing_func(plain, *args, **kwargs)


_OPERATORS = {  # of torch.ops.aten; names that a version of torch lacks are ignored
    "attention": (
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_attention_math", "_scaled_dot_product_fused_attention_overrideable"),
    ),
    "matmuls": ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"),
}


@functools.cache
def saved_operators(save: tuple[str, ...]) -> frozenset[Any]:
    """Return the torch operators whose results are kept."""
    packets = [getattr(torch.ops.aten, name, None) for kind in save for name in _OPERATORS.get(kind, ())]
    every = [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]
    return frozenset(each for each in every if not schema_of(each).is_mutable)


def contexts(save: tuple[str, ...]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts for the forward and the recomputation of a block: torch's ``context_fn``."""
    tape = Tape(collectives="collectives" in save, operators=saved_operators(save))
    return tape.kept(), tape.played()


def offloaded(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a checkpoint function so that it keeps the inputs of blocks, and no other saved tensors, in CPU memory."""
    found = accelerator()
    if found is None:
        return plain(*args, **kwargs)
    with save_on_cpu(pin_memory=True, device_type=found.type):  # inside, the hooks of the checkpoint take over
        return plain(*args, **kwargs)


# -- kept results ---------------------------------------------------------------------------------------------------


class Tape:
    """Results of one block in one forward.

    Args:
        collectives: True to keep the results of collectives.
        operators: Torch operators whose results are kept.
    """

    def __init__(self, *, collectives: bool = True, operators: Collection[Any] = ()) -> None:
        self._collectives, self._operators = collectives, operators
        self._kept: list[tuple[str, Any]] = []  # name of a call, and its result
        self._next = -1  # index of the next result in a recomputation; -1 in the forward

    def kept(self) -> AbstractContextManager[None]:
        """Record the results of collectives and operators inside."""
        return _Run(self, -1)

    def played(self) -> AbstractContextManager[None]:
        """Replay the recorded results inside; can be entered again for each backward pass."""
        return _Run(self, 0)

    def note(self, name: str, result: Any) -> None:
        """Record the result of the call ``name``; do nothing in a recomputation."""
        if not self.is_playing:
            self._kept.append((name, _copied(result)))

    @property
    def results(self) -> list[Any]:
        """Recorded results, in the order of the forward."""
        return [result for _, result in self._kept]

    def plays(self, name: str, result: torch.Tensor) -> bool:
        """In a recomputation, write the recorded result into ``result`` and return True; raises as :meth:`next`."""
        if not self.is_playing:
            return False
        kept = self.next(name, result.shape)
        with no_dispatch_modes():
            result.copy_(kept)
        return True

    @property
    def is_playing(self) -> bool:
        """True in a recomputation."""
        return self._next >= 0

    def next(self, name: str, shape: torch.Size | None = None) -> Any:
        """Return the recorded result of the call ``name``.

        Raises:
            ConsistencyError: The recomputation makes other calls than the forward.
        """
        known, result = self._kept[self._next] if self._next < len(self._kept) else ("none", None)
        if result is None or known != name or (shape is not None and result.shape != shape):
            of = "" if shape is None else f" of {tuple(shape)}"
            was = f"{known} of {tuple(result.shape)}" if result is not None and shape is not None else known
            raise ConsistencyError(
                f"activation_checkpointing.save: result {self._next + 1} of a block is {name}{of} when recomputed, but "
                f"was {was} in the forward.\n  Make both runs of the block identical, or remove 'save' from the config."
            )
        self._next += 1
        return result


class _Run(AbstractContextManager[None]):
    """A run of the block: its forward, or a recomputation, which each backward pass enters again."""

    def __init__(self, tape: Tape, start: int) -> None:
        self._tape, self._start = tape, start
        self._mode: Any = KeptOperators(tape, tape._operators) if tape._operators else nullcontext()

    def __enter__(self) -> None:
        self._outer, self._tape._next = running.tape, self._start
        self._mode.__enter__()
        if self._tape._collectives:
            running.tape = self._tape

    def __exit__(self, *error: Any) -> None:
        running.tape = self._outer
        self._mode.__exit__(*error)


class KeptOperators(TensorTracking):
    """Record or replay the results of some operators on a tape. An operator that draws a mask runs both times."""

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, operators: Collection[Any]) -> None:
        super().__init__()
        self._tape, self._operators = tape, operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._operators or _drops(func, args, kwargs):
            return func(*args, **kwargs)
        if self._tape.is_playing:
            return _copied(self._tape.next(str(func)))
        result = func(*args, **kwargs)
        self._tape.note(str(func), result)
        return result


def _copied(value: Any) -> Any:
    with no_dispatch_modes():
        return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), value)


def _drops(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws a mask; if it were skipped, later operators would draw different masks."""
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return False
