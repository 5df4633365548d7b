"""Runs of TRL's trainers on a tiny Llama: what plain processes log, and what the ranks of a world log."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from tests.integrations.runs import BATCH
from tests.small import llama

SAMPLING = ("GRPO", "RLOO", "OnlineDPO")
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
GROUPS = {  # an evaluation between the steps, and completions of which some end by themselves
    "max_steps": 5,
    "num_generations": 2,
    "max_completion_length": 6,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "temperature": 0.9,
}
LIMITS: dict[str, dict[str, Any]] = {
    "GRPO": GROUPS,
    "RLOO": GROUPS,
    "OnlineDPO": {"max_new_tokens": 6, "max_length": 32},
}
OWN = ("model", "peft_config", "ref_model", "reward_funcs", "reward_processing_classes", "eval_dataset")
TIMED = ("runtime", "per_second", "total_flos", "step_time")  # replicas pad to other lengths


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {word: place + 3 for place, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def data(kind: str, count: int = 24) -> Any:
    import datasets

    datasets.disable_progress_bars()
    source = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(source.choices(WORDS, k=source.randint(low, high)))

    if kind == "SFT":
        return datasets.Dataset.from_list([{"text": text(4, 10)} for _ in range(count)])
    rows: list[Any] = [{"prompt": text(3, 4) + " ", "chosen": text(2, 5), "rejected": text(2, 5)} for _ in range(count)]
    if kind == "KTO":
        rows = [{"completion": row["chosen"], "label": place % 2 == 0, **row} for place, row in enumerate(rows)]
        rows = [{name: row[name] for name in ("prompt", "completion", "label")} for row in rows]
    elif kind in SAMPLING:
        rows = [{"prompt": row["prompt"], "wanted": place % 7} for place, row in enumerate(rows)]
    return datasets.Dataset.from_list(rows)


def even_words(completions: list[str], wanted: list[int], log_metric: Any = None, **others: Any) -> list[float]:
    """Prefer some words, others for each prompt; and short answers."""
    scores = []
    for text, number in zip(completions, wanted, strict=True):
        words = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        scores.append(sum((word + number) % 3 for word in words) - 0.1 * len(words) ** 2)
    if log_metric is not None:
        log_metric("best", max(scores))
    return scores


def judge() -> LlamaForSequenceClassification:
    """A model that gives one number."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 37}
    more = {"num_hidden_layers": 1, "num_labels": 1, "pad_token_id": 0, "initializer_range": 0.3}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=131, **sizes, **more))


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM", **changes})


def save_model(folder: Path, **changes: Any) -> None:
    """Save a model whose path is known, as it has to be where TRL makes the reference model."""
    llama(0, eos_token_id=1, pad_token_id=0, **changes).save_pretrained(folder / "model")


def config(tp: int, **others: Any) -> dict[str, Any]:
    return {"model_parallelism": {"tensor_parallel_size": tp}, **others}


def trainer_of(kind: str, folder: Path, parallel: Any = None, plain: Any = None, **changes: Any) -> Any:
    """Make a trainer of TRL."""
    import trl
    from trl.experimental import online_dpo

    from autopar import integrations

    home = online_dpo if kind == "OnlineDPO" else trl
    replicas = dist.get_world_size()
    if parallel is not None:
        sizes = parallel["model_parallelism"]
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
            replicas //= sizes.get(name, 1)
    given = {name: changes.pop(name) for name in OWN if name in changes}
    batch = {f"per_device_{name}_batch_size": BATCH // replicas for name in ("train", "eval")}
    limits = LIMITS.get(kind, {"max_length": 16})
    args = getattr(home, f"{kind}Config")(
        **{"output_dir": str(folder / "run"), **batch, **SETTINGS, **limits, **changes}
    )
    made = plain or getattr(home, f"{kind}Trainer")
    if parallel is not None:
        named = f"Parallel{kind}Trainer"
        mixed = type(named, (integrations.ParallelTrainerMixin, made), {})
        made = getattr(integrations, named, mixed) if plain is None else mixed
        given["parallel_config"] = parallel
    if kind in SAMPLING:
        given.setdefault("reward_funcs", even_words)
    if "model" not in given:
        given["model"] = LlamaForCausalLM.from_pretrained(folder / "model")
    rows = data(kind)
    evaluated = None if kind == "OnlineDPO" else rows.select(range(7 if kind == "SFT" else 8))
    return made(args=args, train_dataset=rows, processing_class=tokenizer(), **{"eval_dataset": evaluated, **given})


def history(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without times."""
    return [{k: v for k, v in row.items() if not k.endswith(TIMED)} for row in trainer.state.log_history]


def compare(trainer: Any, file: Path) -> None:
    """Train and evaluate. A plain trainer leaves what it logs in ``file``; a parallel one must log the same to 1e-5."""
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    mine = history(trainer)
    if not hasattr(trainer, "mpu"):
        if dist.get_rank() == 0:
            file.write_text(json.dumps(mine))
        return
    expected = json.loads(file.read_text())
    if dist.get_rank() == 0:  # OnlineDPO logs a number of the first process
        for one, other in zip(mine, expected, strict=True):
            assert one.keys() == other.keys()
            # rewards of the first step are 0: which of two is larger is a matter of rounding
            names = [name for name in one if not name.endswith("accuracies")]
            here, there = (_numbers(row, names) for row in (one, other))
            assert torch.allclose(here, there, rtol=1e-5, atol=1e-5, equal_nan=True), (file.stem, one, other)


def _numbers(row: dict[str, Any], names: list[str]) -> torch.Tensor:
    """The numbers of a row, NaN where TRL logs None: a mean over no completion."""
    return torch.tensor([float("nan") if row[name] is None else row[name] for name in names], dtype=torch.float64)
