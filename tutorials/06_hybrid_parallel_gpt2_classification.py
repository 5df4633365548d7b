"""Tutorial 6: fine-tune GPT-2 to classify text, with pipeline stages, ZeRO-1 and fp16 from one config.

torchrun --nproc-per-node 2 tutorials/06_hybrid_parallel_gpt2_classification.py
torchrun --nproc-per-node 4 tutorials/06_hybrid_parallel_gpt2_classification.py --tensor-parallel-size 2

It prints losses and accuracy, and compares them with one process in fp32. The task: was a paragraph written before or
after 1900? --dataset takes a .csv or .jsonl file with the columns text and label. --pipeline-parallel-size 1
--zero-stage 3 shards the weights and gradients over replicas too.
"""

from __future__ import annotations

import argparse
import copy
import csv
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from offline import (
    HERE,
    TEXT,
    arguments,
    average,
    finish,
    largest_difference,
    load_tokenizer,
    mesh,
    rank_zero_first,
    say,
    small_gpt2,
    start,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, GPT2ForSequenceClassification

import autopar

Batch = dict[str, torch.Tensor]


def from_which_century() -> list[tuple[str, int]]:
    """Return paragraphs of the State of the Union addresses, each with label 0 (before 1900) or 1 (after 1900)."""
    speeches = TEXT.read_text(encoding="utf-8").strip().split("\n\n")
    with (HERE / "data" / "speeches.csv").open(encoding="utf-8", newline="") as file:
        years = [int(row["date"][:4]) for row in csv.DictReader(file)]
    old: list[str] = []
    new: list[str] = []
    for year, speech in zip(years, speeches, strict=True):
        (old if year < 1900 else new).extend(line for line in speech.splitlines() if len(line.split()) >= 20)
    fewer = min(len(old), len(new))  # balanced classes
    places = range(fewer)
    return [(texts[len(texts) * place // fewer], label) for place in places for label, texts in enumerate((old, new))]


def load_examples(name: str | None) -> list[tuple[str, int]]:
    """Return pairs of a text and a label, from a file or from the hub."""
    if name is None:
        return from_which_century()
    from datasets import load_dataset

    kind = {"csv": "csv", "jsonl": "json", "parquet": "parquet"}.get(name.rsplit(".", 1)[-1])
    with rank_zero_first():
        if kind is not None:
            data = load_dataset(kind, data_files=name, split="train")
        else:
            data = load_dataset(*name.split(":", 1), split="train")
    if not {"text", "label"} <= set(data.column_names):
        raise SystemExit(f"error: --dataset {name} needs columns 'text' and 'label', it has {data.column_names}")
    return list(zip(data["text"], data["label"], strict=True))


class Examples(Dataset[Batch]):
    """Texts of ``context`` tokens each, truncated or padded on the right."""

    def __init__(self, examples: Sequence[tuple[str, int]], tokenizer: Any, context: int) -> None:
        texts = [text for text, _ in examples]
        self.columns: Batch = dict(
            tokenizer(
                texts,
                padding="max_length",
                truncation=True,
                max_length=context,
                return_tensors="pt",
                return_token_type_ids=False,
            )
        )
        self.columns["labels"] = torch.tensor([label for _, label in examples])

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


def make_model(args: argparse.Namespace, tokenizer: Any, labels: int) -> Any:
    """Build or load a GPT-2 with a classification head, which reads the last token that is not padding."""
    if args.model is None:
        config = small_gpt2(tokenizer, context=args.context)
        config.num_labels, config.pad_token_id = labels, tokenizer.pad_token_id
        return GPT2ForSequenceClassification(config)
    with rank_zero_first():
        return AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=labels, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
        )


def make_optimizer(model: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW without weight decay for biases and layer norms, and a linear schedule with warm-up."""
    no_decay = [name for name, _ in model.named_parameters() if name.endswith("bias") or ".ln_" in name]
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in no_decay], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n in no_decay], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-4)
    warmup = max(1, steps // 10)
    return optimizer, LambdaLR(optimizer, lambda step: min(step / warmup, (steps - step) / max(1, steps - warmup)))


def epochs(loader: Any, steps: int) -> Iterator[Batch]:
    """Yield ``steps`` batches, in a new order in each epoch."""
    count = 0
    for epoch in range(steps):
        loader.set_epoch(epoch)
        for batch in loader:
            if count == steps:
                return
            count += 1
            yield batch


@torch.no_grad()
def accuracy(model: Any, loader: Any, device: Any) -> float:
    """Return the accuracy. A call of a model with stages is inference: every rank gets the logits."""
    model.eval()
    right = count = 0
    for batch in loader:
        logits = model(**{name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}).logits
        right += (logits.argmax(-1).cpu() == batch["labels"]).sum().item()
        count += len(logits)
    return right / count


def train_reference(model: Any, batches: list[Batch], skipped: list[bool], device: Any) -> list[float]:
    """Train on one process in fp32 without autopar, and skip the steps that fp16 skipped."""
    losses = []
    optimizer, scheduler = make_optimizer(model, len(batches))
    for batch, skip in zip(tqdm(batches, "one process"), skipped, strict=True):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        if not skip:
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = arguments(__doc__, steps=200, batch_size=8, compare=True)
    parser.add_argument("--pipeline-parallel-size", type=int, help="stages of one replica; by default 2")
    parser.add_argument("--zero-stage", type=int, default=1, choices=[0, 1, 3], help="stage 3 needs one pipeline stage")
    parser.add_argument("--precision", default="fp16", choices=["fp32", "bf16", "fp16"], help="dtype of the compute")
    args = parser.parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.pad_token or tokenizer.eos_token, "right"
    examples = load_examples(args.dataset)
    tests = Examples(examples[::5], tokenizer, args.context)  # every fifth text is held out
    trains = Examples([example for index, example in enumerate(examples) if index % 5], tokenizer, args.context)
    model = make_model(args, tokenizer, labels=len({label for _, label in examples}))
    model.train(not args.compare)  # dropout is random: the comparison runs without it
    reference = copy.deepcopy(model) if args.compare and rank == 0 else None

    # 1. Make optimizer and scheduler first. initialize returns the same optimizer.
    optimizer, scheduler = make_optimizer(model, args.steps)
    config = {
        "tp": args.tensor_parallel_size or 1,
        "pp": args.pipeline_parallel_size or (2 if world % 2 == 0 else 1),
        "pipeline": {"schedule": "1f1b", "microbatch_size": 1},
        "zero": {"stage": args.zero_stage},
        "precision": {"dtype": args.precision},
        "gradient_clipping": 1.0,
    }
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler)
    mpu = model.mpu
    say(f"{mesh(mpu)}, {args.precision}")

    # 2. Train.
    loader = autopar.prepare_dataloader(trains, args.batch_size, shuffle=True, seed=0, drop_last=True, mpu=mpu)
    losses, global_batches, skipped = [], [], []
    for batch in tqdm(epochs(loader, args.steps), "parallel", args.steps, disable=rank > 0):
        # Forward and backward of all micro-batches through all stages, with the loss scale of fp16.
        out = model.execute_pipeline(
            batch,
            criterion=lambda outputs, inputs: outputs.loss,
            optimizer=optimizer,
            forward_only=False,  # trains in eval mode too
            broadcast_loss=True,  # without it only the last stage has the loss
        )
        optimizer.step()  # unscales, clips, and skips the step on all ranks if a gradient overflowed
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
        scheduler.step()
        losses.append(average(out.loss, mpu))
        slices: list[Batch] = [batch] * mpu.dp.size
        dist.all_gather_object(slices, batch, group=mpu.dp.group)
        global_batches.append({name: torch.cat([each[name] for each in slices]) for name in batch})
    say(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}, {optimizer.skipped_steps} steps skipped")

    # 3. Evaluate.
    testing = DataLoader(tests, batch_size=32)
    reached = accuracy(model, testing, mpu.device)
    majority = tests.columns["labels"].bincount().max().item() / len(tests)
    say(f"accuracy {reached:.4f} on {len(tests)} held-out texts; a constant prediction: {majority:.4f}")

    if reference is not None:
        reference.to(mpu.device)
        expected = train_reference(reference, global_batches, skipped, mpu.device)
        correct = accuracy(reference, testing, mpu.device)
        size = args.batch_size * mpu.dp.size
        say(f"one process, fp32, batch size {size}: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"one process, fp32: accuracy {correct:.4f}; difference of accuracies: {abs(correct - reached):.4f}")
        say(f"largest difference of losses: {largest_difference(losses, expected)}")
    finish()


if __name__ == "__main__":
    main()
