"""Tutorial 5: reinforcement learning with GRPO of TRL. The ranks that train the model also sample the completions.

torchrun --nproc-per-node 2 tutorials/05_grpo.py
torchrun --nproc-per-node 4 tutorials/05_grpo.py --tensor-parallel-size 2

It prints the mean reward, and compares rewards and gradients with one process, which it starts at the end. It needs
trl: pip install -e '.[rl]'.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from offline import (
    arguments,
    finish,
    largest_difference,
    load_model,
    load_text,
    load_tokenizer,
    mesh,
    say,
    start,
)
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from autopar.integrations import ParallelGRPOTrainer


def short_words(completions: list[str], **kwargs: Any) -> list[float]:
    """Return the rewards: a completion of many short words gets a high one."""
    return [sum(0 < len(word) < 4 for word in text.split()) / 8 for text in completions]


def train(trainer: GRPOTrainer) -> list[list[float]]:
    """Return the reward and the gradient norm of each step."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [[row["reward"], row["grad_norm"]] for row in trainer.state.log_history if "grad_norm" in row]


def train_on_one_process(args: argparse.Namespace, file: Path) -> list[list[float]]:
    """Run this script again, without the environment variables of torchrun."""
    launched = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, "--steps", str(args.steps), "--batch-size", str(args.batch_size)]
    subprocess.run([*command, "--output", str(args.output), "--reference", str(file)], env=environment, check=True)
    return json.loads(file.read_text())


def main() -> None:
    parser = arguments(__doc__, steps=20, batch_size=8)
    parser.add_argument("--reference", type=Path, help="train with TRL only, and write the results to this file")
    args = parser.parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    tokenizer.padding_side = "left"
    prompts = [" ".join(line.split()[:4]) for line in load_text(args.dataset)[:64]]

    # 1. A script for GRPOTrainer. per_device_train_batch_size counts the completions of one replica.
    settings = GRPOConfig(
        output_dir=str(args.output / "grpo"),
        per_device_train_batch_size=args.batch_size,
        num_generations=4,
        max_completion_length=12,
        max_steps=args.steps,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        use_cpu=not torch.cuda.is_available() or dist.get_backend() == "gloo",
    )
    options = {
        "model": load_model(args, tokenizer),
        "reward_funcs": short_words,
        "args": settings,
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "processing_class": tokenizer,
    }
    if args.reference is not None:
        args.reference.write_text(json.dumps(train(GRPOTrainer(**options))))
        return

    # 2. The class name and one argument make it parallel.
    trainer = ParallelGRPOTrainer(**options, parallel_config={"tp": args.tensor_parallel_size or world})
    found = train(trainer)
    half = len(found) // 2
    early, late = (sum(reward for reward, _ in rows) / len(rows) for rows in (found[:half], found[half:]))
    say(f"{mesh(trainer.mpu)}: mean reward {early:.4f} in the first half, {late:.4f} in the second half")

    if rank == 0 and trainer.mpu.dp.size == 1:  # each replica samples other completions, so only one can be compared
        expected = train_on_one_process(args, args.output / "grpo-reference.json")
        for name, column in (("rewards", 0), ("gradient norms", 1)):
            worst = largest_difference([row[column] for row in found], [row[column] for row in expected])
            say(f"one process: largest difference of {name}: {worst}")
    finish()


if __name__ == "__main__":
    main()
