"""Dropout of a model: its rates, switched off for comparisons and put back; its draws, by module and state."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from autopar.context_parallel.lazy_rows import LazyRows
from autopar.foreign.autograd import in_backward
from autopar.foreign.modules import Dropout
from autopar.foreign.tensors import safe_softmax, tree_leaves
from autopar.tensor_tracking import TensorTracking

__all__ = ["Draw", "DrawNotes", "DrawnStates", "Rate", "generator_state", "rates", "switch_off", "switched_on"]


_USUAL = ("p", "dropout", "attention_dropout")


_LAYERS = re.compile(r"layer_?drop")


class Rate(NamedTuple):
    """One place where a rate is kept: an attribute of a module or of a config.

    Attributes:
        place: path of the module, ``config`` for all configs.
        owner: the object itself.
    """

    place: str
    owner: Any
    name: str
    value: float

    def set(self, value: float) -> None:
        """Set it; some are declared as integers, which 0 is as well."""
        setattr(self.owner, self.name, type(self.value)(0) if value == 0 else float(value))


def rates(model: nn.Module) -> list[Rate]:
    """Find all rates of a model: ``p`` of dropouts, numbers called ``*drop*`` on modules and in their configs."""
    found: list[Rate] = []
    seen = set[int]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            called = "drop" in name or "jitter" in name or (name == "p" and isinstance(module, Dropout))
            if called and type(value) in (float, int):
                found.append(Rate(path, module, name, value))
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            found += _of_config(config, seen)
    return found


def _of_config(config: PretrainedConfig, seen: set[int]) -> Iterator[Rate]:
    if id(config) in seen:
        return
    seen.add(id(config))
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _of_config(value, seen)
        elif ("drop" in name or "jitter" in name) and type(value) in (float, int):
            yield Rate("config", config, name, value)


def switch_off(model: nn.Module) -> list[Rate]:
    """Set all rates to 0; returns them as they were."""
    found = rates(model)
    for rate in found:
        rate.set(0)
    return found


@contextmanager
def switched_on(models: Sequence[nn.Module], known: Sequence[Rate], default: float) -> Iterator[bool]:
    """Switch dropout on inside, with the rates that were ``known``; gives whether any is on.

    Whole layers are not dropped: which of them are, the plain model's generator and the parallel one's tell apart.

    Args:
        default: for all dropouts of the modules, where the model had none that was on.
    """
    values = {(rate.place, rate.name): rate.value for rate in known if rate.value and not _LAYERS.search(rate.name)}
    if all(place == "config" and "att" not in name for place, name in values):
        values = {}  # modules have copied theirs, and the others belong to no module
    found = [rate for model in models for rate in rates(model)]
    for rate in found:
        own = default if rate.place != "config" and rate.name in _USUAL else 0.0
        rate.set(values.get((rate.place, rate.name), 0.0) if values else own)
    try:
        yield bool(values) or any(rate.place != "config" and rate.name in _USUAL for rate in found)
    finally:
        for rate in found:
            rate.set(0)


_PRODUCTS = (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout_)


class Draw(NamedTuple):
    """One draw of dropout.

    Attributes:
        module: path of the module that drew; ``shape``: of what it dropped elements of.
        state: of the generator before.
        rate: probability of a zero; ``kept``: elements that are none; of alpha dropout neither is known.
        scaled: whether all that was kept is multiplied by 1 / (1 - rate).
    """

    module: str
    shape: tuple[int, ...]
    state: str
    rate: float = 0.0
    kept: int = 0
    scaled: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def generator_state(device: torch.device) -> str:
    """Return a digest of the state of the default generator of a device."""
    on_host = device.type in ("cpu", "meta")
    state = torch.get_rng_state() if on_host else torch.get_device_module(device).get_rng_state(device)
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


class DrawNotes(TorchFunctionMode):
    """Notes the draws of dropout, and of that of fused attention, which is done step by step.

    Args:
        stack: paths of the modules that run, of :func:`~autopar.tools.verification.recording.running`.

    Attributes:
        found: in the order of the draws.
    """

    def __init__(self, stack: Sequence[str]) -> None:
        super().__init__()
        self.stack, self.found = stack, list[Draw]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS or func is F.alpha_dropout:
            x = args[0] if args else kwargs["input"]
            if isinstance(x, LazyRows):
                with self:  # it calls dropout of its own rows
                    return type(x).__torch_function__(func, types, args, kwargs)
            named = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
            rate = float(named.get("p", 0.5))
            if named.get("training", named.get("train", True)) and rate > 0:
                return self._dropout(func, x, rate, inplace=bool(named.get("inplace")) or func is torch.dropout_)
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            named = dict(zip(names, args, strict=False)) | kwargs
            if named.get("dropout_p", 0.0) > 0:
                return self._attention(**named)
        return func(*args, **kwargs)

    def _dropout(self, func: Any, x: torch.Tensor, rate: float, *, inplace: bool) -> torch.Tensor:
        if func is F.alpha_dropout:
            self.found.append(Draw(self._module, tuple(x.shape), generator_state(x.device)))
            return func(x, rate, True, inplace)
        made = x * self._multiplied(x, rate, F.dropout if func is torch.dropout_ else func)
        return x.copy_(made) if inplace else made

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
        weights = safe_softmax(scores, -1)
        return (weights * self._multiplied(weights, dropout_p, F.dropout)) @ value

    def _multiplied(self, x: torch.Tensor, rate: float, dropout: Any) -> torch.Tensor:
        """Return what ``x`` is multiplied by: 0 or 1 / (1 - rate)."""
        state = generator_state(x.device)
        factor: torch.Tensor = dropout(torch.ones_like(x), rate, True)
        kept = factor[factor != 0].double()
        scaled = bool(torch.allclose(kept, torch.full_like(kept, 1 / (1 - rate)), rtol=1e-2))
        self.found.append(Draw(self._module, tuple(x.shape), state, rate, kept.numel(), scaled))
        return factor

    @property
    def _module(self) -> str:
        return self.stack[-1] if self.stack else ""


class DrawnStates(TensorTracking):
    """Notes every random draw of a forward and of its backward, which has some where blocks are recomputed.

    Attributes:
        first, again: operator, shape of its argument and state of the generator, in the forward and in the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: set[tuple[str, tuple[int, ...], str]] = set()
        self.again: list[tuple[str, tuple[int, ...], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
            if given is not None:
                draw = str(func), tuple(given.shape), generator_state(given.device)
                if not in_backward():
                    self.first.add(draw)
                else:
                    self.again.append(draw)
        return func(*args, **(kwargs or {}))
