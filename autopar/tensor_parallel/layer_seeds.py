"""Seeds of layers: those that a layer takes for each forward, to draw the same again in a backward of its own.

Reversible layers compute their activations twice, and seed the generators before. A seed that each process takes from
its operating system would let the ranks of a tensor-parallel group drop other elements of the same activation, and hash
it into other buckets. Here it is drawn from the default generator, which is the same on all of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autopar.swap import bind, unbind

__all__ = ["attach", "detach"]

_OWNER = "the seeds of layers"
_METHOD = re.compile(r"_init_(\w*seed)")


def attach(model: nn.Module) -> None:
    """Let layers draw their seeds from torch's CPU generator."""
    for module in model.modules():
        for name, attribute in _seeds_of(module):
            bind(module, _OWNER, **{name: _drawn(attribute)})


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`."""
    unbind(model, _OWNER)


def _seeds_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Methods ``_init_..._seed`` that renew the attribute ``..._seed`` of a module, which it has."""
    kind: type = type(module)
    return ((name, attribute) for name, attribute in _renewals(kind) if attribute in vars(module))


@functools.cache
def _renewals(kind: type) -> tuple[tuple[str, str], ...]:
    found = [(name, match) for name in dir(kind) if (match := _METHOD.fullmatch(name)) is not None]
    return tuple((name, str(match[1])) for name, match in found if callable(getattr(kind, name)))


def _drawn(attribute: str) -> Callable[[Any], None]:
    def renew(self: Any) -> None:
        seed = int(torch.randint(2**62, (), device="cpu").item())
        setattr(self, attribute, seed)
        torch.manual_seed(seed)

    return renew
