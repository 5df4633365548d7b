"""Checkpoints of a trainer: its folders, with the training state in shards that any mesh can read.

``checkpoint-N`` holds the files of ``save_pretrained`` and of the trainer. The folder :data:`SHARDS` replaces
``optimizer.pt``: weights, fp32 weights and moments, one file per rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from autopar.checkpoint.random_states import restore, take
from autopar.checkpoint.staging import MANIFEST
from autopar.compat.peft import is_peft_model
from autopar.errors import CheckpointError
from autopar.integrations.trainer.steps import ParallelBase

SHARDS = "optimizer_shards"
_TIMEOUT = 600.0  # seconds to wait for the other ranks at a save or a load, since callbacks may delay rank 0


class CheckpointMixin(ParallelBase):
    """Saving and resuming; every rank must call these methods."""

    _restored: Any = None  # random states of the checkpoint from which training resumes

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model on all ranks. Trainers of transformers 5.20 call ``_save`` on the main process only."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the files of ``save_pretrained`` (for a ``PeftModel`` its adapters), processing class and arguments."""
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        what = "adapter_only" if is_peft_model(self.model) else "merge_checkpoints"
        self.model.save_parallelized(folder, timeout=_TIMEOUT, **{what: True})
        if not self.args.should_save:
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(str(folder))
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model.save_parallelized(Path(output_dir) / SHARDS, timeout=_TIMEOUT, optimizer=self._torch_optimizer())
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check that the folder has a training state, which is loaded after the optimizer is created."""
        shards = Path(resume_from_checkpoint) / SHARDS
        if not (shards / MANIFEST).is_file():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no {SHARDS}, so training cannot resume from it: it was written by "
                "another trainer or with save_only_model\n"
                "  Start from its weights: from_pretrained(folder), and train() without resume_from_checkpoint."
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        shards = Path(checkpoint) / SHARDS
        self.model.from_parallelized(shards, timeout=_TIMEOUT, optimizer=self._torch_optimizer())
        self._restored = take()
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._restored is not None:
            restore(self._restored)  # the trainer's file of a rank is valid in one mesh only

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        model = self.model
        if (folder / SHARDS / MANIFEST).is_file():
            optimizer = self._torch_optimizer() if model._autopar.dp.step is not None else None  # with fp32 weights
            model.from_parallelized(folder / SHARDS, timeout=_TIMEOUT, optimizer=optimizer)
        elif is_peft_model(model):
            for name in model.peft_config:  # the trainer would read only the first active adapter
                own = folder if name == "default" else folder / name
                model.load_adapter(str(own), name, is_trainable=True, autocast_adapter_dtype=False)
            self._refresh_masters()
        else:
            super()._load_best_model()
            self._refresh_masters()

    def _refresh_masters(self) -> None:
        """Copy the loaded weights of the model into the optimizer's fp32 weights."""
        step = self.model._autopar.dp.step
        for parameter in step.names if step is not None else ():
            owned = parameter.requires_grad and step.owns(parameter)
            if owned and (weight := step.master(parameter)) is not None:
                weight.data.copy_(parameter.data)
