"""The tensor-parallel toolbox for user-defined models, under Megatron-LM's names.

The feature ``megatron`` provides most of the names; each is loaded at its first use. Every function takes ``group`` as
its last argument: a process group, or an MPU (its tp group). No function keeps module-level state.
"""

from typing import Any

from autopar import registry
from autopar.errors import nearest
from autopar.registry import lazy_names

_NAMES = dict.fromkeys(("Group", "axis_of"), "autopar.distributed.axis")


def _hint(name: str) -> str:
    if name.startswith("_"):
        return ""
    if any(name in vars(names) for _, names in registry.entries("mesh_names")):
        return f" It is a method of the MPU here: model.mpu.{name}()."
    return nearest(name, __getattr__("__all__"), cutoff=0.7) or registry.missing("toolbox", "Names of Megatron-LM")


_find, _dir = lazy_names(__name__, _NAMES, _hint)


def __getattr__(name: str) -> Any:
    if name == "__all__":  # lazy, because features that add names may import this package
        return [*_NAMES, *(name for feature in registry.features() for name in feature.toolbox)]
    found = None if name.startswith("_") else registry.entry("toolbox", name)
    return _find(name) if found is None else found


def __dir__() -> list[str]:
    return sorted({*_dir(), *__getattr__("__all__")})
