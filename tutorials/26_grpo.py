"""Tutorial 26: GRPO of TRL. Completions are sampled on the ranks that train, and are those of one process.

Needs `trl`.

torchrun --nproc-per-node 2 tutorials/26_grpo.py
torchrun --nproc-per-node 4 tutorials/26_grpo.py --tensor-parallel-size 2
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
from offline import arguments, load_model, load_text, load_tokenizer, mesh, say, start
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from autopar.integrations import ParallelGRPOTrainer


def short_words(completions: list[str], **others: Any) -> list[float]:
    """The reward: completions of many short words."""
    return [sum(0 < len(word) < 4 for word in text.split()) / 8 for text in completions]


def train(trainer: Any) -> list[list[float]]:
    """The reward and the norm of the gradients of each step."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [[row["reward"], row["grad_norm"]] for row in trainer.state.log_history if "grad_norm" in row]


def on_one_process(args: argparse.Namespace, file: Path) -> list[list[float]]:
    """Run this script again, without torchrun's variables."""
    launched = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, "--steps", str(args.steps), "--batch-size", str(args.batch_size)]
    subprocess.run([*command, "--output", str(args.output), "--keep", str(file)], env=environment, check=True)
    return json.loads(file.read_text())


def main() -> None:
    parser = arguments(__doc__, steps=20, batch_size=8)
    parser.add_argument("--keep", type=Path, help="file for what one process finds, which is not printed then")
    args = parser.parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    tokenizer.padding_side = "left"
    prompts = [" ".join(line.split()[:4]) for line in load_text(args.dataset)[:64]]
    tp = args.tensor_parallel_size or world

    # A script for GRPOTrainer. per_device_train_batch_size counts completions of a replica.
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
    given = {
        "model": load_model(args, tokenizer),
        "reward_funcs": short_words,
        "args": settings,
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "processing_class": tokenizer,
    }
    if args.keep is not None:
        args.keep.write_text(json.dumps(train(GRPOTrainer(**given))))
        return

    # The class name and one argument make it parallel: the model samples, and is trained, in shards.
    trainer = ParallelGRPOTrainer(**given, parallel_config={"tp": tp})
    found = train(trainer)
    half = len(found) // 2
    early, late = (sum(reward for reward, _ in part) / len(part) for part in (found[:half], found[half:]))
    say(f"{mesh(trainer.mpu)}: mean reward {early:.4f} in the first half, {late:.4f} in the second")

    if rank == 0 and trainer.mpu.dp.size == 1:  # replicas sample other completions, as plain processes do
        expected = on_one_process(args, args.output / "grpo-one.json")
        for name, column in (("rewards", 0), ("norms of gradients", 1)):
            differences = [abs(one[column] - other[column]) for one, other in zip(found, expected, strict=True)]
            say(f"one process: largest difference of {name}: {max(differences):.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
