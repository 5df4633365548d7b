"""The two methods that a parallelized model gets: ``save_parallelized`` and ``from_parallelized``."""

from __future__ import annotations

import os
from types import MethodType
from typing import TYPE_CHECKING

from torch import nn

from autopar.checkpoint.load import load
from autopar.checkpoint.save import save
from autopar.checkpoint.state import STATE, State
from autopar.mesh import MPU
from autopar.policy.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attach", "detach", "from_parallelized", "save_parallelized"]


def save_parallelized(
    self: nn.Module,
    directory: str | os.PathLike[str],
    merge_checkpoints: bool = False,
    max_shard_size: int | str = "5GB",
    format: str = "safetensors",
    timeout: float = 20.0,
) -> None:
    """Save the model. Every rank calls it, with the same arguments.

    The folder appears whole or not at all: a save that is killed leaves the previous checkpoint as it was. A
    checkpoint in ``directory`` is replaced; other files there (a tokenizer) are kept.

    Args:
        directory: folder to make, on a file system that all nodes share.
        merge_checkpoints: write what ``save_pretrained`` of the plain model would write, instead of one shard a rank.
        max_shard_size: with ``merge_checkpoints``, split the weights into files of at most this size.
        format: with ``merge_checkpoints``, ``safetensors`` or ``bin``.
        timeout: seconds to wait for the other ranks to call.

    Raises:
        CheckpointError: the same on every rank, with everything as it was before, if an argument is wrong, a rank
            did not call, died or could not write, or the model is no longer the one that was parallelized.
    """
    save(self, directory, merge_checkpoints, max_shard_size, format, timeout)


def from_parallelized(self: nn.Module, directory: str | os.PathLike[str], timeout: float = 20.0) -> nn.Module:
    """Load what ``save_parallelized`` wrote, in place, and return the model. Every rank calls it.

    The tensor- and pipeline-parallel sizes must be those of the checkpoint; the data-parallel size may differ.
    Parameters keep their identity, device and dtype.

    Args:
        directory: folder of the checkpoint.
        timeout: seconds to wait for the other ranks to call.

    Raises:
        CheckpointError: the same on every rank, with the model as it was before, if the checkpoint is incomplete,
            damaged, mixed, of another mesh or of another model, or a rank did not call or died.
    """
    load(self, directory, timeout)
    return self


def attach(model: nn.Module, plan: Plan, mpu: MPU, hf_model: PreTrainedModel, hf_prefix: str = "") -> None:
    """Give ``model`` its methods ``save_parallelized`` and ``from_parallelized``.

    Args:
        model: the root model that was parallelized.
        plan, mpu: of the model.
        hf_model: the Hugging Face model in it, often ``model`` itself.
        hf_prefix: path of ``hf_model`` in ``model``, with or without the last dot; ``""`` if it is the root.

    Raises:
        ValueError: if ``hf_model`` is not there.
    """
    path = hf_prefix.rstrip(".")
    if model.get_submodule(path) is not hf_model:
        raise ValueError(f"{path!r} is not the path of the Hugging Face model")
    model.__dict__[STATE] = State(plan, mpu, path)
    # A bound method copies well: deepcopy binds it to the copy.
    for method in (save_parallelized, from_parallelized):
        model.__dict__[method.__name__] = MethodType(method, model)


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`."""
    for name in (STATE, save_parallelized.__name__, from_parallelized.__name__):
        model.__dict__.pop(name, None)
