"""Folders of a parallel trainer and runs that go on from them; callbacks that do something on one rank."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM, TrainerCallback

from autopar.errors import CheckpointError, ConsistencyError
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.integrations.runs import arguments, collate, history, launched, samples
from tests.integrations.test_trainer import trainer_of
from tests.small import gpt2, llama

pytest.importorskip("accelerate")

SAVED = {
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
    "load_best_model_at_end": True,
    "learning_rate": 3e-2,
}


class Seen(TrainerCallback):
    """What callbacks see, and on which ranks."""

    def __init__(self):
        self.logs, self.saves = [], []

    def on_log(self, args, state, control, logs=None, **others):
        self.logs.append((state.is_world_process_zero, dict(logs)))

    def on_save(self, args, state, control, **others):
        self.saves.append(state.global_step)


def dropping(seed=0):
    return llama(seed, attention_dropout=0.2)


def loss_of(model):
    torch.manual_seed(0)
    ids = torch.randint(1, 131, (2, 9))
    with torch.no_grad():
        return model.eval()(input_ids=ids, labels=ids).loss


@pooled(world_size=4)
def test_folders_and_going_on(tmp_path):
    with launched():
        out = tmp_path / "run"
        trainer = trainer_of(out, 2, 1, dropping(), save_total_limit=2, **SAVED)
        seen = Seen()
        trainer.add_callback(seen)
        trainer.train()
        assert [first for first, _ in seen.logs] == [dist.get_rank() == 0] * len(seen.logs)
        assert seen.saves == [2, 4, 6]
        evaluated = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
        best = min(evaluated, key=evaluated.__getitem__)
        assert trainer.state.best_model_checkpoint == str(out / f"checkpoint-{best}")
        assert sorted(path.name for path in out.iterdir()) == sorted({f"checkpoint-{best}", "checkpoint-6"})
        assert abs(trainer.evaluate()["eval_loss"] - evaluated[best]) < 1e-6
        dist.barrier()
        plain = LlamaForCausalLM.from_pretrained(out / f"checkpoint-{best}")
        assert abs(loss_of(plain) - loss_of(trainer.model)) < 1e-5
        trainer.save_model()
        dist.barrier()  # rank 0 writes the arguments after the model
        names = {path.name for path in out.iterdir()}
        assert {"config.json", "model.safetensors", "training_args.bin", f"checkpoint-{best}"} <= names

        # A second run to compare with keeps all its folders.
        saved = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 3e-2}
        again = trainer_of(tmp_path / "again", 2, 1, dropping(), **saved)
        again.train()
        files = {path.name for path in (tmp_path / "again" / "checkpoint-4").iterdir()}
        assert files == {
            "config.json", "generation_config.json", "model.safetensors", "optimizer_shards", "scheduler.pt",
            "trainer_state.json", "training_args.bin", *(f"rng_state_{rank}.pth" for rank in range(4)),
        }  # fmt: skip
        resumed = trainer_of(tmp_path / "again", 2, 1, dropping(seed=5), **{**saved, "save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-2"))
        assert history(resumed) == history(again)  # bit for bit, masks of dropout too
        for mine, theirs in zip(resumed.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pooled(world_size=2)
def test_muon_in_shards_goes_on_with_whole_matrices(tmp_path):
    with launched():
        from autopar.integrations import ParallelTrainer

        runs = []
        for whole, changes in (("sharded", {"save_strategy": "steps", "save_steps": 2}), ("owned", {})):
            model = llama()
            made = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
            trainer = ParallelTrainer(
                model=model,
                args=arguments(tmp_path, 1, **changes),
                train_dataset=samples(40),
                data_collator=collate,
                optimizers=(made, None),
                parallel_config={"tp": 2, "optimizer": {"full_matrix": whole}},
            )
            assert bool(made._autopar.whole) is (whole == "owned")
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if runs else None)
            runs.append(trainer)
        assert history(runs[0]) == history(runs[1])
        for mine, theirs in zip(*(run.model.parameters() for run in runs), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.tier("all")
def test_another_mesh(tmp_path):
    without_dropout(tmp_path)
    go_on_elsewhere(tmp_path, 1, 2)


@pooled(world_size=4)
def without_dropout(folder):
    with launched():
        trainer = trainer_of(folder, 2, 1, save_strategy="steps", save_steps=3)
        trainer.train()
        if dist.get_rank() == 0:
            (folder / "history.json").write_text(json.dumps(history(trainer)))


@pooled(world_size=2)
def go_on_elsewhere(folder, tp, pp):
    """On half as many ranks the losses are those of the run that was not interrupted."""
    with launched():
        trainer = trainer_of(folder, tp, pp, llama(7), save_strategy="no")
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        expected = torch.tensor(json.loads((folder / "history.json").read_text()))
        assert torch.allclose(torch.tensor(history(trainer)), expected, rtol=1e-5, atol=1e-5)


@pooled(world_size=2)
def test_the_model_alone(tmp_path):
    with launched():
        trainer = trainer_of(tmp_path, 2, 1, save_only_model=True, **SAVED)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint)
        assert not (best / "optimizer_shards").exists()
        assert abs(loss_of(LlamaForCausalLM.from_pretrained(best)) - loss_of(trainer.model)) < 1e-5
        with raises_everywhere(CheckpointError, "has no optimizer_shards", "from_pretrained(folder)"):
            trainer.train(resume_from_checkpoint=str(best))


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
    with launched():
        trainer = trainer_of(tmp_path, 1, logging_strategy="no", eval_strategy="steps", eval_steps=2)
        trainer.add_callback(SetFlags("on_evaluate", ["should_training_stop"], everywhere=False))
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
