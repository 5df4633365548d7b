"""Other libraries' training loops with a parallelized model. Each name imports its library when it is first used."""

from autopar.registry import lazy_names

_HOMES = {
    name: f"autopar.integrations.{home}"
    for home, names in {
        "adapters": "add_adapter get_peft_model",
        "trainer.trainers": (
            "ParallelDPOTrainer ParallelGRPOTrainer ParallelKTOTrainer ParallelRLOOTrainer ParallelRewardTrainer "
            "ParallelSFTTrainer ParallelSeq2SeqTrainer ParallelTrainer ParallelTrainerMixin"
        ),
    }.items()
    for name in names.split()
}
__all__ = list(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
