"""Other libraries' training loops with a parallelized model. Each name imports its library when it is first used."""

from typing import TYPE_CHECKING

from autopar.on_demand import lazy_names

if TYPE_CHECKING:
    from autopar.integrations.adapters import add_adapter, get_peft_model
    from autopar.integrations.trainer.trainers import ParallelSeq2SeqTrainer, ParallelTrainer, ParallelTrainerMixin
    from autopar.integrations.trainer.trl_trainers import (
        ParallelDPOTrainer,
        ParallelGRPOTrainer,
        ParallelKTOTrainer,
        ParallelRewardTrainer,
        ParallelRLOOTrainer,
        ParallelSFTTrainer,
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

_TRAINERS = "autopar.integrations.trainer.trainers"
_OF_TRL = "autopar.integrations.trainer.trl_trainers"
_HOMES = {
    "ParallelDPOTrainer": _OF_TRL,
    "ParallelGRPOTrainer": _OF_TRL,
    "ParallelKTOTrainer": _OF_TRL,
    "ParallelRLOOTrainer": _OF_TRL,
    "ParallelRewardTrainer": _OF_TRL,
    "ParallelSFTTrainer": _OF_TRL,
    "ParallelSeq2SeqTrainer": _TRAINERS,
    "ParallelTrainer": _TRAINERS,
    "ParallelTrainerMixin": _TRAINERS,
    "add_adapter": "autopar.integrations.adapters",
    "get_peft_model": "autopar.integrations.adapters",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
