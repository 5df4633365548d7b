"""Build small models with the structure of large models: a config with small sizes, and random weights.

Sizes are recognized by their names (``small_sizes.yaml``). The small config keeps grouped queries, tied weights, and
one layer of each kind. ``small_fields.yaml`` lists fields that need special values. Norms, biases and constant matrices
get random values, because constants hide mistakes.

The policy of a large model is derived from a small model, because tracing a large model takes minutes. A dry run checks
it on the large model. The kind of a custom loss is measured: a batch's loss is compared with its samples' losses.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autopar.compat.transformers import from_config
from autopar.distributed.rng import kept
from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import AutoparError, ConfigError, type_and_text
from autopar.pipeline_parallel.microbatch import OwnLoss, batch_size, loss_in, split, weights_of
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import loss_kind
from autopar.tools.derivation.derive import derive
from autopar.tools.verification.batches import make_batches


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader with tuples (``!tuple [1, 2]``), because some configs distinguish them from lists."""


_Loader.add_constructor("!tuple", lambda loader, node: tuple(loader.construct_sequence(node, deep=True)))


@functools.cache
def read_data(path: Path) -> Mapping[str, Any]:
    """Return the data of a YAML file. The data is cached; callers must not change it."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)


_FIELDS = Path(__file__).with_name("small_fields.yaml")
_DATA = read_data(Path(__file__).with_name("small_sizes.yaml"))
_LAYER_COUNTS, _HEAD_COUNTS, _KEY_COUNTS, _HIDDEN, _TOKEN = (
    re.compile(_DATA["names"][kind]) for kind in ("layers", "heads", "keys", "hidden", "token")
)
_HEADS, _KV_HEADS, _WIDTH, _VOCABULARY = 4, 2, 8, 131
_LAYERS, _EXPERTS, _PATCHES = 2, 4, 2
LARGE = 1 << 24  # parameters; larger models are derived from a small model


def small_config(config: PretrainedConfig, *, block: int = 1) -> PretrainedConfig:
    """Return a copy of a config with small sizes, including its inner configs.

    Args:
        block: A divisor of the head and feature sizes, for quantization in blocks.
    """
    small = copy.deepcopy(config)
    _shrink(small, block)
    return small


def _shrink(config: PretrainedConfig, block: int = 1) -> None:
    if any(_is_list(value) and _HEAD_COUNTS.fullmatch(name) for name, value in vars(config).items()):
        for name, value in vars(config).items():  # one block in each stage; widths depend on each other
            if _is_list(value) and re.fullmatch(r"depths?|num_layers|encoder_depths", name):
                setattr(config, name, type(value)([min(each, 1 if len(value) > 1 else _LAYERS) for each in value]))
        _set_fields(config, read_data(_FIELDS).get(config.model_type, {}))
        return
    for each in [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]:
        _shrink(each, block)
    _set_layers(config)
    changes = dict(_changes(config, block))
    changes |= dict(_tokens(config, changes.get("vocab_size", getattr(config, "vocab_size", None))))
    for name, value in changes.items():
        setattr(config, name, value)
    found = vars(config)
    heads = next((value for name, value in _numbers(config) if _HEAD_COUNTS.fullmatch(name)), _HEADS)
    unset = {"num_key_value_heads": heads, "vocab_size": _VOCABULARY}  # some models require these values
    unset |= {"head_dim": found["hidden_size"] // heads} if "hidden_size" in found else {}
    for name, value in unset.items():
        if name in found and found[name] is None:
            setattr(config, name, value)
    parts = [vars(config).get(f"qk_{part}_head_dim") for part in ("rope", "nope")]
    if all(type(part) is int for part in parts) and "qk_head_dim" in vars(config):
        config.qk_head_dim = sum(parts)  # with and without rotary embedding
    _set_rotary(config)
    inner = int(found.get("expand") or found.get("mamba_expand") or 0) * int(found.get("hidden_size") or 0)
    for count, width in _DATA["state_heads"]:  # state-space heads must fill the inner width
        if inner and type(found.get(count)) is int and type(found.get(width)) is int:
            setattr(config, width, min(found[width], 2 * _WIDTH))
            setattr(config, count, inner // found[width])
    _set_fields(config, read_data(_FIELDS).get(config.model_type, {}))
    if hasattr(config, "initializer_range"):
        config.initializer_range = 0.1
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", 0) is None:
        config.decoder_start_token_id = 0
    if "vocab_size" in changes and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # required by classifiers


def _numbers(config: PretrainedConfig) -> Iterator[tuple[str, int]]:
    for name, value in vars(config).items():
        if type(value) is int and not name.startswith("_"):
            yield name, value


def _changes(config: PretrainedConfig, block: int) -> Iterator[tuple[str, int]]:
    """Yield the fields that are sizes, with small values. Hidden sizes are multiples of the number of heads."""
    heads = max((value for name, value in _numbers(config) if _HEAD_COUNTS.fullmatch(name)), default=0)
    hidden = next((value for name, value in _numbers(config) if _HIDDEN.fullmatch(name)), 0)
    for name, value in _numbers(config):
        width, most = (_most(name, _DATA[kind]) for kind in ("widths", "sizes"))
        if _HEAD_COUNTS.fullmatch(name) or (_KEY_COUNTS.fullmatch(name) and value >= heads):
            most = _HEADS
        elif _KEY_COUNTS.fullmatch(name):
            most = _KV_HEADS
        elif width is not None:
            most = -(-width * max(1, block // _WIDTH) // block) * block
        elif _HIDDEN.fullmatch(name) or (value == hidden and "size" in name):
            most = _HEADS * max(_WIDTH, block)
        elif name == "image_size" and type(getattr(config, "patch_size", None)) is int:
            depths: Any = vars(config).get("depths")  # each stage of a convolutional network halves the image
            convolves = _is_list(depths) and not any(_HEAD_COUNTS.fullmatch(other) for other in vars(config))
            most = _PATCHES * config.patch_size * (1 << (len(depths) - 1) if convolves else 1)
        if most is not None and value > 1:
            yield name, min(value, most)


def _most(name: str, sizes: Mapping[str, int]) -> int | None:
    return next((most for pattern, most in sizes.items() if re.fullmatch(pattern, name)), None)


def _set_layers(config: PretrainedConfig) -> None:
    """Reduce the number of layers. Keep the first layer of each kind, from lists with one item per layer."""
    counts = {name: value for name, value in _numbers(config) if _LAYER_COUNTS.fullmatch(name) and value > _LAYERS}
    for name, count in counts.items():
        listed = {key: value for key, value in vars(config).items() if _is_list(value) and len(value) == count}
        kinds: list[Any] = list(zip(*listed.values(), strict=True)) if listed else []
        hashable = all(isinstance(entry, str | int | float | bool | None) for kind in kinds for entry in kind)
        kept = sorted({kinds.index(kind) for kind in kinds}) if hashable else []
        pattern: Any = vars(config).get("block_types")  # a repeating pattern of block kinds
        wanted = max(_LAYERS, len(pattern) if isinstance(pattern, list) else 0)
        kept = kept[:_EXPERTS] + [place for place in range(count) if place not in kept][: max(0, wanted - len(kept))]
        kept = sorted(kept)
        for key, of_layers in listed.items():
            vars(config)[key] = type(of_layers)(of_layers[place] for place in kept)
        setattr(config, name, len(kept))
    last = max((getattr(config, name) for name in counts), default=_LAYERS) - 1
    for name, number in _numbers(config):  # the number of a removed layer
        if re.fullmatch(r"first_k_dense_replace|.*layer_(offset|freq)|.*_every_n?_?layers?", name):
            setattr(config, name, min(number, 1))
        elif re.fullmatch(r".*layer_(period|interval)", name):
            setattr(config, name, min(number, _LAYERS))
    for name, value in list(vars(config).items()):
        if re.fullmatch(r".*layer_(indices|idx|ids)", name) and isinstance(value, list) and value:
            setattr(config, name, [place for place in value if type(place) is int and place < last] or [last])


def _set_fields(config: PretrainedConfig, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig):
            _set_fields(inner, value)
        else:
            setattr(config, name, copy.deepcopy(value))


def _set_rotary(config: PretrainedConfig) -> None:
    """Set the sections of rotary embeddings (time, height, width) to the size of the small heads."""
    heads = next((value for name, value in _numbers(config) if _HEAD_COUNTS.fullmatch(name)), _HEADS)
    found = vars(config)
    width = found.get("head_dim") or found.get("hidden_size", _HEADS * _WIDTH) // heads

    def sectioned(rotary: Any) -> Any:
        if not isinstance(rotary, dict) or not rotary:
            return rotary
        if all(isinstance(value, dict | None) for value in rotary.values()):  # one dict per kind of layer
            return {kind: sectioned(of_kind) for kind, of_kind in rotary.items()}
        if "mrope_section" not in rotary and not _reads(config, "mrope_section"):
            return rotary
        half = int(width * (rotary.get("partial_rotary_factor") or 1.0)) // 2
        count = len(rotary.get("mrope_section", (0, 0, 0)))
        return {**rotary, "mrope_section": [*[half // count] * (count - 1), half - (count - 1) * (half // count)]}

    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(name), dict):
            setattr(config, name, sectioned(found[name]))


def _reads(config: PretrainedConfig, word: str) -> bool:
    """Return whether the code of the config's models mentions ``word``, a possibly unset field."""
    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        return word in inspect.getsource(module)
    except (ImportError, OSError):
        return False


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _tokens(config: PretrainedConfig, vocabulary: Any) -> Iterator[tuple[str, Any]]:
    """Yield distinct ids inside the vocabulary for special tokens."""
    if type(vocabulary) is not int:
        return
    free = vocabulary - 1
    for name, value in vars(config).items():
        if not _TOKEN.fullmatch(name) or value is None:
            continue
        if type(value) is int and value >= vocabulary:
            yield name, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, free)
            free -= 1
        elif isinstance(value, list) and value and all(type(entry) is int for entry in value):
            yield name, [min(entry, 2) for entry in value]


def build_small(
    kind: type[PreTrainedModel], config: PretrainedConfig, *, dtype: torch.dtype | None = None, block: int = 1
) -> PreTrainedModel:
    """Build a model of a class with a small config and random weights, identical on all ranks.

    Args:
        block: The divisor of sizes, as in :func:`small_config`.

    Raises:
        ConfigError: If the class does not accept the small config.
    """
    wanted: Any = kind.config_class or PretrainedConfig  # the inner config of this class, if there are several
    inner = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    own = next((each for each in (config, *inner) if isinstance(each, wanted)), config)
    torch.manual_seed(0)
    try:
        small = small_config(own, block=block)
        if callable(getattr(small, "validate", None)):
            small.validate()  # transformers validates only when it saves a config
        model: PreTrainedModel = from_config(kind, small)
    except Exception as error:  # a constructor may raise anything
        raise ConfigError(
            f"{kind.__name__} cannot be built small: {type_and_text(error, 120)}\n"
            "  Pass a folder with a small config, or a function that returns a small model: my_model.py:make."
        ) from error
    randomise(model)
    if dtype is not None:
        nn.Module.to(model, dtype)
    return model


def randomise(model: nn.Module) -> nn.Module:
    """Set biases, norms and constant matrices to random values."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif not parameter.is_meta and parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


_SAMPLES, _TOKENS, _SEEN = 3, 10, 1e-6  # of the measured batch; the minimum visible difference


def derived_tree(model: PreTrainedModel) -> dict[str, Any]:
    """Return the derived policy of a model as plain data. The model is only read.

    Raises:
        UnsupportedModelError: If no policy can be derived.
    """
    if not isinstance(model, PreTrainedModel):  # of another library: without a loss, and without a small config
        return derive(model).tree
    tree = None
    if sum(parameter.numel() for parameter in model.parameters()) >= LARGE:
        try:
            with kept():
                tree = derive(build_small(type(model), model.config)).tree
            check_plan(model, "", make_plan(model, read_user_policy(tree), 2))
        except AutoparError:  # the small model is missing, or its policy does not fit
            tree = None
    tree, losses = tree or derive(model).tree, losses_of(model)
    return {**tree, "loss": losses} if losses else tree


def losses_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the policy's section ``loss``, measured on a small model; empty if the kind of loss is known."""
    if loss_kind(model) is not None:
        return {}
    try:
        with kept():
            found = measured_kind(build_small(type(model), model.config))
    except AutoparError:  # the small model is missing
        return {}
    return {} if found is None else {type(model).__name__: found}


def measured_kind(model: PreTrainedModel) -> str | None:
    """Return one of :data:`~autopar.policy.schema.LOSSES`; None if the model has no loss, or no inputs are known.

    The measured copy is in fp64, because losses of samples may be nearly equal.
    """
    with kept(), torch.no_grad():
        try:
            (batch,) = make_batches(model, count=1, rows=_SAMPLES, length=_TOKENS)
            labels = batch["labels"]
            if labels.ndim == 2 and not labels.is_floating_point():
                counted = labels[:1].index_fill(1, torch.arange(2, labels.shape[1]), -100)
                batch["labels"] = torch.cat([counted, labels[1:]])
            floats = {name: x.double() for name, x in batch.items() if torch.is_tensor(x) and x.is_floating_point()}
            return _measured(copy.deepcopy(model).eval().double(), batch | floats)
        except Exception:  # no labels, or the code fails with fp64 or a single sample
            return None


def _measured(model: Any, batch: dict[str, Any]) -> str | None:
    def loss(inputs: dict[str, Any], **more: Any) -> torch.Tensor | None:
        copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        return loss_in(model(**copied, **more))

    expected, main_input = loss(batch), getattr(model, "main_input_name", "")
    if expected is None:
        return None
    samples = split(batch, batch_size(batch, main_input), 1, None, model.config)
    alone = [loss(sample) for sample in samples]

    def close(found: torch.Tensor) -> bool:
        return torch.allclose(found.double(), expected.double(), rtol=_SEEN, atol=_SEEN)

    def adds_up(shifted: bool) -> bool:
        weights = weights_of(samples, main_input, "tokens", shifted)
        counted = [each * weight for each, weight in zip(alone, weights, strict=True) if weight and each is not None]
        return close(torch.stack(counted).sum())

    plainly, shifted = adds_up(False), adds_up(True)
    if plainly and shifted and batch["labels"].ndim > 1:
        return None  # all samples have the same loss
    if not plainly and not shifted:
        return "other"
    shifted = not plainly
    counted = batch["labels"][..., 1:] if shifted else batch["labels"]
    try:
        halved = loss(batch, num_items_in_batch=2 * (counted != -100).sum())
    except TypeError:  # unknown argument
        halved = None
    if halved is None or not close(2 * halved):
        return "shifted_mean" if shifted else "mean"
    return "loss_function" if OwnLoss(model, "loss_function").shifted is shifted else "other"
