"""Other libraries' training loops with a parallelized model. Each name imports its library when it is first used."""

from typing import TYPE_CHECKING

from autopar.registry import lazy_names

if TYPE_CHECKING:
    from autopar.integrations.adapters import add_adapter, get_peft_model
    from autopar.integrations.trainer.trainers import (
        ParallelDPOTrainer,
        ParallelGRPOTrainer,
        ParallelKTOTrainer,
        ParallelRewardTrainer,
        ParallelRLOOTrainer,
        ParallelSeq2SeqTrainer,
        ParallelSFTTrainer,
        ParallelTrainer,
        ParallelTrainerMixin,
    )

__all__ = [
    "ParallelDPOTrainer",
    "ParallelGRPOTrainer",
    "ParallelKTOTrainer",
    "ParallelRLOOTrainer",
    "ParallelRewardTrainer",
    "ParallelSFTTrainer",
    "ParallelSeq2SeqTrainer",
    "ParallelTrainer",
    "ParallelTrainerMixin",
    "add_adapter",
    "get_peft_model",
]

_HOMES = dict.fromkeys(__all__, "autopar.integrations.trainer.trainers")
_HOMES |= dict.fromkeys(("add_adapter", "get_peft_model"), "autopar.integrations.adapters")

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
