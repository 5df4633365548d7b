"""Runs of a trainer on a tiny Llama: what one process does, and what the ranks of a world do."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from tests.parity import all_close
from tests.small import llama

LENGTH = 12
BATCH = 4  # samples of all replicas


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Random sequences of one length; the pages of the documentation call one ``dataset``."""

    def __init__(self, count: int = 16) -> None:
        self.ids = torch.randint(0, 131, (count, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@contextmanager
def launched() -> Iterator[None]:
    """The environment that torchrun makes, for this rank of the world; accelerate starts anew in it, and after it."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    rank, world = dist.get_rank(), dist.get_world_size()
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in places.items()} if world > 1 else {})
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    reset()
    try:
        yield
    finally:
        reset()


def samples(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences of different lengths, of whose labels a part counts."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, LENGTH, (1,), generator=generator))
        ids = torch.randint(1, 131, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, length - 2, (1,), generator=generator))] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to one length."""

    def stacked(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.stack(
            [torch.nn.functional.pad(tensor, (0, LENGTH - len(tensor)), value=value) for tensor in tensors]
        )

    return {
        "input_ids": stacked([row["input_ids"] for row in rows], 0),
        "attention_mask": stacked([torch.ones_like(row["input_ids"]) for row in rows], 0),
        "labels": stacked([row["labels"] for row in rows], -100),
    }


def arguments(folder: Path, replicas: int, **changes: Any) -> TrainingArguments:
    """Six steps of two batches, clipped; the batch size is that of one of the replicas."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH // replicas,
        "per_device_eval_batch_size": BATCH // replicas,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    return TrainingArguments(**{**settings, **changes})


def metrics(prediction: Any) -> dict[str, float]:
    """Numbers that tell how many samples there were, which, and in which order."""
    logits = torch.tensor(prediction.predictions).double()  # [samples, LENGTH, vocabulary]
    order = torch.arange(1.0, len(logits) + 1, dtype=torch.float64)[:, None, None]
    return {
        "samples": len(prediction.label_ids),
        "labels": int((prediction.label_ids * (1 + prediction.label_ids % 7)).sum()),
        "logits": float((logits * order).mean()),
    }


def history(trainer: Any) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]


def facts(trainer: Any, evaluated: dict[str, float]) -> dict[str, Any]:
    """What a run must have alike."""
    kept = {name: evaluated[name] for name in ("eval_loss", "eval_samples", "eval_labels", "eval_logits")}
    return {"history": history(trainer), "evaluated": kept, "flos": trainer.state.total_flos}


def one_process(folder: Path, name: str, model: Any = None, **changes: Any) -> None:
    """Run the plain trainer, and leave its facts and weights in ``folder``."""
    trainer = Trainer(
        model=llama() if model is None else model,
        args=arguments(folder / name, 1, **changes),
        train_dataset=samples(40),
        eval_dataset=samples(21, 1),
        data_collator=collate,
        compute_metrics=metrics,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    (folder / f"{name}.json").write_text(json.dumps(facts(trainer, evaluated)))
    torch.save(trainer.model.state_dict(), folder / f"{name}.pt")


def assert_same(mine: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Compare facts; numbers to ``tolerance``, counts exactly."""
    assert len(mine["history"]) == len(expected["history"])
    numbers, others = (
        [*(number for step in run["history"] for number in step), *run["evaluated"].values(), run["flos"]]
        for run in (mine, expected)
    )
    for one, other in zip(numbers, others, strict=True):
        assert abs(one - other) <= tolerance * (1 + abs(other)), (mine, expected)
    for name in ("eval_samples", "eval_labels"):
        assert mine["evaluated"][name] == expected["evaluated"][name]


def assert_same_weights(model: Any, folder: Path, name: str, tolerance: float = 1e-5) -> None:
    """Compare the whole weights of a plain model with those of the run ``name``."""
    all_close(model.state_dict(), torch.load(folder / f"{name}.pt", weights_only=True), "{}", tolerance)
