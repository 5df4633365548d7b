"""Sources of a lazy model's values: files of a Hugging Face checkpoint, or shards of an autopar checkpoint.

The first is transformers' own loading with the files opened lazily: its renames, conversions and reports, without the
data. In shards every tensor has the model's own name.
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
        inits: The constructor's calls of ``torch.nn.init`` on it, in order.
        parameter, version: The parameter and its version, to find later writes into it.
    """

    lazy: LazyTensor | None
    inits: tuple[Init, ...]
    parameter: nn.Parameter
    version: int

    def __deepcopy__(self, memo: Any) -> Source:
        if type(self.parameter).__deepcopy__ is not nn.Parameter.__deepcopy__:
            return self  # of a library that quantizes it later; such copies have other parameters in its place
        copied = copy.deepcopy(self.parameter, memo)  # counts its own versions
        then = version_of(copied) - (version_of(self.parameter) - self.version)
        return Source(self.lazy, self.inits, copied, then)


def set_source(module: nn.Module, name: str, lazy: LazyTensor | None, inits: Sequence[Init] = ()) -> None:
    """Set the source of a module's parameter."""
    parameter = own_parameters(module)[name]
    vars(module).setdefault(_SOURCES, {})[name] = Source(lazy, tuple(inits), parameter, version_of(parameter))


def sources_of(module: nn.Module) -> Mapping[str, Source]:
    """Return the sources of the module's own parameters; empty if it was not built lazily."""
    return vars(module).get(_SOURCES, {})


def by_parameter(modules: Iterable[nn.Module]) -> dict[int, tuple[LazyTensor | None, int]]:
    """Return ``id(parameter)`` -> what to read, and its version when that was set; tied parameters are one."""
    found: dict[int, tuple[LazyTensor | None, int]] = {}
    for source in (source for module in modules for source in sources_of(module).values()):
        lazy, first = found.get(id(source.parameter), (None, source.version))
        found[id(source.parameter)] = source.lazy if lazy is None else lazy, first
    return found


def clear_sources(module: nn.Module) -> None:
    """Remove the sources; the parameters have their values."""
    vars(module).pop(_SOURCES, None)


_log = logging.get_logger(f"transformers.{__name__}")  # shown, and turned off, together with transformers' own reports


def load_lazily(original: Callable[..., Any], model: Any, files: Any, config: Any, *rest: Any, **kwargs: Any) -> Any:
    """Run transformers' ``_load_pretrained_model`` with sketches of the tensors in the files."""
    what = str(config.pretrained_model_name_or_path or type(model).__name__)
    if (quantized := quantizers(what, config.hf_quantizer)) is not None:
        original, config = quantized.read(original, model, config)
    elif config.hf_quantizer and (entry := registry.entry("quantizers", "transformers")) is not None:
        original = entry.dequantize(original)
    if config.device_map is not None:
        raise ConfigError("device_map cannot be used here: autopar gives every rank its own shard of the model")
    pending = [path for path, stored in stored_weights(model).items() if stored.pending]
    others = {path: own_parameters(model.get_submodule(path))["weight"] for path in pending}
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
        said = _other_shapes(config.pretrained_model_name_or_path, model, sorted(info.mismatched_keys))
        raise CheckpointError(f"{said}\n  ignore_mismatched_sizes=True initializes them anew.")
    _keep_sources(model, others)
    _check_ties(model, info)
    return info, index


def _keep_sources(model: nn.Module, others: Mapping[str, nn.Parameter]) -> None:
    """Replace sketches by meta parameters, and by real buffers.

    ``others`` are the weights that a library stores in another form, by the path of their layer.
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
    """Make tied weights that are both in the files one tensor if they are equal, as transformers does."""
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
        "%s ties %s to %s, but the checkpoint has different values for the two: they stay untied. "
        "Write tie_word_embeddings=False into the config.",
        *(type(model).__name__, target, source),
    )
    model.all_tied_weights_keys.pop(target)


def point_to(model: PreTrainedModel, shards: ShardReader, dtype: str | torch.dtype) -> None:
    """Set every parameter's source to its shards, and read the buffers.

    With ``dtype`` "auto" each tensor has that of the shards; else the model's, except for those that transformers keeps
    in float32. Raises CheckpointError unless the shards hold exactly the model's tensors.
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
    kept = build_glob_alternation(list(plan))[0] if plan else None  # what transformers keeps in float32
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
            f"{len(cast)} tensors were converted on loading, {first} ({MANIFEST} says what was saved)",
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
    """Give weights that the model ties, but that have different values in the shards, a parameter each."""
    groups: dict[int, dict[str, nn.Parameter]] = {}  # of each parameter: tensor in the shards -> what holds it
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
    """Describe the tensors that a checkpoint lacks for a model, and those that it has beyond it."""
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    return (
        f"{path} does not hold the tensors of {type(model).__name__}: "
        f"{len(missing)} missing, {len(unexpected)} unexpected"
        + (f"\n  Missing: {listed(missing, 20)}." if missing else "")
        + (f"\n  Unexpected: {listed(unexpected, 20)}." if unexpected else "")
    )


def explained(error: Exception, folder: Path, arguments: Mapping[str, Any]) -> AutoparError:
    """Return the error to raise for one of transformers: about a file, or about one of the user's arguments."""
    text = in_one_line(error)
    reason = text if text and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"
    wrong = [name for name in arguments if f"'{name}'" in text]
    if wrong and not isinstance(error, OSError):
        return ConfigError(f"{folder} cannot be loaded with {wrong[0]}={arguments[wrong[0]]!r}: {reason}")
    return CheckpointError(f"{folder} cannot be loaded: {damage(folder) or reason}")
