"""Training loops of other libraries with a parallelized model; each name imports its library at its first use."""

from typing import TYPE_CHECKING

from autopar.registry import lazy_names

if TYPE_CHECKING:
    from autopar.integrations.peft import add_adapter as add_adapter, get_peft_model as get_peft_model
    from autopar.integrations.trainer.trainers import (
        ParallelSeq2SeqTrainer as ParallelSeq2SeqTrainer,
        ParallelTrainer as ParallelTrainer,
        ParallelTrainerMixin as ParallelTrainerMixin,
    )

_HOMES = {
    name: f"autopar.integrations.{home}"
    for home, names in {
        "peft": "add_adapter get_peft_model",
        "trainer.trainers": (
            "ParallelDPOTrainer ParallelGRPOTrainer ParallelKTOTrainer ParallelRLOOTrainer ParallelRewardTrainer "
            "ParallelSFTTrainer ParallelSeq2SeqTrainer ParallelTrainer ParallelTrainerMixin"
        ),
    }.items()
    for name in names.split()
}
__all__ = list(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
