"""Compile the blocks of a model one by one, with ``torch.compile``: equal blocks share their graphs.

torchtitan and NeMo AutoModel compile so too: what lies between the blocks (masks, the loss, logits that stay sharded)
runs as it is, compiling takes as long as one block does, and a block's graph has its collectives inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import ConfigError, nearest


def check(model: nn.Module, blocks: Sequence[str], policy: object, backend: str) -> None:
    """Check that blocks can be compiled.

    Args:
        blocks: paths of the model's blocks.
        policy: where they are described.

    Raises:
        ConfigError: there are none, or torch has no such backend here.
    """
    if not blocks:
        raise ConfigError(
            f"compile compiles the blocks of a model, and the policy of {type(model).__name__} names no 'blocks' "
            f"({policy}).\n  Leave it out, and use torch.compile(model) after autopar.initialize."
        )
    known = torch.compiler.list_backends(exclude_tags=())  # takes a second
    if backend not in known:
        usual = ", ".join(torch.compiler.list_backends())
        raise ConfigError(f"compile.backend: torch has no '{backend}'.{nearest(backend, known)} Usual ones: {usual}")


def apply(blocks: Iterable[nn.Module], backend: str, mode: str, *, fullgraph: bool) -> None:
    """Compile each block when it is first called."""
    how: dict[str, Any] = {"mode": mode} if mode != "default" else {}
    for block in blocks:
        block.compile(backend=backend, fullgraph=fullgraph, **how)


def undo(blocks: Iterable[nn.Module]) -> None:
    """Run the blocks as they are again."""
    for block in blocks:
        vars(block).pop("_compiled_call_impl", None)
