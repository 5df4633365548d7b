"""The trainers of transformers with tensor, pipeline and data parallelism."""

from __future__ import annotations

from transformers import Seq2SeqTrainer, Trainer

from autopar.integrations.trainer.mixin import ParallelTrainerMixin

__all__ = ["ParallelSeq2SeqTrainer", "ParallelTrainer"]


class ParallelTrainer(ParallelTrainerMixin, Trainer):
    """transformers' ``Trainer`` with a model that is tensor, pipeline and data parallel.

    A script becomes parallel by this class and one argument::

        trainer = ParallelTrainer(model=model, args=args, train_dataset=dataset, parallel_config="parallel.yaml")

    Every process runs the script. See :class:`~autopar.integrations.trainer.mixin.ParallelTrainerMixin`.
    """


class ParallelSeq2SeqTrainer(ParallelTrainerMixin, Seq2SeqTrainer):
    """``Seq2SeqTrainer``, as :class:`ParallelTrainer`; ``predict_with_generate`` gives every sample once."""
