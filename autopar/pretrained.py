"""Load a checkpoint as this rank's shards of a parallel model, without the full model in memory."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from autopar import registry
from autopar.api import initialize
from autopar.checkpoint.shards import ShardReader
from autopar.checkpoint.staging import MANIFEST
from autopar.compat.transformers import from_config
from autopar.config import ParallelConfig
from autopar.deferred_init.context import adapter_first, in_lazy_init, lazy_init
from autopar.deferred_init.files import differs, explained, point_to
from autopar.distributed.agree import same_on_every_rank
from autopar.errors import AutoparError, CheckpointError, ConfigError, clip
from autopar.policy.schema import Policy
from autopar.storage.progress import hidden_bars

_REFUSED = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "write quantization_config=BitsAndBytesConfig(...)"),
    "gguf_file": "convert the file to safetensors first",
    "state_dict": "use initialize for a model in memory",
    **dict.fromkeys(
        ("device_map", "max_memory", "offload_folder", "tp_plan", "tp_size", "device_mesh", "distributed_config"),
        "autopar chooses the shards of each rank",
    ),
}

_OF_FILES = {  # arguments that are not supported for a folder of shards
    *("adapter_kwargs", "adapter_name", "cache_dir", "code_revision", "disable_mmap", "force_download"),
    *("from_flax", "from_tf", "ignore_mismatched_sizes", "local_files_only", "low_cpu_mem_usage", "mirror"),
    *("offload_buffers", "offload_state_dict", "proxies", "revision", "subfolder", "token", "tqdm_class"),
    *("use_auth_token", "use_safetensors", "variant", "weights_only"),
}
_OFF = {"allow_all_kernels", "fusion_config", "kernel_config", "key_mapping", "use_kernels"}  # allowed only if unset


def from_pretrained(
    model_class: Any,
    path: str | os.PathLike[str],
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    model_config: PreTrainedConfig | None = None,
    dtype: str | torch.dtype | None = "auto",
    strict: bool = False,
    verify: bool = True,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint as this rank's shards of a parallel model; each rank reads only its bytes.

    The result is equal to ``autopar.initialize(model_class.from_pretrained(path, dtype=dtype, **kwargs), config)``,
    which needs memory for the full model. Every rank calls it. Weights that the checkpoint lacks (a new task head) are
    initialized randomly, identical on all ranks, and transformers reports them.

    Args:
        model_class: A class of transformers, such as ``AutoModelForCausalLM`` or ``BertForSequenceClassification``.
        path: A folder or a name on the hub with safetensors or ``pytorch_model.bin`` files, or a folder of
            ``save_parallelized`` from any mesh, which must hold exactly the model's tensors.
        config, policy: The config and policy, as for :func:`autopar.initialize`.
        optimizer: A function that makes the optimizer of a model whose weights have no values yet:
            ``lambda model: torch.optim.AdamW(model.parameters(), lr=3e-5)``. Its ``step`` applies the config's
            ``zero``, ``precision`` and ``gradient_clipping``, as with ``initialize(model, config, optimizer=...)``.
        model_config: The ``config`` of transformers; by default the checkpoint's.
        dtype: The dtype of the model. "auto" uses the dtype of the checkpoint's config, and for shards each tensor's
            dtype. With an optimizer "auto" is float32 if the saved run kept float32 weights (``precision``) and this
            config does not. Weights that transformers keeps in float32 stay in float32.
        strict: True to raise if the checkpoint has missing or unexpected tensors.
        verify: True to compare the checksums of a folder of ``save_parallelized``; the ranks share the work.
        kwargs: Further arguments of transformers, such as ``revision``, ``trust_remote_code`` or ``num_labels``.

    Returns:
        The parallelized model in evaluation mode, followed by the optimizer if there is one, and by the missing tensors
        with ``output_loading_info=True``.

    Raises:
        CheckpointError: A file is missing, truncated or damaged, or tensors do not have the model's shapes.
        ConfigError: An argument is not supported (quantization, ``device_map``) or unknown to transformers, or the call
            is inside :func:`autopar.lazy_init`.
        UnsupportedModelError, PolicyError, ConsistencyError: As for :func:`autopar.initialize`.
    """
    wanted_info = kwargs.pop("output_loading_info", False)

    def load() -> tuple[Any, dict[str, Any], torch.optim.Optimizer | None]:
        given = _checked(model_class, path, config, model_config, dtype, optimizer, kwargs)
        model, info = _load(model_class, path, config, given, strict, verify, optimizer is not None)
        made = None if optimizer is None else optimizer(model)
        if made is not None and not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer= must return a torch.optim.Optimizer, got {clip(repr(made), 60)}")
        return model, info, made

    model, info, made = same_on_every_rank(
        load, lambda loaded: {"class": type(loaded[0]).__name__, "path": str(path), "dtype": str(loaded[0].dtype)}
    )
    initialize(model, config, policy=policy, optimizer=made)
    results = [model, *([made] if made is not None else []), *([info] if wanted_info else [])]
    return tuple(results) if len(results) > 1 else model


def _load(
    model_class: Any, path: Any, config: Any, given: dict[str, Any], strict: bool, verify: bool, trained: bool
) -> tuple[Any, dict[str, Any]]:
    """Build a lazy model of a checkpoint; return it and its missing tensors. ``given``: arguments of transformers."""
    folder = Path(path) / (given.get("subfolder") or "")
    _check_quantized(folder)
    try:
        library = registry.library_of_config(folder / "config.json")
        if library is not None and not issubclass(model_class, torch.nn.Module):  # an AutoModel
            model_class = library.class_of(folder / "config.json")
        with torch.device("cpu"):
            if (folder / MANIFEST).exists():
                return _from_shards(model_class, folder, config, verify, given, trained), {}
            with hidden_bars(only_transformers=True), lazy_init():  # reads headers only
                model, info = model_class.from_pretrained(path, **given, output_loading_info=True)
    except (AutoparError, Warning):
        raise
    except Exception as error:  # transformers may raise any error
        own = {name: value for name, value in given.items() if name not in ("config", "dtype")}
        raise explained(error, folder, own) from error
    if strict and (info["missing_keys"] or info["unexpected_keys"]):
        raise CheckpointError(differs(str(path), model, info))
    return model, info


def _check_quantized(folder: Path) -> None:
    """Check the quantization of a folder's weights before transformers, which may need another package."""
    path, text = folder / "config.json", b""
    with contextlib.suppress(OSError):  # transformers raises the error
        text = path.read_bytes() if path.is_file() else b""  # reading a named pipe would block
    if b'"quant_method"' in text and (quantized := registry.entry("quantizers", "transformers")) is not None:
        quantized.check_config(str(folder), text)


def _checked(
    model_class: Any, path: Any, config: Any, model_config: Any, dtype: Any, optimizer: Any, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments for transformers."""
    if str(getattr(model_class, "__module__", "")).partition(".")[0] == "peft":
        raise ConfigError(adapter_first(str(path)))
    if in_lazy_init():
        raise ConfigError(
            "autopar.from_pretrained is not supported inside of lazy_init\n  Call it after leaving `with lazy_init():`."
        )
    if not callable(getattr(model_class, "from_pretrained", None)):
        raise ConfigError(
            f"the first argument must be a model class of transformers, got {clip(repr(model_class), 60)}\n"
            "  Call autopar.from_pretrained(AutoModelForCausalLM, folder_or_name, config). For other modules use\n"
            "  autopar.initialize(model, config, policy=...) and model.from_parallelized(folder)."
        )
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"path={path!r} must be a folder or a name on the hub")
    if isinstance(config, PreTrainedConfig) or not isinstance(model_config, PreTrainedConfig | None):
        raise ConfigError("config= must be autopar's config, and model_config= a config of transformers")
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        raise ConfigError(
            f"optimizer= must be a function of the model, got {clip(repr(optimizer), 60)}\n"
            "  Use optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-5)."
        )
    for name, value in kwargs.items():
        if name in _REFUSED and value is not None:
            raise ConfigError(f"from_pretrained does not support {name}: {_REFUSED[name]}.")
    given = dict(kwargs)
    older = given.pop("torch_dtype", None)  # the name before transformers 5
    wanted: Any = older if older is not None and dtype in (None, "auto") else dtype or "auto"
    chosen = wanted
    if wanted != "auto":
        chosen = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
        if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
            raise ConfigError(f"dtype={wanted!r} must be 'auto' or a floating-point dtype, such as torch.bfloat16")
    return {**given, "dtype": chosen} | ({} if model_config is None else {"config": model_config})


def _from_shards(
    model_class: Any, folder: Path, config: Any, verify: bool, given: dict[str, Any], trained: bool
) -> PreTrainedModel:
    """Build a lazy model of a sharded checkpoint; ``trained``: True with an optimizer."""
    shards = ShardReader(folder)
    if count := len(shards.manifest.base.forms):
        raise ConfigError(
            f"{folder} holds {count} quantized weights in shards, or adapters of them, which from_pretrained does not "
            "support\n  Load the base model and call from_parallelized, or run `autopar merge SRC DST` and load DST."
        )
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if dist.is_initialized():
        world, rank = dist.get_world_size(), dist.get_rank()
    parsed = ParallelConfig.parse(config, world)
    if verify:
        shards.verify_along()
        shards.verify_share(("model",), rank, world)
    options = {
        name: value
        for name, value in given.items()
        if name not in _OF_FILES and name not in _REFUSED and (value or name not in _OFF)
    }
    dtype, generation = options.pop("dtype"), options.pop("generation_config", None)
    beside_half = parsed.precision != "fp32" and not parsed.fully_sharded
    saved = shards.manifest.training.get("optimizer")
    if trained and dtype == "auto" and not beside_half and isinstance(saved, dict) and saved.get("masters"):
        dtype = torch.float32  # so that from_parallelized(optimizer=) can load the fp32 weights
    with lazy_init():
        model = _built(model_class, folder, dtype, options)
    point_to(model, shards, dtype)
    if getattr(model, "can_generate", bool)():
        if generation is not None:
            model.generation_config = copy.deepcopy(generation)
        elif (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _built(model_class: Any, folder: Path, dtype: str | torch.dtype, options: dict[str, Any]) -> PreTrainedModel:
    """Build the model of the folder's config, or of the config in ``options``; the constructor gets other options."""
    library = registry.library_of_config(folder / "config.json")
    if library is not None:
        own = library.build(folder / "config.json")
        if not isinstance(own, model_class) or options:
            given = f"{next(iter(options))}=" if options else model_class.__name__
            raise ConfigError(
                f"{folder} holds shards of a {type(own).__name__}, got {given}\n"
                "  Pass the class that was saved, without options of its config."
            )
        return own if dtype == "auto" else own.to(dtype)
    hf_config, trust = copy.deepcopy(options.pop("config", None)), options.pop("trust_remote_code", None)
    if hf_config is None:
        names = ("attn_implementation", "experts_implementation")
        chosen: dict[str, Any] = {name: options[name] for name in names if name in options}
        hf_config, options = AutoConfig.from_pretrained(
            folder, return_unused_kwargs=True, trust_remote_code=trust, **options
        )
        options.update(chosen)
    if dtype != "auto":
        options["dtype"] = dtype
    model: PreTrainedModel
    if hasattr(model_class, "from_config"):
        model = model_class.from_config(hf_config, trust_remote_code=trust, **options)
    else:
        model = from_config(model_class, hf_config, **options)
    return model
