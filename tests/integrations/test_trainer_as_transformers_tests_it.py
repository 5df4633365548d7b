"""``ParallelTrainer`` in the situations that transformers tries its own trainer in: small models of the user's own, odd
numbers of steps and epochs, callbacks, losses that are not finite, batches of any shape, several evaluation sets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, PretrainedConfig, PreTrainedModel, Trainer

from autopar.errors import UnsupportedModelError
from tests.integrations.runs import arguments, launched
from tests.integrations.test_trainer import config
from tests.pool import pooled
from tests.worlds import raises_everywhere

pytest.importorskip("accelerate")


class Points(Dataset[dict[str, torch.Tensor]]):
    """Points near the line 2 x + 3; every third row is longer, if ``ragged``."""

    def __init__(self, count: int = 24, seed: int = 0, ragged: bool = False, labelled: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for index in range(count):
            x = torch.randn(3 if ragged and index % 3 == 0 else 2, generator=generator)
            y = 2 * x + 3 + 0.1 * torch.randn(x.shape, generator=generator)
            self.rows.append({"x": x, "labels": y} if labelled else {"x": x})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """To the longest of this batch; -100 counts nothing."""
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], True, 0.0 if name == "x" else -100.0)
        for name in rows[0]
    }


class Bend(nn.Module):
    """A block whose hidden features tensor parallelism shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 5), nn.Linear(5, 1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(torch.tanh(self.up(h)))


class Line(nn.Module):
    """``a + b x``, bent, and its mean error; the loss is not a number for the batch that holds ``spoiled``."""

    def __init__(self, spoiled: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers, self.spoiled = nn.Linear(1, 1), nn.ModuleList([Bend(), Bend()]), spoiled

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        h = self.first(x.unsqueeze(-1))
        for layer in self.layers:
            h = layer(h)
        y = h.squeeze(-1)
        if labels is None:
            return (y,)
        counts = labels != -100
        error = (((y - labels).square() * counts).sum(1) / counts.sum(1)).mean()  # of the samples
        if self.spoiled is not None and bool((x == self.spoiled).any()):
            error = error * math.nan
        return error, y


class LineConfig(PretrainedConfig):
    """Of the model below."""

    model_type = "line"


class LineOfTransformers(PreTrainedModel):
    """The same as a model of transformers."""

    config_class = LineConfig
    base_model_prefix = "line"

    def __init__(self, settings: LineConfig | None = None) -> None:
        super().__init__(settings or LineConfig())
        self.line = Line()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        made: tuple[torch.Tensor, ...] = self.line(x, labels)
        return made


POLICY: dict[str, Any] = {
    "units": {"ffn": "inferred"},
    "prefix": {"first": "replicated"},
    "blocks": {"path": "layers", "modules": {"up": {"column": "ffn"}, "down": {"row": "ffn"}}},
}


def custom(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))}


def counted(prediction: Any) -> dict[str, float]:
    rows, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    weights = torch.arange(1.0, rows.numel() + 1).view(rows.shape) * (labels != -100)
    return {"count": len(rows), "order": float((rows * weights).double().mean())}


EPOCHS = {"max_steps": -1, "gradient_accumulation_steps": 1}
BEST = {
    "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 1,
    "metric_for_best_model": "order", "greater_is_better": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "max_steps beyond an epoch": {"max_steps": 7, "gradient_accumulation_steps": 1},
    "a fraction of epochs": {**EPOCHS, "num_train_epochs": 1.5},
    "a last batch that is short": {**EPOCHS, "num_train_epochs": 1, "points": 22},
    "a last batch that is dropped": {**EPOCHS, "num_train_epochs": 1, "points": 22, "dataloader_drop_last": True},
    "logged now and then": {**EPOCHS, "num_train_epochs": 2, "logging_steps": 4, "logging_first_step": True},
    "optimizer and scheduler of the user's": {**EPOCHS, "num_train_epochs": 1, "make": custom},
    "stopped early": {**EPOCHS, **BEST, "num_train_epochs": 6, "patience": 1},
    "warmed up": {"max_steps": 5, "warmup_steps": 2, "lr_scheduler_type": "cosine"},
}
KINDS = {"module": Line, "of transformers": LineOfTransformers}


def trainer_of(folder: Path, model: nn.Module, tp: int, **changes: Any) -> Any:
    """The plain trainer on one process, a parallel one on several."""
    world, changes = dist.get_world_size(), dict(changes)
    make, patience, points = changes.pop("make", None), changes.pop("patience", None), changes.pop("points", 24)
    kind, others = Trainer, {}
    if world > 1:
        from autopar.integrations import ParallelTrainer

        kind, others = ParallelTrainer, {"parallel_config": config(tp), "policy": POLICY}
    return kind(
        model,
        arguments(folder, max(1, world // tp), max_grad_norm=0.0, **changes),
        train_dataset=Points(points),
        eval_dataset=Points(13, 1),
        data_collator=padded,
        compute_metrics=counted,
        callbacks=[] if patience is None else [EarlyStoppingCallback(patience)],
        **(make(model) if make else {}),
        **others,
    )


def numbers(log: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The log without what is measured."""
    dropped = ("time", "per_second", "flos")
    return [{key: value for key, value in row.items() if not key.endswith(dropped)} for row in log]


def run_line(folder: Path, tp: int, kind: str, case: str) -> dict[str, Any]:
    trainer = trainer_of(folder / f"{kind}-{case}-{dist.get_world_size()}", KINDS[kind](), tp, **CASES[case])
    trainer.train()
    first = (trainer.model.line if kind == "of transformers" else trainer.model).first
    values = [first.weight.item(), first.bias.item()]
    return {"log": numbers(trainer.state.log_history), "steps": trainer.state.global_step, "values": values}


def run_evaluations(folder: Path, tp: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    trainer = trainer_of(folder, Line(), tp)
    found["ragged"] = trainer.evaluate(Points(15, 2, ragged=True))
    found["several"] = trainer.evaluate({"one": Points(5, 3), "two": Points(9, 4)})
    found["without labels"] = {"sum": float(trainer.predict(Points(7, 5, labelled=False)).predictions.sum())}
    found["labelled"] = trainer.predict(Points(7, 5)).metrics
    several = {"one": Points(5, 3), "two": Points(9, 4)}
    trainer = trainer_of(folder, Line(), tp, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.eval_dataset = several
    trainer.train()
    found["while it trains"] = {"log": numbers(trainer.state.log_history)}
    return {name: numbers([values])[0] for name, values in found.items()}


def run_spoiled(folder: Path, tp: int) -> dict[str, Any]:
    """The loss of one batch is not a number: it is left out of the log, or is in it; of several replicas, of one."""
    data, found = Points(), {}
    for keep in (True, False):
        model = Line(spoiled=data[3]["x"][0].item())
        frozen = {"max_steps": 6, "learning_rate": 0.0, "gradient_accumulation_steps": 1}
        trainer = trainer_of(folder, model, tp, logging_nan_inf_filter=keep, **frozen)
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        found[str(keep)] = [loss if math.isfinite(loss) else -1.0 for loss in losses]
    assert -1.0 in found["False"] and -1.0 not in found["True"]
    return found


def everything(folder: Path, tp: int = 1) -> Iterator[tuple[str, Any]]:
    for case in CASES:
        for kind in KINDS if "a fraction" in case or "early" in case else ["module"]:
            yield f"{kind}: {case}", run_line(folder, tp, kind, case)
    yield "evaluations", run_evaluations(folder, tp)
    yield "spoiled", run_spoiled(folder, tp)


def assert_alike(one: Any, other: Any, what: str) -> None:
    if isinstance(other, dict):
        assert one.keys() == other.keys(), (what, one, other)
        for key in other:
            assert_alike(one[key], other[key], f"{what}: {key}")
    elif isinstance(other, list):
        assert len(one) == len(other), (what, one, other)
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_alike(*pair, f"{what}: {index}")
    elif isinstance(other, float):
        assert math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5), (what, one, other)
    else:
        assert one == other, (what, one, other)


@pooled(world_size=1)
def on_one_process(folder: Path) -> None:
    with launched():
        (folder / "expected.json").write_text(json.dumps(dict(everything(folder / "plain"))))


@pooled(world_size=2)
def on_two_ranks(folder: Path, tp: int) -> None:
    with launched():
        expected = json.loads((folder / "expected.json").read_text())
        for name, found in everything(folder / f"tp{tp}", tp):
            if tp == 1 and ("short" in name or name == "spoiled"):
                continue  # replicas fill up a last batch from the first one, and each leaves its own loss out
            assert_alike(json.loads(json.dumps(found)), expected[name], name)


@pytest.mark.tier("sweep")
def test_models_of_the_users_own(tmp_path: Path) -> None:
    on_one_process(tmp_path)
    on_two_ranks(tmp_path, 1)  # two replicas
    on_two_ranks(tmp_path, 2)


@pooled(world_size=2)
def test_a_model_without_a_policy_is_refused(tmp_path: Path) -> None:
    """Also where replicas alone are asked for: nothing says what the weights are."""
    with launched():
        from autopar.integrations import ParallelTrainer

        for model, text in ((Line(), "Line is no Hugging Face model"), (LineOfTransformers(), "line")):
            with raises_everywhere(UnsupportedModelError, text, "policy"):
                ParallelTrainer(model, arguments(tmp_path, 2), parallel_config=config(1))
