"""Trainers of TRL with ``ParallelTrainerMixin``, against themselves on one process."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from autopar.errors import ConfigError
from tests.integrations.runs import BATCH, launched
from tests.pool import pooled
from tests.small import llama
from tests.worlds import raises_everywhere

pytest.importorskip("trl")

WORDS = [f"w{number}" for number in range(120)]
SETTINGS = {
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
    "max_length": 16,
}


def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {word: place + 3 for place, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def data(kind):
    import datasets

    source = random.Random(0)

    def text(low, high):
        return " ".join(source.choices(WORDS, k=source.randint(low, high)))

    if kind == "SFT":
        return datasets.Dataset.from_list([{"text": text(4, 10)} for _ in range(24)])
    rows = [{"prompt": text(3, 4) + " ", "chosen": text(2, 5), "rejected": text(2, 5)} for _ in range(24)]
    return datasets.Dataset.from_list(rows)


def run(kind, folder, tp, pp=1, peft_config=None):
    import trl

    from autopar.integrations import ParallelTrainerMixin

    world, plain = dist.get_world_size(), getattr(trl, f"{kind}Trainer")
    batch = BATCH // (world // (tp * pp))
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "run"), per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **SETTINGS
    )
    parallel = type(f"Parallel{kind}Trainer", (ParallelTrainerMixin, plain), {})
    sizes = {"model_parallelism": {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}}
    rows = data(kind)
    trainer = (plain if world == 1 else parallel)(
        model=llama(),
        args=args,
        train_dataset=rows,
        eval_dataset=rows.select(range(8 if kind == "DPO" else 7)),
        processing_class=tokenizer(),
        **({"ref_model": llama(1)} if kind == "DPO" and peft_config is None else {}),
        **({"peft_config": peft_config} if peft_config is not None else {}),
        **({"parallel_config": sizes} if world > 1 else {}),
    )
    trainer.train()
    trainer.evaluate()
    timed = ("runtime", "per_second", "total_flos")  # replicas pad to other lengths
    history = [{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history]
    file = folder / f"{kind}-{peft_config is not None}.json"
    if world == 1:
        file.write_text(json.dumps(history))
        return
    expected = json.loads(file.read_text())
    for mine, theirs in zip(history, expected, strict=True):
        assert mine.keys() == theirs.keys()
        # rewards of the first step are 0: which of two is larger is a matter of rounding
        names = [name for name in mine if not name.endswith("accuracies")]
        one, other = (torch.tensor([row[name] for name in names]) for row in (mine, theirs))
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), (mine, theirs)


@pooled(world_size=1)
def on_one_process(folder):
    with launched():
        run("SFT", folder, 1)
        run("DPO", folder, 1)


@pooled(world_size=4)
def on_four_ranks(folder):
    """Also the metrics that TRL gathers by itself."""
    with launched():
        run("SFT", folder, 2)
        run("DPO", folder, 2)
        with raises_everywhere(ConfigError, "ParallelSFTTrainer.compute_loss with pipeline_parallel_size=2"):
            run("SFT", folder, 2, 2)


def lora():
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")


@pooled(world_size=1)
def adapters_on_one_process(folder):
    with launched():
        run("SFT", folder, 1, peft_config=lora())
        run("DPO", folder, 1, peft_config=lora())


@pooled(world_size=2)
def adapters_on_two_ranks(folder):
    """The reference of DPO is the model with its adapters disabled."""
    with launched():
        run("SFT", folder, 2, peft_config=lora())
        run("DPO", folder, 2, peft_config=lora())


@pytest.mark.tier("all")
def test_sft_and_dpo_with_adapters(tmp_path):
    lora()
    adapters_on_one_process(tmp_path)
    adapters_on_two_ranks(tmp_path)


@pytest.mark.tier("all")
def test_sft_and_dpo(tmp_path):
    on_one_process(tmp_path)
    on_four_ranks(tmp_path)
