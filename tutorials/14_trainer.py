"""Tutorial 14: transformers' Trainer, made parallel by another class name and one argument.

python tutorials/14_trainer.py
torchrun --nproc-per-node 2 tutorials/14_trainer.py
torchrun --nproc-per-node 4 tutorials/14_trainer.py --tensor-parallel-size 2
"""

from __future__ import annotations

import copy
import math
import shutil
from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start
from transformers import AutoModelForCausalLM, PrinterCallback, TrainingArguments

from autopar.integrations import ParallelTrainer


def train_plain(model: Any, data: Any, batch: int, steps: int) -> list[float]:
    """One process, the whole batch, a loop of its own."""
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


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def largest(ones: list[float], others: list[float]) -> str:
    return f"{max(abs(one - other) for one, other in zip(ones, others, strict=True)):.2e}"


def main() -> None:
    args = arguments(__doc__, steps=10, batch_size=4).parse_args()
    _, world = start()
    tp = args.tensor_parallel_size or (2 if world % 2 == 0 else 1)
    tokenizer = load_tokenizer(args)
    blocks = Blocks(load_text(args.dataset), tokenizer, args.context)
    batch = args.batch_size * world // tp
    data = torch.utils.data.Subset(blocks, range(len(blocks) // batch * batch))
    plain = load_model(args, tokenizer)
    folder = args.output / "trainer"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()

    # 1. A script for transformers' Trainer: nothing in it knows of ranks. per_device_train_batch_size is that of a
    #    replica; the arguments, callbacks and logs are the Trainer's own.
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

    # 2. The class name and one argument make it parallel.
    config = {"model_parallelism": {"tensor_parallel_size": tp}}
    trainer = ParallelTrainer(model=copy.deepcopy(plain), args=settings, train_dataset=data, parallel_config=config)
    trainer.remove_callback(PrinterCallback)  # the logs stay in trainer.state.log_history
    trainer.train()
    losses = losses_of(trainer)
    say(f"{mesh(trainer.mpu)}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")

    # 3. evaluate() counts every sample once, on however many replicas.
    held_out = torch.utils.data.Subset(blocks, range(len(blocks) - 11, len(blocks)))
    evaluated = trainer.evaluate(held_out)["eval_loss"]
    predicted = trainer.predict(held_out)
    say(f"held out: {len(predicted.predictions)} sequences, perplexity {math.exp(evaluated):.2f}")

    # 4. checkpoint-N is Trainer's, and holds a training state that loads on any mesh.
    resumed = ParallelTrainer(model=copy.deepcopy(plain), args=settings, train_dataset=data, parallel_config=config)
    resumed.remove_callback(PrinterCallback)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{half}"))
    say(f"resumed after {half} steps: largest difference of losses: {largest(losses_of(resumed), losses)}")

    # 5. save_model() writes what plain transformers reads.
    trainer.save_model(str(folder / "final"))
    if dist.get_rank() == 0:
        ids = predicted.label_ids
        merged = AutoModelForCausalLM.from_pretrained(folder / "final").eval()
        with torch.no_grad():
            logits = merged(input_ids=torch.tensor(ids)).logits
        difference = (logits - torch.tensor(predicted.predictions)).abs().max().item()
        say(f"saved model, plain transformers: logits differ by {difference:.2e}")
        expected = train_plain(plain.to(trainer.mpu.device).train(), data, batch, args.steps)
        say(f"one process on the whole batch of {batch}: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"largest difference of losses: {largest(losses, expected)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
