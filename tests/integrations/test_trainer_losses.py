"""``ParallelTrainer`` over replicas whose batches have different numbers of labels, against one process: every head."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer

import autopar
from autopar.errors import ShardWarning
from tests.harness.worlds import pooled
from tests.integrations.runs import arguments, collate, history, launched, samples
from tests.parity import close
from tests.random_models import small
from tests.small import llama

pytest.importorskip("accelerate")


def bert(kind: str) -> Any:
    return small("bert", f"BertFor{kind}")


def t5() -> Any:
    return small("t5", "T5ForConditionalGeneration")


def wav2vec2() -> Any:
    changes = {"ctc_loss_reduction": "sum", "mask_time_prob": 0.0, "mask_feature_prob": 0.0}
    return small("wav2vec2", "Wav2Vec2ForCTC", **changes)


def classes(rows: Any) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    return {**batch, "labels": torch.where(batch["labels"] == -100, -100, batch["labels"] % 3)}


def kinds(rows: Any) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    return {**batch, "labels": batch["input_ids"].sum(-1) % 3}


def spans(rows: Any) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    del batch["labels"]
    lengths = batch["attention_mask"].sum(-1)
    return {**batch, "start_positions": lengths // 3, "end_positions": lengths - 1}


def choices(rows: Any) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return {
        "input_ids": torch.stack([ids, ids.flip(1)], 1),
        "attention_mask": torch.stack([mask, mask.flip(1)], 1),
        "labels": ids.sum(-1) % 2,
    }


def sounds(rows: Any) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    waves = batch["input_ids"].float().repeat_interleave(8, 1) / 131
    return {"input_values": waves, "labels": batch["labels"].clamp(min=-100)}


def pairs(rows: Any) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    return {**batch, "next_sentence_label": batch["input_ids"].sum(-1) % 2}


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return summed(outputs, labels)


class Divided:
    """A loss of the user's, as Trainer asks for it on several processes."""

    loss_is_scaled_for_ga = True

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = summed(outputs, inputs["labels"], num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Penalized:
    def compute_loss(self: Any, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(*args, return_outputs=True, **kwargs)  # type: ignore[misc]
        loss = loss + 0.5
        return (loss, outputs) if return_outputs else loss


APART = {"average_tokens_across_devices": False, "gradient_accumulation_steps": 1}
CASES: dict[str, Any] = {  # model, collator, and what is given beside them
    "masked": (lambda: bert("MaskedLM"), collate, {}),
    "tokens": (lambda: bert("TokenClassification"), classes, {}),
    "kinds": (lambda: bert("SequenceClassification"), kinds, {}),  # takes num_items_in_batch and ignores it
    "t5": (t5, collate, {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3}),
    "smoothed": (
        t5,
        lambda rows: {**collate(rows), "decoder_input_ids": collate(rows)["input_ids"]},
        {"label_smoothing_factor": 0.1},
    ),
    "spans": (lambda: bert("QuestionAnswering"), spans, {}),
    "choices": (lambda: bert("MultipleChoice"), choices, {}),
    "sum of sequences": (wav2vec2, sounds, {}),
    "function": (llama, collate, {"func": summed}),
    "function of its own mean": (llama, collate, {"func": mean}),
    "divided": (llama, collate, {"mixin": Divided}),
    "penalized": (lambda: bert("MaskedLM"), collate, {"mixin": Penalized}),
}
APART_CASES: dict[str, Any] = {  # of which the evaluation alone is that of one process
    "apart": (llama, collate, APART),
    "divided apart": (llama, collate, {**APART, "mixin": Divided}),
}


def trained(folder: Any, case: Any, mesh: dict[str, Any] | None, replicas: int) -> Any:
    from autopar.integrations import ParallelTrainer

    build, collator, given = case
    given = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "remove_unused_columns": False, **given}
    func, mixin, kind = given.pop("func", None), given.pop("mixin", None), Trainer if mesh is None else ParallelTrainer
    trainer = (kind if mixin is None else type("Own", (mixin, kind), {}))(
        model=build(),
        args=arguments(folder, replicas, **given),
        train_dataset=samples(20),
        eval_dataset=samples(9, 1),
        data_collator=collator,
        compute_loss_func=func,
        **({} if mesh is None else {"parallel_config": mesh}),
    )
    trainer.train()
    return trainer


def evaluated(trainer: Any) -> list[float]:
    return [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]


@pooled(world_size=1)
def on_one_process(folder):
    with launched():
        for name, case in CASES.items():
            trainer = trained(folder / "run", case, None, 1)
            torch.save([history(trainer), evaluated(trainer), trainer.model.state_dict()], folder / f"{name}.pt")


def compare(folder: Any, name: str, mesh: dict[str, Any], replicas: int) -> None:
    with launched(), warnings.catch_warnings():
        warnings.simplefilter("error", ShardWarning)
        trainer = trained(folder / "run", CASES[name], mesh, replicas)
        losses, evaluations, weights = torch.load(folder / f"{name}.pt", weights_only=False)
        close(torch.tensor(history(trainer)), torch.tensor(losses), f"{name}: losses and norms", 1e-5)
        close(torch.tensor(evaluated(trainer)), torch.tensor(evaluations), f"{name}: eval_loss", 1e-5)
        if mesh.get("zero", {}).get("stage", 0) < 2:  # more cannot be undone; the losses of later steps tell
            for key, tensor in autopar.deparallelize(trainer.model).state_dict().items():
                close(tensor, weights[key], f"{name}: {key}", 1e-5)


@pytest.mark.tier("test", only=("masked", "t5", "function of its own mean"))
@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
@pooled(world_size=2)
def test_replicas_weigh_by_their_labels(folder, name):
    compare(folder, name, {}, 2)


@pytest.mark.parametrize(("name", "stage"), [("masked", 3), ("t5", 2), ("masked", 1)])
@pooled(world_size=2)
def test_zero(folder, name, stage):
    compare(folder, name, {"zero": {"stage": stage}}, 2)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("masked", {"pp": 2, "pipeline": {"num_microbatches": 2}}),
        ("t5", {"pp": 2}),
        ("masked", {"tp": 2}),
        ("kinds", {"tp": 2}),
        ("kinds", {"pp": 2}),
        ("t5", {"cp": 2}),
    ],
)
@pooled(world_size=4)
def test_other_axes(folder, name, mesh):
    compare(folder, name, mesh, 2)


@pooled(world_size=2)
def test_evaluation_where_each_replica_trains_by_its_own_mean(tmp_path):
    for case in APART_CASES.values():
        with launched():
            trainer = trained(tmp_path / "run", (*case[:2], {**case[2], "max_steps": 1}), {}, 2)
            model = llama()
            model.load_state_dict(autopar.deparallelize(trainer.model).state_dict())
            padded, loss = [collate(samples(9, 1)[start : start + 4]) for start in range(0, 9, 4)], 0.0
            for batch in padded:  # a batch counts by its samples, as in Trainer
                loss += float(model.eval()(**batch).loss.detach()) * len(batch["input_ids"]) / 9
            assert abs(evaluated(trainer)[-1] - loss) < 1e-5, (evaluated(trainer), loss)


@pooled(world_size=2)
def test_a_loss_that_no_number_of_labels_weighs_warns():
    class Mean:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            loss = mean(outputs, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    with launched():
        with pytest.warns(ShardWarning) as told:
            trained("run", (llama, collate, {"mixin": Mean, "max_steps": 2}), {}, 2)
        told = [str(each.message) for each in told if "averaged equally" in str(each.message)]
        assert len(told) == 1
        assert re.fullmatch(
            r"Own.compute_loss: the losses of replicas with \d+ and \d+ labels are averaged equally, which is correct "
            r"only if each is divided by num_items_in_batch and multiplied by accelerator.num_processes.\n"
            r"  If so, set loss_is_scaled_for_ga = True in the class to disable this warning.",
            told[0],
        ), told
        with pytest.warns(ShardWarning, match="BertForPreTraining: the losses of replicas with .* it is unknown"):
            trained("run", (lambda: bert("PreTraining"), pairs, {"max_steps": 1, "eval_strategy": "no"}), {}, 2)
