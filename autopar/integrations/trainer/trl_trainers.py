"""The trainers of TRL with a parallelized model: each is made when its name is first used."""

from __future__ import annotations

import importlib
from typing import Any

from autopar.integrations.trainer.trainers import ParallelTrainerMixin

NAMES = tuple(f"Parallel{kind}Trainer" for kind in ("DPO", "GRPO", "KTO", "RLOO", "Reward", "SFT"))


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    plain = getattr(importlib.import_module("trl"), name.removeprefix("Parallel"))
    words = f"TRL's ``{plain.__name__}`` with a parallelized model: see :class:`ParallelTrainerMixin`."
    made = type(name, (ParallelTrainerMixin, plain), {"__module__": __name__, "__doc__": words})
    return globals().setdefault(name, made)
