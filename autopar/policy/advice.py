"""Advise on a model that no policy lists: name the policy whose modules are named most like the model's."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from autopar.errors import listed, nearest
from autopar.foreign.modules import own_parameters
from autopar.policy.files import reference
from autopar.policy.load import own_policies
from autopar.policy.schema import Policy

_MOST_NAMES = 6


class _Likeness(NamedTuple):
    """How like a model is to a policy. The greatest is the most alike, and of several the simplest."""

    fitting: int  # kinds of modules that both have, less the modules and attributes that the model lacks
    inherited: bool  # the model or its config derives from that of a listed type
    spare: int  # less the kinds of modules that the model could have, heads apart
    common: int  # types that the policy lists
    name: str
    without_rule: tuple[str, ...]
    without_module: tuple[str, ...]


def convolutional(model: nn.Module) -> str:
    """Return the reason why a convolutional net has no policy; empty for any other model."""
    if not isinstance(model, PreTrainedModel) or "heads" in str(model.config.to_dict()):
        return ""
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return ""
    return (
        f"{type(model).__name__} is a convolutional net, which autopar's policies do not cover.\n  Use torch's "
        "DistributedDataParallel, or its fully_shard for the memory of weights and states."
    )


def advice(model: PreTrainedModel, kinds: dict[str, str]) -> str:
    """Say which name may have been meant, which policy is nearest and how to use it: at most ten lines."""
    model_type = str(model.config.model_type)
    hint = nearest(model_type, kinds, cutoff=0.7).strip()
    lines = [hint] if hint else []
    lines.append("autopar.initialize(model, config, policy='derive') derives a policy from what forward computes;")
    lines.append("'autopar policy new MODEL' (a folder or a name on the hub) also proves it and writes it down.")
    own = _Structure(model)
    best = max(_likeness(policy, own) for policy in own_policies().values())
    same = len(own.stored) - len(best.without_rule)
    if 2 * same >= len(own.stored):
        lines.append(f"By hand: closest in structure is {best.name} ({same} of {len(own.stored)} kinds of modules):")
        lines.append(f"  policy={{'extends': '{best.name}', 'match': {{'model_type': '{model_type}'}}}}")
        if best.without_rule:
            lines.append(f"  to which rules must be added for: {listed(best.without_rule, _MOST_NAMES)}")
        if best.without_module:
            lines.append(
                f"  and from which rules must be deleted (NAME: ~): {listed(best.without_module, _MOST_NAMES)}"
            )
    lines.append(f"'autopar policy check my.yaml' tries a policy without weights; its form is in {reference()}")
    lines.append("'autopar policy list' prints the model types that have one.")
    return "".join(f"\n  {line}" for line in lines)


class _Structure:
    """The names in a model, each for all modules that end in it."""

    def __init__(self, model: PreTrainedModel) -> None:
        base = f"{model.base_model_prefix}."
        modules = [(path.removeprefix(base), module) for path, module in model.named_modules() if path]
        self.modules = {_end(path): module for path, module in modules}
        self.around = {_end(path): {_end(outer) for outer in _and_around(path)} for path, _ in modules}
        self.stored = {_end(path) for path, module in modules if own_parameters(module)}
        self.parameters = {_end(path) for path, _ in model.named_parameters()}
        configs = [type(model.config), *(getattr(kind, "config_class", None) for kind in type(model).mro())]
        self.types = {getattr(kind, "model_type", "") for config in configs if config for kind in config.mro()}

    def has_attribute(self, path: str) -> bool:
        """Return whether a module has the attribute at the end of a rule's path."""
        parent, _, attribute = path.rpartition(".")
        parent, config, _ = parent.partition(".config")
        module = self.modules.get(_end(parent))
        return hasattr(getattr(module, "config", None) if config else module, attribute)


def _likeness(policy: Policy, own: _Structure) -> _Likeness:
    body = [
        path for tower in policy.towers for section in (tower.prefix, tower.blocks, tower.suffix) for path in section
    ]
    named = {_end(path): path for path in [*policy.head, *body]}
    missing = named.keys() - own.modules.keys() - own.parameters
    without_module = tuple(sorted(name for name in missing if "?" not in named[name]))
    attributes = {path for tower in policy.towers for path in tower.block_attributes if "." in path and "?" not in path}
    lacking = sum(not own.has_attribute(path) for path in attributes)
    return _Likeness(
        fitting=len(own.stored & named.keys()) - len(without_module) - lacking,
        inherited=bool(own.types & set(policy.model_types)),
        spare=-len(missing & {_end(path) for path in body}),
        common=len(policy.model_types),
        name=policy.name,
        without_rule=tuple(sorted(name for name in own.stored if not own.around[name] & named.keys())),
        without_module=without_module,
    )


def _and_around(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:length]) for length in range(1, len(names) + 1)]


def _end(path: str) -> str:
    """The last two names of a path behind its last number, without marks."""
    names = [name.removesuffix("?") for name in path.split(".")]
    behind = max((place + 1 for place, name in enumerate(names) if name.isdigit() or name == "*"), default=0)
    return ".".join(names[behind:][-2:])
