"""Build the model of a command without memory for weights, from a folder, a model type or user code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from autopar import registry
from autopar.compat.tensors import own_parameters
from autopar.compat.transformers import from_config
from autopar.deferred_init.context import lazy_init
from autopar.errors import AutoparError, ConfigError, clip, in_one_line, nearest, type_and_text
from autopar.policy.match import library_of
from autopar.stored import Kind, stand_in


def _remote_classes(folder: Path, content: dict[str, Any]) -> tuple[PretrainedConfig, dict[str, type[PreTrainedModel]]]:
    """Run the code of a folder. Return its config, and the model classes of its ``auto_map``."""
    found: dict[str, type[PreTrainedModel]] = {}
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        for reference in {value for name, value in content["auto_map"].items() if name.startswith("AutoModel")}:
            kind: Any = get_class_from_dynamic_module(reference, folder, local_files_only=True)
            found[kind.__name__] = kind
    except Exception as error:  # the folder's code may raise anything
        raise ConfigError(f"the code of {folder} fails: {type_and_text(error, 200)}") from error
    if not found:
        raise ConfigError(f"the auto_map of {folder} names no model class: {', '.join(sorted(content['auto_map']))}")
    return config, found


# Endings of the default class of a model type, in order of preference.
_USUAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining", "Model")


class Head(NamedTuple):
    """A model to build.

    Attributes:
        name: The name of its class or function.
        make: A constructor without arguments.
        kind, config: The transformers class and its config; None for user code.
        folder: The folder or hub model with the weights; "" for none.
    """

    name: str
    make: Callable[[], nn.Module]
    kind: type[PreTrainedModel] | None = None
    config: PretrainedConfig | None = None
    folder: str = ""

    def build(self) -> nn.Module:
        """Build the model without memory for its weights. Raises ConfigError if its constructor fails."""
        try:
            with lazy_init():
                return self.make()
        except AutoparError:
            raise
        except Exception as error:  # a constructor may raise anything
            raise ConfigError(f"{self.name} cannot be built: {type_and_text(error, 200)}") from error


def heads(source: str, *, every: bool = False, trust: bool = False) -> list[Head]:
    """Return the models that ``source`` names.

    Args:
        source: A folder with ``config.json``, a hub model (``org/name``), a model type of transformers (with its
            default config), or user code (``FILE.py:NAME`` or ``MODULE:NAME``): a class, or a function that returns a
            model.
        every: A flag to return all classes of the config. Default: the named class, or the usual class of a type.
        trust: A flag to run code in the folder.

    Raises:
        ConfigError: If ``source`` does not name a model, or cannot be read.
    """
    path = Path(source)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if (path / "config.json").is_file():
        return _of_folder(path, every, trust)
    if ":" in source:
        return _of_code(source, every)
    if source in CONFIG_MAPPING:
        return _of_config(CONFIG_MAPPING[source](), (), every)
    if source.count("/") != 1 or path.exists():
        raise _unknown_type(source, f"'{source}' is not a folder with a config.json or")
    try:  # from the hub or its cache; weights are not read
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # no network, no such model, a type that transformers does not have
        raise ConfigError(
            f"'{source}' is not a folder with a config.json, and its config cannot be read from the hub: "
            f"{clip(str(error))}"
        ) from error
    return _of_config(config, getattr(config, "architectures", None) or [], every, source)


def _unknown_type(kind: str, said: str) -> ConfigError:
    return ConfigError(
        f"{said} a model type of transformers {transformers.__version__}.{nearest(kind, CONFIG_MAPPING)}\n"
        "  A custom class is named by its file: my_model.py:MyForCausalLM."
    )


TASKS = {
    "causal": ("ForCausalLM", "LMHeadModel"),
    "masked": ("ForMaskedLM",),
    "seq2seq": ("ForConditionalGeneration", "MTModel"),
    "sequence-classification": ("ForSequenceClassification",),
    "token-classification": ("ForTokenClassification",),
    "question-answering": ("ForQuestionAnswering",),
    "image-classification": ("ForImageClassification",),
    "base": ("Model",),
}
"""Task -> endings of class names."""


def of_task(source: str, task: str | None, *, trust: bool = False) -> Head:
    """Return the class of ``source`` for a task of :data:`TASKS` or a class name; None: the usual class."""
    if task is None:
        return heads(source, trust=trust)[0]
    found = {head.name: head for head in heads(source, every=True, trust=trust)}
    if task in found:
        return found[task]
    named = sorted((name for ending in TASKS.get(task, ()) for name in found if name.endswith(ending)), key=len)
    if named:
        return found[named[0]]
    raise ConfigError(
        f"'{task}' is not a task or a class of {source}.{nearest(task, [*TASKS, *found])}\n  Tasks: "
        f"{', '.join(TASKS)}. Classes: {', '.join(sorted(found))}"
    )


def named_object(source: str) -> Any:
    """Return the object that ``FILE.py:NAME`` or ``MODULE:NAME`` names."""
    place, _, name = source.rpartition(":")
    module = _module(place)
    if not hasattr(module, name):
        raise ConfigError(f"{place} has no '{name}'.{nearest(name, vars(module))}")
    return getattr(module, name)


def _of_folder(folder: Path, every: bool, trust: bool) -> list[Head]:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind, names = content.get("model_type"), content.get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if (library := registry.library_of_config(path)) is not None:
        return [Head(content["_class_name"], partial(library.build, path), folder=str(folder))]
    if content.get("auto_map") and trust:
        own, found = _remote_classes(folder, content)
        return _of_config(own, names, every, str(folder), found)
    if kind not in CONFIG_MAPPING and content.get("auto_map"):
        raise ConfigError(f"{folder} requires custom code; --trust-remote-code runs it")
    if kind not in CONFIG_MAPPING:
        raise _unknown_type(str(kind), f"{path} says model_type={kind!r}, which is not")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers may raise anything
        raise ConfigError(f"{path} is not a config of transformers: {clip(str(error))}") from error
    return _of_config(config, names, every, str(folder))


def _of_config(
    config: PretrainedConfig, names: Any, every: bool, folder: str = "", own: Mapping[str, Any] | None = None
) -> list[Head]:
    """Return the classes in ``names``, or the usual class, from transformers or from the folder's code (``own``)."""
    found = own or classes_of(config.model_type, type(config))
    if not found:
        raise ConfigError(f"transformers has no model class for model_type '{config.model_type}'")
    chosen = sorted(found) if every else [name for name in names if name in found] or _usual(found)
    return [Head(name, partial(_build, found[name], config), found[name], config, folder) for name in chosen]


def auto_classes(model_type: str) -> set[str]:
    """Return the names of the classes that transformers' auto classes make for a model type."""
    names: set[str] = set()
    for name, table in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES") and name != "CONFIG_MAPPING_NAMES":
            listed = table.get(model_type, ())
            names |= {listed} if isinstance(listed, str) else set(listed)
    return names


def classes_of(model_type: str, kind: type[PretrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """Return all transformers classes for a model type and the class of its config, by name."""
    found = {name: getattr(transformers, name) for name in auto_classes(model_type) if hasattr(transformers, name)}
    try:
        module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError:  # the type uses classes of a different type
        return found
    return {**found, **_siblings(module, kind)}


def _siblings(module: ModuleType, config_class: type) -> dict[str, type[PreTrainedModel]]:
    """Return the model classes in ``module`` for a config class, by name."""
    return {
        name: member
        for name, member in vars(module).items()
        if isinstance(member, type)
        and issubclass(member, PreTrainedModel)
        and member.__module__ == module.__name__
        and getattr(member, "config_class", None) is config_class
        and not name.endswith("PreTrainedModel")
    }


def _usual(found: Mapping[str, type]) -> list[str]:
    named = (sorted((name for name in found if name.endswith(ending)), key=len) for ending in _USUAL)
    return next(filter(None, named), sorted(found))[:1]


def _of_code(source: str, every: bool) -> list[Head]:
    place, _, name = source.rpartition(":")
    module = _module(place)
    made = getattr(module, name, None)
    if not callable(made):
        raise ConfigError(f"{place} has no class or function '{name}'.{nearest(name, vars(module))}")
    if not (isinstance(made, type) and issubclass(made, PreTrainedModel)):
        return [Head(name, partial(_call, made, name))]
    kinds = _siblings(module, made.config_class) if every and made.config_class else {}
    found = {name: made, **kinds}
    return [Head(head, partial(_build, kind, None), kind) for head, kind in sorted(found.items())]


def _module(place: str) -> ModuleType:
    path = Path(place)
    before = list(sys.path)
    sys.path.insert(0, str(path.parent.resolve() if path.suffix == ".py" else Path.cwd()))
    try:
        if path.suffix != ".py":
            return importlib.import_module(place)
        if not path.is_file():
            raise ConfigError(f"{place} does not exist")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and transformers look it up
        spec.loader.exec_module(module)
        return module
    except ImportError as error:
        raise ConfigError(f"{place} cannot be imported: {error}") from error
    finally:
        sys.path[:] = before


def _build(kind: type[PreTrainedModel], config: PretrainedConfig | None) -> nn.Module:
    if config is None:
        config_class: Any = kind.config_class
        if config_class is None:
            raise ConfigError(f"{kind.__name__} has no config_class; name a function that returns a model")
        config = config_class()
    model: nn.Module = from_config(kind, config)
    return model


def _call(made: Callable[[], Any], name: str) -> nn.Module:
    try:
        inspect.signature(made).bind()
    except TypeError as error:  # required arguments
        raise ConfigError(f"{name}: {error}; name a function that returns a model without arguments") from None
    model = made()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name}() must return an nn.Module; got {type(model).__name__}")
    return model


# -- fine-tuned models: adapters on a frozen base, which may be quantized ----------------------------------------------


def kind_of(name: str) -> Kind:
    """Return the kind of quantized weights by name."""
    registry.need("quantized", f"--quantization {name}")
    from autopar.features.quantized.bitsandbytes import KINDS

    if name not in KINDS:
        raise ConfigError(f"--quantization {name} must be one of {', '.join(KINDS)}.{nearest(name, KINDS)}")
    return KINDS[name]


def kind_in(config: Any) -> tuple[Kind | None, list[str] | None]:
    """Return the kind of quantized weights in a config, or None, and the layers that are not quantized."""
    settings: Any = getattr(config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(settings.get("quant_method", ""))
    if method == "bitsandbytes":
        name = settings.get("bnb_4bit_quant_type", "fp4") + "-double" * bool(settings.get("bnb_4bit_use_double_quant"))
        return kind_of("int8" if settings.get("load_in_8bit") else name), settings.get("llm_int8_skip_modules")
    if method == "torchao":
        raise ConfigError(
            "The config of torchao weights does not determine their size.\n"
            "  Load the folder inside lazy_init(), and pass the model to autopar.plan_memory."
        )
    return None, None  # not quantized, or dequantized during loading


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Return ``model`` with PEFT's LoRA on all linear layers except the head (``all-linear``)."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError("--lora requires PEFT: pip install 'autopar[quantized]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT uses deprecated names of transformers
            if library_of(model) is not None:  # as the scripts of diffusers do
                diffusion: Any = model.requires_grad_(False)
                add = getattr(diffusion, "add_adapter", partial(peft.inject_adapter_in_model, model=diffusion))
                add(peft.LoraConfig(r=rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
                return diffusion
            return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
    except ValueError as error:
        raise ConfigError(f"--lora: PEFT does not support {type(model).__name__}: {error}") from error


def mark_quantized(model: nn.Module, kind: Kind, kept: list[str] | None = None) -> None:
    """Replace the weights that transformers quantizes by stand-ins for quantized weights.

    Args:
        model: A model on the meta device.
        kept: The names of layers that are not quantized. Default: the choice of transformers.
    """
    inner: Any = model
    if kept is None:
        kept = get_keys_to_not_convert(inner) if isinstance(inner, PreTrainedModel) else []
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and should_convert_module(path, kept)
    ]
    if not found:
        raise ConfigError(f"--quantization: {type(model).__name__} has no linear layers to quantize")
    for path, module in found:
        weight: Any = module.weight
        layer = module  # Conv1D (GPT-2) has weights [in, out]
        if not isinstance(layer, nn.Linear):
            layer = nn.Linear(weight.shape[0], weight.shape[1], device="meta", dtype=weight.dtype)
            weight = layer.weight
        own_parameters(layer)["weight"] = stand_in((weight.shape[0], weight.shape[1]), weight.dtype, kind)
        model.set_submodule(path, layer)


def quantize(model: nn.Module, kind: Kind) -> nn.Module:
    """Return the model, quantized by ``from_pretrained(quantization_config=...)``."""
    assert kind.config is not None
    own: Any = type(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"--quantization requires a transformers model; got {own.__name__}")
    dtype = next(parameter.dtype for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            found: nn.Module = own.from_pretrained(folder, quantization_config=kind.config(), dtype=dtype)
        except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
            said = in_one_line(error, 120)
            raise ConfigError(f"--quantization: transformers cannot quantize {own.__name__} here: {said}") from error
    return found


def fine_tuned(model: nn.Module, rank: int) -> nn.Module:
    """Return the model with LoRA and a random ``B``. PEFT's ``B`` is zero, so its new adapters have no effect."""
    adapted = add_lora(model, rank)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted
