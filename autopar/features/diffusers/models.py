"""Find the policy of a model of diffusers by the name of its class."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from torch import nn

from autopar.errors import ConfigError, PolicyError, UnsupportedModelError, nearest
from autopar.features.diffusers.inputs import sample_inputs
from autopar.policy.files import reference
from autopar.policy.load import own_policies
from autopar.policy.match import config_of, policies_of
from autopar.policy.schema import SUPPORTED, Policy

LIBRARY = "diffusers"
RANGE = ">=0.42,<0.43"
"""The versions of diffusers for a policy without a range."""


class Models:
    """The models of diffusers (:attr:`autopar.registry.Feature.models`)."""

    name = LIBRARY
    stem = "diffusion_pytorch_model"

    @staticmethod
    def owns(module: nn.Module) -> bool:
        """Return whether a module is a model of diffusers, whose base class exists once a model was imported."""
        base = getattr(sys.modules.get("diffusers.models.modeling_utils"), "ModelMixin", None)
        return base is not None and isinstance(module, base)

    @staticmethod
    def policy(model: Any) -> Policy:
        """Return the policy that lists the class of ``model``, or one of its base classes.

        Raises:
            UnsupportedModelError: No policy lists the class, or not with this config or this version of diffusers.
        """
        config, kind = config_of(model), type(model).__name__
        listed = next(filter(None, (policies_of(each.__name__, LIBRARY) for each in type(model).__mro__)), [])
        found = [
            each for each in listed if all(getattr(config, key, None) == value for key, value in each.config.items())
        ]
        if len(found) > 1:
            raise PolicyError(f"{' and '.join(str(each.where) for each in found)} both match {kind}")
        if not found:
            raise UnsupportedModelError(_without_policy(model, listed))
        check_version(found[0], kind)
        return found[0]

    @staticmethod
    def sample(model: Any, batch: int, length: int) -> dict[str, Any]:
        """Return inputs for a dry run (:mod:`autopar.features.diffusers.inputs`)."""
        return sample_inputs(model, batch, length)

    @staticmethod
    def rows(model: nn.Module, ranks: int) -> Any:
        """Return the plan for context parallelism (:mod:`autopar.features.diffusers.sequences`)."""
        from autopar.features.diffusers.sequences import plan_sequences

        return plan_sequences(model, ranks)

    @staticmethod
    def config_writer(model: Any) -> Callable[[Path], None]:
        """Return a function that writes ``config.json`` as ``save_pretrained`` would."""
        text: str = model.to_json_string()

        def write(folder: Path) -> None:
            (folder / "config.json").write_text(text, encoding="utf-8")

        return write

    @staticmethod
    def wrote(config: Path) -> bool:
        """Return whether diffusers wrote a ``config.json``."""
        return b'"_diffusers_version"' in config.read_bytes()

    @staticmethod
    def class_of(config: Path) -> Any:
        """Return the class of a ``config.json``. Raises ConfigError if diffusers lacks it."""
        name = json.loads(config.read_text(encoding="utf-8"))["_class_name"]
        kind = getattr(importlib.import_module(LIBRARY), name, None)
        if kind is None:
            raise ConfigError(f"{config}: diffusers {version(LIBRARY)} has no class {name}")
        return kind

    @staticmethod
    def build(config: Path) -> Any:
        """Build the model of a ``config.json``. Raises ConfigError as :meth:`class_of`."""
        return Models.class_of(config).from_config(json.loads(config.read_text(encoding="utf-8")))

    @staticmethod
    def tokens(model: Any, frames: int, height: int, width: int) -> int:
        """Return the number of tokens of an image or video, with the autoencoder that usually precedes the model."""
        kind, config = type(model).__name__, config_of(model)
        rough = kind.startswith(("LTX", "Sana")) or (kind.startswith("Wan") and config.in_channels == 48)
        side, time = 32 if rough else 16, 8 if kind.startswith("LTX") else 4  # pixels and frames of a token
        times = ((frames - 1) // time + 1) // (getattr(config, "patch_size_t", None) or 1)
        return max(times, 1) * (height // side) * (width // side)


def classes() -> list[str]:
    """Return the names of the classes with a policy."""
    return sorted(name for policy in own_policies().values() if policy.library == LIBRARY for name in policy.classes)


def _without_policy(model: nn.Module, listed: list[Policy]) -> str:
    kind = type(model).__name__
    if listed:
        wants = "; ".join(f"{policy.name} needs {dict(policy.config)}" for policy in listed)
        return f"no policy supports this config of {kind}: {wants}."
    if any(isinstance(module, nn.Conv2d | nn.Conv3d) and max(module.kernel_size) == 3 for module in model.modules()):
        return (
            f"{kind} is a convolutional net (a UNet or an autoencoder), which autopar does not support.\n  Use torch's "
            "DistributedDataParallel, or fully_shard to shard weights and optimizer state."
        )
    return (
        f"no policy lists the class {kind} of diffusers.{nearest(kind, classes())}\n"
        "  autopar.initialize(model, config, policy='derive') derives a policy from the computations of forward;\n"
        f"  a custom policy needs no 'match'; its form is in {reference()}."
    )


def check_version(policy: Policy, kind: str) -> None:
    """Raise UnsupportedModelError unless a policy supports the installed diffusers for the class ``kind``."""
    wanted = policy.range_of(kind)
    wanted = RANGE if wanted == SUPPORTED else wanted
    if not SpecifierSet(wanted).contains(version(LIBRARY), prereleases=True):
        raise UnsupportedModelError(
            f"the policy for {kind} needs diffusers {wanted}, got {version(LIBRARY)} ({policy.where}).\n"
            "  pip install 'autopar[diffusers]'"
        )
