"""``ParallelTrainer`` and TRL's trainers with adapters of PEFT, against the plain ones on one process."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.features.peft.adapted import peft, with_lora
from tests.harness.worlds import pooled
from tests.integrations.runs import assert_same, assert_same_weights, facts, history, launched, one_process
from tests.integrations.test_trainer import trainer_of
from tests.integrations.test_trainer_checkpoints import SAVED, loss_of
from tests.small import llama

pytest.importorskip("accelerate")

MODES = {"plain": {}, "smoothed": {"label_smoothing_factor": 0.1, "train_sampling_strategy": "group_by_length"}}


def adapted(seed=0, **changes):
    return with_lora(llama(seed, **changes), target_modules="all-linear", modules_to_save=["lm_head"])


@pooled(world_size=1)
def on_one_process(folder):
    with launched():
        for name, changes in MODES.items():
            one_process(folder, name, adapted(), **changes)


def compare(folder, name, tp, pp=1, **changes):
    trainer = trainer_of(folder / "run", tp, pp, adapted(), **MODES[name], **changes)
    trainer.train()
    assert_same(facts(trainer, trainer.evaluate()), json.loads((folder / f"{name}.json").read_text()))
    saved = folder / f"{name}-{dist.get_world_size()}-{tp}-{pp}-{len(changes)}"
    trainer.save_model(str(saved))
    if dist.get_rank() == 0:
        names = {path.name for path in saved.iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", "training_args.bin"} <= names
        assert "model.safetensors" not in names
        assert_same_weights(peft.PeftModel.from_pretrained(llama(), saved), folder, name)


@pooled(world_size=4)
def test_replicas_and_stages(folder):
    with launched():
        compare(folder, "smoothed", 2)
        compare(folder, "plain", 2, 2)


@pooled(world_size=2)
def test_folders_and_going_on(tmp_path: Path):
    with launched():
        model = adapted(attention_dropout=0.2)
        trainer = trainer_of(tmp_path / "run", 2, 1, model, **SAVED)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint)
        files = {path.name for path in best.iterdir()}
        assert files == {
            "README.md", "adapter_config.json", "adapter_model.safetensors", "optimizer_shards", "scheduler.pt",
            "trainer_state.json", "training_args.bin", "rng_state_0.pth", "rng_state_1.pth",
        }  # fmt: skip
        dist.barrier()
        plain = peft.PeftModel.from_pretrained(llama(), best)
        assert abs(loss_of(plain) - loss_of(trainer.model)) < 1e-5

        changes = {**SAVED, "load_best_model_at_end": False, "save_strategy": "no"}
        other = adapted(attention_dropout=0.2)
        for parameter in other.parameters():
            parameter.data.mul_(0.5) if parameter.requires_grad else None
        resumed = trainer_of(tmp_path / "run", 2, 1, other, **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        again = history(trainer)
        assert history(resumed) == again

        alone = adapted(attention_dropout=0.2)
        alone.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        trainer = trainer_of(tmp_path / "alone", 2, 1, alone, save_only_model=True, **SAVED)
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(tmp_path / "alone" / best.name)
        assert abs(loss_of(trainer.model) - loss_of(plain)) < 1e-5
        trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        assert trained and not any(".second." in name for name in trained)
        half = trainer_of(tmp_path / "half", 2, 1, adapted(), save_only_model=True, bf16=True, **SAVED)
        half.train()
        evaluated = [row["eval_loss"] for row in half.state.log_history if "eval_loss" in row]
        assert half.evaluate()["eval_loss"] == min(evaluated)
        assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
        if dist.get_rank() == 0:
            found = load_file(tmp_path / "alone" / best.name / "adapter_model.safetensors")
            expected = load_file(best / "adapter_model.safetensors")
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
