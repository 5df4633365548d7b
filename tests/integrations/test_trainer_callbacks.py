"""Callbacks that do something on one rank: all ranks follow its flags, and a random number is harmless or an error."""

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from autopar.errors import ConsistencyError
from tests.integrations.runs import history, launched
from tests.integrations.test_trainer import trainer_of
from tests.pool import pooled
from tests.small import gpt2
from tests.worlds import raises_everywhere

pytest.importorskip("accelerate")


class SetFlags(TrainerCallback):
    """Set flags in an event of the third step, on rank 1 or on all ranks; note the steps that evaluate and save."""

    def __init__(self, event: str, flags: list[str], everywhere: bool) -> None:
        self.seen: list[tuple[str, int]] = []
        if everywhere or dist.get_rank() == 1:
            setattr(self, event, lambda *args, **kwargs: self.set_flags(flags, *args))

    def set_flags(self, flags, args, state, control):
        for flag in flags if state.global_step >= 2 else ():
            setattr(control, flag, True)

    def on_evaluate(self, args, state, control, **kwargs):
        self.seen.append(("evaluated", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(("saved", state.global_step))

    def on_epoch_end(self, args, state, control, **kwargs):
        self.seen.append(("epoch", state.global_step))


def run(folder, tp, event, flags, everywhere):
    trainer = trainer_of(folder, tp, logging_strategy="no", max_steps=4)
    callback = SetFlags(event, flags, everywhere)
    trainer.add_callback(callback)
    trainer.train()
    weights = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    return trainer.state.global_step, callback.seen, weights


@pooled(world_size=2)
def test_flags_of_one_rank(tmp_path):
    cases = [
        (1, "on_substep_end", ["should_training_stop"], 2),
        (2, "on_step_begin", ["should_epoch_stop"], 2),
        (1, "on_step_end", ["should_evaluate", "should_save", "should_log"], 4),
    ]
    for number, (tp, event, flags, steps) in enumerate(cases):
        with launched():
            alone, together = (
                run(tmp_path / f"{number}-{everywhere}", tp, event, flags, everywhere) for everywhere in (False, True)
            )
        assert alone[:2] == together[:2] and alone[0] == steps, (event, flags, alone[:2], together[:2])
        assert all(bool((alone[2][name] == weight).all()) for name, weight in together[2].items()), (event, flags)


@pooled(world_size=2)
def test_a_stop_after_an_evaluation_on_one_rank(tmp_path):
    with launched():
        trainer = trainer_of(tmp_path, 1, logging_strategy="no", eval_strategy="steps", eval_steps=2)
        callback = SetFlags("on_evaluate", ["should_training_stop"], everywhere=False)
        trainer.add_callback(callback)
        trainer.train()
        assert trainer.state.global_step == 2


class Draw(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and dist.get_rank() == 0:
            torch.rand(1)


@pooled(world_size=2)
def test_a_random_number_of_one_rank(tmp_path):
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
                    with raises_everywhere(ConsistencyError, "random state of torch: rank 0:", "Seed all ranks"):
                        trainer.train()
                else:
                    trainer.train()
                    runs.append(history(trainer))
            assert runs[0] == runs[-1] and len(runs[0]) == 6
