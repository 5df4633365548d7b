"""Tutorial 2: train with the Trainer of transformers on several ranks. Only the class name and one argument change.

torchrun --nproc-per-node 2 tutorials/02_trainer.py
torchrun --nproc-per-node 4 tutorials/02_trainer.py --tensor-parallel-size 2

It trains, evaluates, resumes from a checkpoint, saves a model for transformers, and compares the losses with one
process. It needs accelerate: pip install -e '.[trainer]'.
"""

from __future__ import annotations

import copy
import math
import shutil
from typing import Any

import torch
import torch.distributed as dist
from offline import (
    Blocks,
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
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments

from autopar.integrations import ParallelTrainer


def train_reference(model: Any, data: Any, batch: int, steps: int) -> list[float]:
    """Train on one process with the full batch, without Trainer, and return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), []
    for step in range(steps):
        rows = [data[row % len(data)] for row in range(step * batch, (step + 1) * batch)]
        ids = torch.stack([row["input_ids"] for row in rows]).to(model.device)
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel()).loss  # as Trainer counts for GPT-2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    args = arguments(__doc__, steps=10, batch_size=4).parse_args()
    rank, world = start()
    tp = args.tensor_parallel_size or (2 if world % 2 == 0 else 1)
    tokenizer = load_tokenizer(args)
    batch = args.batch_size * world // tp
    data = Blocks(load_text(args.dataset), tokenizer, args.context, batch=batch)
    model = load_model(args, tokenizer)
    folder = args.output / "trainer"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()

    # 1. The arguments of transformers. The batch size counts the samples of one replica.
    half = max(1, args.steps // 2)
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        max_steps=args.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_steps=half,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available() or dist.get_backend() == "gloo",
    )

    # 2. ParallelTrainer takes the place of Trainer, and parallel_config has the mesh.
    def make_trainer() -> Trainer:
        trainer = ParallelTrainer(
            model=copy.deepcopy(model), args=settings, train_dataset=data, parallel_config={"tp": tp}
        )
        trainer.remove_callback(PrinterCallback)  # the logs stay in trainer.state.log_history
        return trainer

    trainer = make_trainer()
    trainer.train()
    losses = losses_of(trainer)
    say(f"{mesh(trainer.mpu)}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")

    # 3. evaluate counts each of the 11 samples once, on any number of replicas.
    held_out = torch.utils.data.Subset(data, range(len(data) - 11, len(data)))
    loss = trainer.evaluate(held_out)["eval_loss"]
    predicted = trainer.predict(held_out)
    say(f"evaluated {len(predicted.predictions)} sequences: perplexity {math.exp(loss):.2f}")

    # 4. A checkpoint of Trainer also holds the optimizer state, and loads on any mesh.
    resumed = make_trainer()
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{half}"))
    say(f"resumed after {half} steps: largest difference of losses: {largest_difference(losses_of(resumed), losses)}")

    # 5. save_model writes a folder for transformers.
    trainer.save_model(str(folder / "final"))
    if rank == 0:
        merged = AutoModelForCausalLM.from_pretrained(folder / "final").eval()
        with torch.no_grad():
            logits = merged(input_ids=torch.tensor(predicted.label_ids)).logits
        difference = (logits - torch.tensor(predicted.predictions)).abs().max().item()
        say(f"saved model in transformers: logits differ by {difference:.2e}")
        expected = train_reference(model.to(trainer.mpu.device).train(), data, batch, args.steps)
        say(f"one process, batch size {batch}: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"largest difference of losses: {largest_difference(losses, expected)}")
    finish()


if __name__ == "__main__":
    main()
