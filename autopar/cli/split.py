"""Split a Hugging Face checkpoint into the shards of a mesh: one process, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from autopar.checkpoint.format import Manifest, versions
from autopar.checkpoint.offline import check_sizes, stages_by_size, write_manifest, write_part
from autopar.checkpoint.staging import output_folder, parse_dtype
from autopar.compat.tensors import own_buffers, unsaved_buffers
from autopar.deferred_init.context import lazy_init
from autopar.deferred_init.files import explained, sources_of
from autopar.distributed.axis import MeshSizes
from autopar.errors import AutoparError, CheckpointError, ConfigError, listed, nearest
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan
from autopar.policy.match import find_policy, given_policy
from autopar.policy.schema import Policy
from autopar.storage.files import small_file
from autopar.storage.lazy_tensor import InMemory, LazyTensor
from autopar.storage.progress import hidden_bars, progress_bar
from autopar.storage.safetensors_io import dtype_of, nbytes
from autopar.stored import stored_weights


def split_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    tp: int,
    pp: int = 1,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    dtype: str | torch.dtype | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Write the sharded checkpoint that a model of ``tp`` x ``pp`` ranks would save.

    ``from_pretrained`` needs no split: each rank reads its ranges from the Hugging Face checkpoint. Split it if the
    file system is slow at that, or to send each node only its files.

    Args:
        source: The folder with ``config.json`` and weights (safetensors or ``pytorch_model.bin``).
        destination: The new folder; it appears when it is complete.
        tp, pp: The sizes of the mesh.
        policy: The policy, as for :func:`autopar.initialize`.
        dtype: The dtype of the written weights; by default the config's.
        force: True to replace a checkpoint in ``destination``; other files there are kept.
        progress: True to show a progress bar; by default on a terminal.

    Returns:
        ``{"destination": str, "files": {name: bytes}, "tensors": int, "parameters": int}``

    Raises:
        CheckpointError: The source is incomplete or damaged, or the destination cannot be written.
        ConfigError, UnsupportedModelError, PolicyError: The sizes or the policy do not fit the model.
    """
    check_sizes(tp, pp)
    folder, chosen = Path(source), parse_dtype(dtype)
    model = _open(folder, chosen)
    if count := len(stored_weights(model)):
        raise ConfigError(
            f"{folder} holds {count} quantized weights, which are not split\n"
            "  Use autopar.from_pretrained, which reads the shards of each rank."
        )
    used = find_policy(model, given_policy(model, policy))
    plan = make_plan(model, used, tp)
    sources = _sources(model, plan)
    bytes_of = {name: nbytes(dtype_of(tensor.dtype), tensor.shape) for name, tensor in plan.tensors.items()}
    with output_folder("split", folder, destination, force) as staging:
        with progress_bar("splitting", sum(bytes_of.values()), progress) as bar:
            stages = stages_by_size(bytes_of, pp)
            part = write_part(staging, "model", plan.tensors, sources.__getitem__, (tp, pp), stages, bar)
        manifest = Manifest(
            save_id=staging.id,
            sizes=MeshSizes(tp, pp, 1),
            model_type=plan.model_type,
            policy=plan.policy,
            hf_prefix="",
            parts={"model": part},
            tp=tp,
            parameters=frozenset(plan.canonical(name) for name, _ in model.named_parameters()),
            versions=versions(),
        )
        return write_manifest(staging, manifest, folder, chosen)


def _open(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Return the model of the folder with its weights on the meta device."""
    path = folder / "config.json"
    try:
        config = json.loads(small_file(path))
        names = config.get("architectures") or []
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a Hugging Face checkpoint: config.json is missing") from None
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if "auto_map" in config:
        raise CheckpointError(
            f"{folder} contains custom code, which split does not run\n"
            "  Load it with autopar.from_pretrained(..., trust_remote_code=True) and call save_parallelized."
        )
    kind = getattr(transformers, names[0], None) if len(names) == 1 and isinstance(names[0], str) else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        hint = nearest(str(names[0]), dir(transformers)) if names else ""
        raise CheckpointError(f"architectures in {path} must be a model of transformers, got {names}.{hint}")
    try:
        with hidden_bars(), lazy_init():  # of reading headers; split shows one
            loaded: tuple[PreTrainedModel, dict[str, Any]] = kind.from_pretrained(  # type: ignore[assignment]
                folder, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
            )
    except (AutoparError, Warning):
        raise
    except Exception as error:  # transformers may raise any error
        raise explained(error, folder, {}) from error
    model, info = loaded
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing or unexpected:
        what = f"it lacks {listed(missing)}" if missing else f"it also holds {listed(unexpected)}"
        raise CheckpointError(f"{folder} must hold exactly the weights of a {kind.__name__}: {what}")
    return model


def _sources(model: PreTrainedModel, plan: Plan) -> dict[str, LazyTensor]:
    """Return canonical name -> lazy tensor, over parameters and persistent buffers."""
    found: dict[str, LazyTensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for name, source in sources_of(module).items():
            if source.lazy is not None:
                found.setdefault(plan.canonical(start + name), source.lazy)
        for name, buffer in own_buffers(module).items():
            if buffer is not None and name not in unsaved_buffers(module):
                found.setdefault(plan.canonical(start + name), InMemory(buffer))
    missing = [name for name in plan.tensors if name not in found]
    if missing:
        raise CheckpointError(f"the checkpoint lacks values for {listed(missing)}")
    return found
