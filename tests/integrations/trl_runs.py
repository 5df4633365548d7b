"""Runs of TRL's trainers on a tiny Llama: what plain processes log, and what the ranks of a world log."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.integrations.runs import BATCH
from tests.small import llama

WORDS = [f"w{number}" for number in range(120)]
SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-4,
    "gradient_accumulation_steps": 2,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
SAMPLED = {  # of trainers that sample: an evaluation between, and long enough completions that some end by themselves
    "max_steps": 5,
    "num_generations": 2,
    "max_completion_length": 6,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "temperature": 0.9,
}
TIMED = ("runtime", "per_second", "total_flos", "step_time")  # replicas pad to other lengths


def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {word: place + 3 for place, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def data(kind, count=24):
    import datasets

    source = random.Random(0)

    def text(low, high):
        return " ".join(source.choices(WORDS, k=source.randint(low, high)))

    if kind == "SFT":
        return datasets.Dataset.from_list([{"text": text(4, 10)} for _ in range(count)])
    rows = [{"prompt": text(3, 4) + " ", "chosen": text(2, 5), "rejected": text(2, 5)} for _ in range(count)]
    if kind == "KTO":
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": place % 2 == 0}
            for place, row in enumerate(rows)
        ]
    elif kind in ("GRPO", "RLOO", "OnlineDPO"):
        rows = [{"prompt": row["prompt"], "wanted": place % 7} for place, row in enumerate(rows)]
    return datasets.Dataset.from_list(rows)


def even_words(completions, wanted, log_metric=None, **others):
    """Prefer some words, others for each prompt; and short answers."""
    scores = []
    for text, number in zip(completions, wanted, strict=True):
        words = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        scores.append(sum((word + number) % 3 for word in words) - 0.1 * len(words) ** 2)
    if log_metric is not None:
        log_metric("best", max(scores))
    return scores


def save_model(folder: Path, seed: int = 0) -> None:
    """Save a model whose path is known, as it has to be where TRL makes the reference model."""
    llama(seed, eos_token_id=1, pad_token_id=0).save_pretrained(folder / "model")


def trainer_of(kind, folder, config=None, trl=None, plain=None, **changes):
    """Make a trainer of TRL; a parallel one with ``config``.

    Args:
        changes: arguments, or those of the trainer itself (``model``, ``peft_config``, ``reward_funcs``).
    """
    import trl as library

    from autopar.integrations import ParallelTrainerMixin

    trl = trl or library
    plain = plain or getattr(trl, f"{kind}Trainer")
    replicas = dist.get_world_size() // (1 if config is None else config["model_parallelism"]["tensor_parallel_size"])
    own = ("model", "peft_config", "ref_model", "reward_funcs", "eval_dataset", "reward_processing_classes")
    given = {name: changes.pop(name) for name in own if name in changes}
    batch = {f"per_device_{name}_batch_size": BATCH // replicas for name in ("train", "eval")}
    args = getattr(trl, f"{kind}Config")(output_dir=str(folder / "run"), **{**batch, **SETTINGS, **changes})
    made = plain if config is None else type(f"Parallel{kind}Trainer", (ParallelTrainerMixin, plain), {})
    rows = data(kind)
    if kind in ("GRPO", "RLOO", "OnlineDPO"):
        given.setdefault("reward_funcs", even_words)
    return made(
        args=args,
        train_dataset=rows,
        processing_class=tokenizer(),
        **{"model": LlamaForCausalLM.from_pretrained(folder / "model"), "eval_dataset": rows.select(range(8)), **given},
        **({} if config is None else {"parallel_config": config}),
    )


def history(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without times."""
    return [{k: v for k, v in row.items() if not k.endswith(TIMED)} for row in trainer.state.log_history]


def compare(trainer: Any, file: Path, tolerance: float = 1e-5) -> None:
    """Train and evaluate. A plain trainer leaves what it logs in ``file``; a parallel one must log the same."""
    trainer.train()
    trainer.evaluate()
    mine = history(trainer)
    if not hasattr(trainer, "mpu"):
        if dist.get_rank() == 0:
            file.write_text(json.dumps(mine))
        return
    for one, other in zip(mine, json.loads(file.read_text()), strict=True):
        assert one.keys() == other.keys()
        # rewards of the first step are 0: which of two is larger is a matter of rounding
        names = [name for name in one if not name.endswith("accuracies")]
        here, there = (torch.tensor([row[name] for name in names], dtype=torch.float64) for row in (one, other))
        assert torch.allclose(here, there, rtol=tolerance, atol=tolerance, equal_nan=True), (file.stem, one, other)
