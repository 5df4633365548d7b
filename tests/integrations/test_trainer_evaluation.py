"""``evaluate`` and ``predict`` of a parallel trainer: every sample once, in the order of the dataset."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers.trainer_utils import EvalPrediction

from tests.harness.worlds import pooled
from tests.integrations.runs import BATCH, arguments, collate, launched, metrics, samples
from tests.random_models import small
from tests.small import llama

pytest.importorskip("accelerate")

KINDS = {
    "kept on the CPU": {"eval_accumulation_steps": 2},
    "loss alone": {"prediction_loss_only": True},
    "with losses and inputs": {"include_for_metrics": ["loss", "inputs"]},
    "batch by batch": {"batch_eval_metrics": True, "include_for_metrics": ["loss"]},
    "batches apart": {"eval_do_concat_batches": False},
}


@pooled(world_size=1)
def on_one_process(folder):
    with launched():
        evaluate_all(folder, 1, 1)


def evaluate_all(folder, tp, pp):
    """Every kind of evaluation; with more than one rank compared with what one process left in the folder."""
    world = dist.get_world_size()
    kinds = KINDS if pp == 1 else ["kept on the CPU", "loss alone"]
    found = {name: evaluate(folder, tp, pp, count=21, **KINDS[name]) for name in kinds}
    found["few samples"] = evaluate(folder, tp, pp, count=5)
    found["one sample"] = evaluate(folder, tp, pp, count=1)
    found["chosen tokens"] = evaluate(folder, tp, pp, count=21, choose=True)
    found["classes"] = classify(folder, tp, pp)
    if pp == 1:
        found["generated"] = generate(folder, tp)
        found["generated, sharded over replicas"] = generate(folder, tp, {"zero": {"stage": 3}})
    if world == 1:
        (folder / "found.json").write_text(json.dumps(found))
        return
    expected = json.loads((folder / "found.json").read_text())
    for name, numbers in found.items():
        assert numbers.keys() == expected[name].keys(), name
        for key, value in numbers.items():
            other = expected[name][key]
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5, err_msg=f"{name}: {key}")


def parallel(kind, folder, tp, pp, model, args=None, changes=None, sections=None, **others):
    """A trainer of transformers on one process, a parallel one in a world."""
    import transformers

    from autopar import integrations

    world = dist.get_world_size()
    more = {}
    if world > 1:
        kind = f"Parallel{kind}"
        more = {"parallel_config": {"tp": tp, "pp": pp, **(sections or {})}}
    args = args or arguments(folder / "run", world // (tp * pp), **(changes or {}))
    return getattr(integrations if world > 1 else transformers, kind)(
        model=model, args=args, **{"data_collator": collate, **others, **more}
    )


def evaluate(folder, tp, pp, count, choose=False, **changes):
    seen = {}

    def compute(prediction: EvalPrediction, compute_result=True):
        if changes.get("batch_eval_metrics"):
            seen["batches"] = seen.get("batches", 0) + len(prediction.label_ids)
            seen["losses"] = seen.get("losses", 0.0) + float(prediction.losses.sum())
            return dict(seen) if compute_result else {}
        if not changes.get("eval_do_concat_batches", True):
            assert isinstance(prediction.predictions, list)
            whole = [np.concatenate(parts) for parts in (prediction.predictions, prediction.label_ids)]
            return metrics(EvalPrediction(*whole))
        found = metrics(prediction) if not choose else {"tokens": prediction.predictions.tolist()}
        for name in ("inputs", "losses"):
            if getattr(prediction, name) is not None:
                found[name] = float(np.sum(getattr(prediction, name)))
                found[f"{name} counted"] = len(getattr(prediction, name))
        return found

    trainer = parallel(
        "Trainer",
        folder,
        tp,
        pp,
        llama(),
        compute_metrics=compute,
        preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1)) if choose else None,
        changes=changes,
    )
    data = samples(count, 1)
    found = trainer.evaluate(data)
    if not changes and not choose:
        predicted = trainer.predict(data)
        assert len(predicted.predictions) == len(predicted.label_ids) == count
        found["prediction"] = float((predicted.predictions * np.arange(1, count + 1)[:, None, None]).mean())
        found["test loss"] = predicted.metrics["test_loss"]
    timed = ("runtime", "per_second", "preparation_time")
    return {name: value for name, value in found.items() if not name.endswith(timed)}


def classify(folder, tp, pp):
    """A model whose loss is a mean over samples, whatever the number of items."""
    model = small("bert", "BertForSequenceClassification")
    rows = [{"input_ids": row["input_ids"], "labels": torch.tensor(i % 3)} for i, row in enumerate(samples(11, 2))]

    def pad(batch):
        padded = collate([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in batch])
        return {**padded, "labels": torch.stack([row["labels"] for row in batch])}

    def compute(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    trainer = parallel("Trainer", folder, tp, pp, model, data_collator=pad, compute_metrics=compute)
    found = trainer.evaluate(rows)
    return {name: found[name] for name in ("eval_loss", "eval_accuracy")}


def generate(folder, tp, sections=None):
    """Greedy tokens of an encoder-decoder."""
    from transformers import Seq2SeqTrainingArguments

    model = small("t5", "T5ForConditionalGeneration")
    replicas = dist.get_world_size() // tp
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder / "run"),
        per_device_eval_batch_size=BATCH // replicas,
        predict_with_generate=True,
        generation_max_length=7,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = parallel("Seq2SeqTrainer", folder, tp, 1, model, args=args, sections=sections)
    predicted = trainer.predict(samples(5, 4))
    assert len(predicted.predictions) == 5
    return {
        "tokens": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
        # Seq2SeqTrainer counts a last batch that is not full as one that is; here every sample counts once
        "loss": trainer.evaluate(samples(8, 4))["eval_loss"],
    }


@pytest.mark.every_case
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
@pooled(world_size=4)
def test_on_four_ranks(folder, tp, pp):
    with launched():
        evaluate_all(folder, tp, pp)
