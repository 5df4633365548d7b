"""Models of a folder that comes with code of its own (``trust_remote_code``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from autopar.errors import ConfigError, clip

__all__ = ["remote_classes"]


def remote_classes(folder: Path, content: dict[str, Any]) -> tuple[PretrainedConfig, dict[str, type[PreTrainedModel]]]:
    """Run the code of a folder; return its config, and the classes that its ``auto_map`` names.

    Raises:
        ConfigError: the code fails, or names no model.
    """
    found: dict[str, type[PreTrainedModel]] = {}
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        for reference in {value for name, value in content["auto_map"].items() if name.startswith("AutoModel")}:
            kind: Any = get_class_from_dynamic_module(reference, folder, local_files_only=True)
            found[kind.__name__] = kind
    except Exception as error:  # whatever foreign code stumbles over
        text = clip(" ".join(str(error).split()), 200)
        raise ConfigError(f"the code of {folder} fails: {type(error).__name__}: {text}") from error
    if not found:
        raise ConfigError(f"the auto_map of {folder} names no model: it has {', '.join(sorted(content['auto_map']))}")
    return config, found
