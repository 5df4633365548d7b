"""from_pretrained(): a checkpoint becomes this rank's share of a parallel model; the whole model is never in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from autopar.api import initialize, on_every_rank
from autopar.checkpoint.format import MANIFEST
from autopar.checkpoint.shards import Shards
from autopar.checkpoint.state import listed
from autopar.checkpoint.verification import share_of_verification
from autopar.config import ParallelConfig
from autopar.errors import AutoparError, CheckpointError, ConfigError
from autopar.lazy_model import lazy_init
from autopar.mesh import MeshSizes
from autopar.policy.schema import Policy
from autopar.sources import remember

__all__ = ["from_pretrained"]

_REFUSED = {
    **dict.fromkeys(("quantization_config", "load_in_4bit", "load_in_8bit"), "quantized models are not supported"),
    "gguf_file": "convert the file to safetensors first",
    "state_dict": "initialize takes a model that sits in memory",
    **dict.fromkeys(
        ("device_map", "max_memory", "offload_folder", "tp_plan", "tp_size", "device_mesh", "distributed_config"),
        "autopar gives every rank its own share of the model",
    ),
}


def from_pretrained(
    model_class: Any,
    path: str | os.PathLike[str],
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    dtype: str | torch.dtype | None = "auto",
    strict: bool = False,
    verify: bool = True,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint as this rank's share of a parallel model; each rank reads the bytes of its own shards.

    Equal to ``autopar.initialize(model_class.from_pretrained(path, dtype=dtype, **kwargs), config)``, which needs
    memory for the whole model. Every rank calls it. What the checkpoint lacks (a head that is new for the task) is
    initialized at random, equally on all ranks, and reported by transformers.

    Args:
        model_class: of transformers: ``AutoModelForCausalLM``, ``BertForSequenceClassification`` ...
        path: a folder or a name on the hub; safetensors, or ``pytorch_model.bin``, of any number of files. Or a folder
            that ``save_parallelized`` wrote, on any mesh; that must hold exactly the model's tensors.
        config, policy: see :func:`autopar.initialize`.
        dtype: of the model; "auto" takes what the checkpoint's config says.
        strict: make it an error if the checkpoint lacks a tensor or holds one that the model does not know.
        verify: compare the checksums of a folder that ``save_parallelized`` wrote; the ranks share the work.
        kwargs: for transformers: ``revision``, ``subfolder``, ``trust_remote_code``, ``num_labels`` ...

    Returns:
        The parallelized model, in evaluation mode; with ``output_loading_info=True`` also what was missing.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or tensors do not have the model's shapes.
        ConfigError: arguments that make no sense here: quantization, ``device_map``.
        ConfigError, UnsupportedModelError, PolicyError, ConsistencyError: see :func:`autopar.initialize`.
    """

    def load() -> tuple[Any, dict[str, Any]]:
        for name, value in kwargs.items():
            if name in _REFUSED and value is not None:
                raise ConfigError(f"from_pretrained does not take {name}: {_REFUSED[name]}.")
        try:
            if (Path(path) / MANIFEST).is_file():
                return _from_shards(model_class, Path(path), config, dtype, verify, dict(kwargs)), {}
            with lazy_init():
                model, info = model_class.from_pretrained(path, **kwargs, dtype=dtype, output_loading_info=True)
        except AutoparError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ConfigError(f"{path} holds an adapter: load the base model, and the adapter after that")
        if strict and (info["missing_keys"] or info["unexpected_keys"]):
            raise CheckpointError(_differs(str(path), model, info))
        return model, info

    wanted_info = kwargs.pop("output_loading_info", False)
    model, info = on_every_rank(load, lambda loaded: [type(loaded[0]).__name__, str(path), str(loaded[0].dtype)])
    model = initialize(model, config, policy=policy)
    return (model, info) if wanted_info else model


def _from_shards(
    model_class: Any, folder: Path, config: Any, dtype: Any, verify: bool, options: dict[str, Any]
) -> PreTrainedModel:
    """A lazy model whose values are in the shards of a checkpoint of ours."""
    shards = Shards(folder)
    world, rank = _place()
    parsed = ParallelConfig.parse(config, world)
    if verify:
        tp, pp = parsed.tensor_parallel_size, parsed.pipeline_parallel_size
        now = MeshSizes(tp, pp, world // (tp * pp))
        for held in share_of_verification(list(shards.held(("model",))), shards.manifest.sizes, now, rank):
            shards.verify(held)
    hf_config, options = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
    if dtype != "auto":
        options["dtype"] = dtype
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with lazy_init():
        model: PreTrainedModel = build(hf_config, **options)
    _point_to(model, shards)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _place() -> tuple[int, int]:
    """World size and rank."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def _point_to(model: PreTrainedModel, shards: Shards) -> None:
    """Let every parameter come from its shards, and read the buffers."""
    manifest, start = shards.manifest, shards.manifest.hf_prefix
    saved = {
        name.removeprefix(start): tensor.name
        for tensor in manifest.tensors.values()
        for name in (tensor.name, *tensor.aliases)
        if name.startswith(start)
    }
    due = model.state_dict(keep_vars=True)
    info = {"missing_keys": set(due) - set(saved), "unexpected_keys": set(saved) - set(due)}
    if info["missing_keys"] or info["unexpected_keys"]:
        raise CheckpointError(
            f"{_differs(str(shards.folder), model, info)}\n"
            "  For a model with another head run `autopar merge SRC DST` and load DST."
        )
    wrong = [
        f"  {name}: {list(manifest.tensors[saved[name]].shape)} in the files, {list(tensor.shape)} in the model"
        for name, tensor in due.items()
        if manifest.tensors[saved[name]].shape != tuple(tensor.shape)
    ]
    if wrong:
        raise CheckpointError(
            f"{shards.folder}: {len(wrong)} tensors do not have the shapes of {type(model).__name__}\n"
            + "\n".join(wrong)
        )
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                remember(module, name, shards.lazy(saved[f"{path}.{name}" if path else name]))
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            if buffer is not None and full in due:
                buffer.copy_(shards.lazy(saved[full]).read())


def _differs(path: str, model: Any, info: Mapping[str, Any]) -> str:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    return (
        f"{path} does not hold the tensors of {type(model).__name__}: "
        f"{len(missing)} missing, {len(unexpected)} unexpected"
        + (f"\n  Missing: {listed(missing, 20)}." if missing else "")
        + (f"\n  Unexpected: {listed(unexpected, 20)}." if unexpected else "")
    )
