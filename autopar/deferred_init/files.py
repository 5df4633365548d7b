"""Sources of a lazy model's values: files of a Hugging Face checkpoint, or shards of an autopar checkpoint.

For a Hugging Face checkpoint, transformers' loading code runs on lazily opened files, with its renames, conversions and
reports, but without the data. Tensors of shards have the names of the model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.utils import logging

from autopar import registry
from autopar.checkpoint.shards import ShardReader
from autopar.checkpoint.staging import MANIFEST
from autopar.compat.tensors import own_buffers, own_parameters, version_of
from autopar.compat.transformers import INITIALIZED, dtype_plan
from autopar.errors import AutoparError, CheckpointError, ConfigError, in_one_line, listed
from autopar.storage.hugging_face import Sketch, damage, open_files, same_values
from autopar.storage.lazy_tensor import LazyTensor
from autopar.storage.safetensors_io import dtype_name
from autopar.stored import quantizers, stored_weights
from autopar.swap import replace_storage

_SOURCES = "_autopar_sources"


Init = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""One call of ``torch.nn.init``: ``function(tensor, *args, **kwargs)``."""


@dataclass(frozen=True)
class Source:
    """The source of a parameter's values.

    Attributes:
        lazy: The tensor to read; None for random initialization.
        inits: The constructor's calls of ``torch.nn.init`` on the parameter, in order.
        parameter, version: The parameter and its version, to detect later writes.
    """

    lazy: LazyTensor | None
    inits: tuple[Init, ...]
    parameter: nn.Parameter
    version: int

    def __deepcopy__(self, memo: Any) -> Source:
        if type(self.parameter).__deepcopy__ is not nn.Parameter.__deepcopy__:
            return self  # a library quantizes it later, and its copies have other parameters
        copied = copy.deepcopy(self.parameter, memo)  # with a separate version
        then = version_of(copied) - (version_of(self.parameter) - self.version)
        return Source(self.lazy, self.inits, copied, then)


def set_source(module: nn.Module, name: str, lazy: LazyTensor | None, inits: Sequence[Init] = ()) -> None:
    """Set the source of a module's parameter."""
    parameter = own_parameters(module)[name]
    vars(module).setdefault(_SOURCES, {})[name] = Source(lazy, tuple(inits), parameter, version_of(parameter))


def sources_of(module: nn.Module) -> Mapping[str, Source]:
    """Return the sources of the module's direct parameters; empty if it was not built lazily."""
    return vars(module).get(_SOURCES, {})


def by_parameter(modules: Iterable[nn.Module]) -> dict[int, tuple[LazyTensor | None, int]]:
    """Return ``id(parameter)`` -> the tensor to read, and the parameter's version when its source was set."""
    found: dict[int, tuple[LazyTensor | None, int]] = {}
    for source in (source for module in modules for source in sources_of(module).values()):
        lazy, first = found.get(id(source.parameter), (None, source.version))
        found[id(source.parameter)] = source.lazy if lazy is None else lazy, first
    return found


def clear_sources(module: nn.Module) -> None:
    """Remove the sources, once the parameters have values."""
    vars(module).pop(_SOURCES, None)


_log = logging.get_logger(f"transformers.{__name__}")  # follows transformers' verbosity


def load_lazily(original: Callable[..., Any], model: Any, files: Any, config: Any, *rest: Any, **kwargs: Any) -> Any:
    """Run transformers' ``_load_pretrained_model`` with sketches of the tensors in the files."""
    what = str(config.pretrained_model_name_or_path or type(model).__name__)
    if (quantized := quantizers(what, config.hf_quantizer)) is not None:
        original, config = quantized.read(original, model, config)
    elif config.hf_quantizer and (entry := registry.entry("quantizers", "transformers")) is not None:
        original = entry.dequantize(original)
    if config.device_map is not None:
        raise ConfigError("device_map is not supported here: each rank gets a shard of the model\n  Leave it out.")
    pending = [path for path, stored in stored_weights(model).items() if stored.pending]
    others = {path: own_parameters(model.get_submodule(path))["weight"] for path in pending}
    tensors = open_files(files or [], config.pretrained_model_name_or_path or "")
    sketches = {name: Sketch(lazy) for name, lazy in tensors.items()}
    info, index = original(model, sketches, None, config, *rest, **kwargs)
    if info.conversion_errors:
        name, reason = next(iter(info.conversion_errors.items()))
        raise CheckpointError(
            f"{config.pretrained_model_name_or_path}: {len(info.conversion_errors)} tensors cannot be converted for "
            f"{type(model).__name__} (first {name}):\n{reason}"
        )
    if info.mismatched_keys and not config.ignore_mismatched_sizes:
        said = _other_shapes(config.pretrained_model_name_or_path, model, sorted(info.mismatched_keys))
        raise CheckpointError(f"{said}\n  Pass ignore_mismatched_sizes=True to initialize them randomly.")
    _keep_sources(model, others)
    _check_ties(model, info)
    return info, index


def _keep_sources(model: nn.Module, others: Mapping[str, nn.Parameter]) -> None:
    """Replace sketches by meta parameters and by real buffers.

    ``others``: path of a layer -> its weight, if a library stores it in another form.
    """
    for path, module in model.named_modules():
        for name, parameter in own_parameters(module).items():
            if isinstance(parameter, Sketch):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                plain = others[path] if name == "weight" and path in others else None
                if plain is None:
                    plain = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                elif (plain.shape, plain.dtype) != (empty.shape, empty.dtype):
                    plain.data = empty
                vars(plain).update({INITIALIZED: True})
                own_parameters(module)[name] = plain
                set_source(module, name, parameter.lazy)
        for name, buffer in own_buffers(module).items():
            if isinstance(buffer, Sketch):
                own_buffers(module)[name] = buffer.lazy.read()
                vars(own_buffers(module)[name]).update({INITIALIZED: True})


def _check_ties(model: Any, info: Any) -> None:
    """Tie weights that are both in the files if they are equal, as transformers does."""
    for target, source in list((getattr(model, "all_tied_weights_keys", None) or {}).items()):
        pair = []
        for name in (source, target):
            path, _, own = name.rpartition(".")
            known = sources_of(model.get_submodule(path)).get(own)
            pair.append(None if known is None else known.lazy)
        if pair[0] is None or pair[1] is None or {source, target} & info.missing_keys:
            continue
        if same_values(pair[0], pair[1]):
            info.missing_keys.add(target)
        else:
            _untied(model, target, source)


def _untied(model: Any, target: str, source: str) -> None:
    _log.warning(
        "%s ties %s to %s, but their values differ in the checkpoint, so they stay untied\n"
        "  Write tie_word_embeddings=False into the config.",
        *(type(model).__name__, target, source),
    )
    model.all_tied_weights_keys.pop(target)


def point_to(model: PreTrainedModel, shards: ShardReader, dtype: str | torch.dtype) -> None:
    """Set every parameter's source to its shards, and read the buffers.

    With ``dtype="auto"`` each tensor has its saved dtype, otherwise the model's, except for tensors that transformers
    keeps in float32. Raises CheckpointError unless the shards hold exactly the model's tensors.
    """
    manifest, start = shards.manifest, shards.manifest.hf_prefix
    saved = {
        name.removeprefix(start): tensor.name
        for tensor in manifest.tensors.values()
        for name in (tensor.name, *tensor.aliases)
        if name.startswith(start)
    }
    expected = model.state_dict(keep_vars=True)
    _check_fit(model, shards, expected, saved)
    _untie(model, shards, saved)
    plan = {} if isinstance(dtype, str) else dtype_plan(model, dtype)
    kept = build_glob_alternation(list(plan))[0] if plan else None  # names that transformers keeps in float32
    cast: dict[str, str] = {}
    for path, module in model.named_modules():
        for name, tensor in [*own_parameters(module).items(), *own_buffers(module).items()]:
            full = f"{path}.{name}" if path else name
            if tensor is None or full not in expected:
                continue
            lazy = shards.lazy(saved[full])
            wanted = lazy.dtype if dtype == "auto" else torch.float32 if kept and kept.search(full) else tensor.dtype
            if wanted != lazy.dtype:
                cast[saved[full]] = f"{full} from {dtype_name(lazy.dtype)} to {dtype_name(wanted)}"
            if not isinstance(tensor, nn.Parameter):
                own_buffers(module)[name] = tensor.to(wanted).copy_(lazy.read())
                continue
            if wanted != tensor.dtype:
                replace_storage(tensor, torch.empty_like(tensor, dtype=wanted))
            set_source(module, name, lazy)
    if cast:
        first = next(iter(cast.values()))
        warnings.warn(
            f"{len(cast)} tensors were converted on loading, {first} ({MANIFEST} lists the saved dtypes)",
            stacklevel=6,
        )


def _check_fit(
    model: PreTrainedModel, shards: ShardReader, expected: Mapping[str, Any], saved: Mapping[str, str]
) -> None:
    info = {"missing_keys": set(expected) - set(saved), "unexpected_keys": set(saved) - set(expected)}
    if info["missing_keys"] or info["unexpected_keys"]:
        raise CheckpointError(
            f"{differs(str(shards.folder), model, info)}\n"
            "  For a model with another head run `autopar merge SRC DST` and load DST."
        )
    tensors = shards.manifest.tensors
    pairs = [(name, tensors[saved[name]].shape, tuple(tensor.shape)) for name, tensor in expected.items()]
    if wrong := [pair for pair in pairs if pair[1] != pair[2]]:
        raise CheckpointError(_other_shapes(shards.folder, model, wrong))


def _other_shapes(path: object, model: Any, wrong: Sequence[tuple[str, Any, Any]]) -> str:
    lines = [f"\n  {name}: {list(found)} in the files, {list(due)} in the model" for name, found, due in wrong]
    return f"{path}: {len(wrong)} tensors do not have the shapes of {type(model).__name__}{''.join(lines)}"


def _untie(model: Any, shards: ShardReader, saved: Mapping[str, str]) -> None:
    """Untie weights that have different values in the shards."""
    groups: dict[int, dict[str, nn.Parameter]] = {}  # id of a parameter -> tensor in the shards -> its parameter
    for full, parameter in list(model.named_parameters(remove_duplicate=False)):
        holders = groups.setdefault(id(parameter), {saved[full]: parameter})
        if saved[full] not in holders:
            lazy = shards.lazy(saved[full])
            equal = [holder for name, holder in holders.items() if same_values(shards.lazy(name), lazy)]
            fresh = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
            holders[saved[full]] = equal[0] if equal else fresh
        path, _, name = full.rpartition(".")
        own_parameters(model.get_submodule(path))[name] = holders[saved[full]]
    for target, source in list((getattr(model, "all_tied_weights_keys", None) or {}).items()):
        if saved[target] != saved[source] and model.get_parameter(target) is not model.get_parameter(source):
            _untied(model, target, source)


def differs(path: str, model: Any, info: Mapping[str, Any]) -> str:
    """Describe the tensors that a checkpoint lacks for a model, and its unexpected tensors."""
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    return (
        f"{path} must hold the tensors of {type(model).__name__}: "
        f"{len(missing)} missing, {len(unexpected)} unexpected"
        + (f"\n  Missing: {listed(missing, 20)}." if missing else "")
        + (f"\n  Unexpected: {listed(unexpected, 20)}." if unexpected else "")
    )


def explained(error: Exception, folder: Path, arguments: Mapping[str, Any]) -> AutoparError:
    """Convert an error of transformers to an error about a file, or about an argument of the user."""
    text = in_one_line(error)
    reason = text if text and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"
    wrong = [name for name in arguments if f"'{name}'" in text]
    if wrong and not isinstance(error, OSError):
        return ConfigError(f"{folder} cannot be loaded with {wrong[0]}={arguments[wrong[0]]!r}: {reason}")
    return CheckpointError(f"{folder} cannot be loaded: {damage(folder) or reason}")
