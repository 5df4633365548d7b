"""A random number that a script draws on one rank only: it changes nothing, or every rank says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import autopar
from autopar.errors import ConsistencyError
from tests.integrations.runs import history, launched
from tests.integrations.test_trainer import config, trainer_of
from tests.pool import pooled
from tests.small import gpt2
from tests.worlds import raises_everywhere

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")


class Draw(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and dist.get_rank() == 0:
            torch.rand(1)


@pooled(world_size=2)
def test_a_parallel_trainer(tmp_path):
    """With dropout in the model, and without any; also before the order of samples is drawn."""
    for dropout in (0.0, 0.2):
        with launched():
            runs = []
            for drawn in (False, True):
                model = gpt2(attn_pdrop=dropout, resid_pdrop=dropout)
                trainer = trainer_of(tmp_path, 2, model=model)
                if drawn:
                    trainer.add_callback(Draw())
                    torch.rand(dist.get_rank())
                if drawn and dropout:
                    with raises_everywhere(ConsistencyError, "random state of torch: rank 0:", "seed all ranks"):
                        trainer.train()
                else:
                    trainer.train()
                    runs.append(history(trainer))
            assert runs[0] == runs[-1] and len(runs[0]) == 6


@pooled(world_size=2)
def test_a_peft_model_in_a_loop():
    """Only the adapters have dropout: masks of what is replicated are drawn by each rank."""
    ids = torch.arange(16).view(2, 8)
    targets = ["c_attn", "c_proj", "c_fc"]
    for dropout in (0.0, 0.3):
        lora = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=dropout, fan_in_fan_out=True)
        model = autopar.initialize(peft.get_peft_model(gpt2(), lora).train(), config(2))
        model(input_ids=ids, labels=ids).loss.backward()
        if dist.get_rank() == 0:
            torch.rand(1)
        if dropout:
            with raises_everywhere(ConsistencyError, "random state of torch: rank 0:", "seed all ranks"):
                model(input_ids=ids, labels=ids)
        else:
            losses = [torch.empty(()) for _ in range(2)]
            dist.all_gather(losses, model(input_ids=ids, labels=ids).loss.detach())
            assert losses[0] == losses[1]
