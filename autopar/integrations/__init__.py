"""Other libraries' training loops with a parallelized model. Each name imports its library when it is first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.integrations.adapters import add_adapter, get_peft_model
    from autopar.integrations.trainer.mixin import ParallelTrainerMixin
    from autopar.integrations.trainer.trainers import ParallelSeq2SeqTrainer, ParallelTrainer

__all__ = ["ParallelSeq2SeqTrainer", "ParallelTrainer", "ParallelTrainerMixin", "add_adapter", "get_peft_model"]

_HOMES = {
    "ParallelSeq2SeqTrainer": "autopar.integrations.trainer.trainers",
    "ParallelTrainer": "autopar.integrations.trainer.trainers",
    "ParallelTrainerMixin": "autopar.integrations.trainer.mixin",
    "add_adapter": "autopar.integrations.adapters",
    "get_peft_model": "autopar.integrations.adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar.integrations' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
