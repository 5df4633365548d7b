"""Other libraries' training loops with a parallelized model. Each name imports its library when it is first used."""

from typing import TYPE_CHECKING

from autopar.on_demand import lazy_names

if TYPE_CHECKING:
    from autopar.integrations.adapters import add_adapter, get_peft_model
    from autopar.integrations.trainer.trainers import ParallelSeq2SeqTrainer, ParallelTrainer, ParallelTrainerMixin

__all__ = ["ParallelSeq2SeqTrainer", "ParallelTrainer", "ParallelTrainerMixin", "add_adapter", "get_peft_model"]

_HOMES = {
    "ParallelSeq2SeqTrainer": "autopar.integrations.trainer.trainers",
    "ParallelTrainer": "autopar.integrations.trainer.trainers",
    "ParallelTrainerMixin": "autopar.integrations.trainer.trainers",
    "add_adapter": "autopar.integrations.adapters",
    "get_peft_model": "autopar.integrations.adapters",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
