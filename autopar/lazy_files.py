"""transformers' own loading with the files opened lazily: its renames, conversions and reports, without the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from autopar.checkpoint.conversion import Sketch
from autopar.checkpoint.hugging_face import open_files, same_values
from autopar.errors import CheckpointError, ConfigError
from autopar.sources import remember, sources_of

__all__ = ["load_lazily"]

_log = logging.get_logger(f"transformers.{__name__}")  # shown, and turned off, together with transformers' own reports


def load_lazily(original: Callable[..., Any], model: Any, files: Any, config: Any, *rest: Any, **kwargs: Any) -> Any:
    """transformers' ``_load_pretrained_model``, with sketches of the tensors in the files."""
    if config.hf_quantizer is not None:
        raise ConfigError(
            "quantized checkpoints cannot be loaded lazily: load the model with transformers' from_pretrained"
        )
    if config.device_map is not None:
        raise ConfigError("device_map cannot be used here: autopar gives every rank its own share of the model")
    tensors = open_files(files or [], config.pretrained_model_name_or_path or "")
    sketches = {name: Sketch(lazy) for name, lazy in tensors.items()}
    info, index = original(model, sketches, None, config, *rest, **kwargs)
    if info.conversion_errors:
        name, reason = next(iter(info.conversion_errors.items()))
        raise CheckpointError(
            f"{config.pretrained_model_name_or_path}: {len(info.conversion_errors)} tensors cannot be converted to "
            f"what {type(model).__name__} holds, the first is {name}:\n{reason}"
        )
    if info.mismatched_keys and not config.ignore_mismatched_sizes:
        lines = [
            f"  {name}: {list(found)} in the files, {list(due)} in the model"
            for name, found, due in sorted(info.mismatched_keys)
        ]
        raise CheckpointError(
            f"{config.pretrained_model_name_or_path}: {len(lines)} tensors do not have the shapes of "
            f"{type(model).__name__}\n" + "\n".join(lines) + "\n  ignore_mismatched_sizes=True initializes them anew."
        )
    _keep_sources(model)
    _check_ties(model, info)
    return info, index


def _keep_sources(model: nn.Module) -> None:
    """Replace sketches by meta parameters, and by real buffers."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Sketch):
                plain = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
                    requires_grad=parameter.requires_grad,
                )
                vars(plain).update(_is_hf_initialized=True)
                module._parameters[name] = plain
                remember(module, name, parameter.lazy)
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Sketch):
                module._buffers[name] = buffer.lazy.read()
                vars(module._buffers[name]).update(_is_hf_initialized=True)


def _check_ties(model: Any, info: Any) -> None:
    """Tied weights that are both in the files: one tensor if they are equal, else two; transformers looks at values."""
    for target, source in list((getattr(model, "all_tied_weights_keys", None) or {}).items()):
        pair = []
        for name in (source, target):
            path, _, own = name.rpartition(".")
            pair.append(sources_of(model.get_submodule(path)).get(own))
        if pair[0] is None or pair[1] is None or {source, target} & info.missing_keys:
            continue
        if same_values(pair[0], pair[1]):
            info.missing_keys.add(target)
        else:
            _log.warning(
                "%s ties %s to %s, but the checkpoint has different values for the two: they stay untied. "
                "Write tie_word_embeddings=False into the config.",
                *(type(model).__name__, target, source),
            )
            model.all_tied_weights_keys.pop(target)
