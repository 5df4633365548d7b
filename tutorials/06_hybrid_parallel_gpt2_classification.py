"""Tutorial 6: fine-tune GPT-2 to classify text, with pipeline stages, ZeRO-1 and fp16 from one config.

python tutorials/06_hybrid_parallel_gpt2_classification.py
torchrun --nproc-per-node 2 tutorials/06_hybrid_parallel_gpt2_classification.py
torchrun --nproc-per-node 4 tutorials/06_hybrid_parallel_gpt2_classification.py --tensor-parallel-size 2 --steps 100
"""

from __future__ import annotations

import argparse
import copy
import csv
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from offline import HERE, TEXT, arguments, load_tokenizer, rank_zero_first, say, small_gpt2, start
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
    get_linear_schedule_with_warmup as linear_schedule_with_warmup,
)

import autopar

Batch = dict[str, torch.Tensor]


def from_which_century() -> list[tuple[str, int]]:
    """Paragraphs of the State of the Union messages, and whether Congress heard them before (0) or after (1) 1900."""
    speeches = TEXT.read_text(encoding="utf-8").strip().split("\n\n")
    with (HERE / "data" / "speeches.csv").open(encoding="utf-8", newline="") as file:
        years = [int(row["date"][:4]) for row in csv.DictReader(file)]
    old: list[str] = []
    new: list[str] = []
    for year, speech in zip(years, speeches, strict=True):
        (old if year < 1900 else new).extend(line for line in speech.splitlines() if len(line.split()) >= 20)
    fewer = min(len(old), len(new))  # as many of each
    places = range(fewer)
    return [(texts[len(texts) * place // fewer], label) for place in places for label, texts in enumerate((old, new))]


def load_examples(name: str | None) -> list[tuple[str, int]]:
    """Texts with their labels 0, 1 ...: a ``.csv`` or ``.jsonl`` with columns ``text`` and ``label``, or on the hub."""
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
    """Every text as ``context`` tokens: cut off, or filled up on the right."""

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
    """GPT-2 with a classification head on the last token that is not padding; small and random without ``--model``."""
    if args.model is None:
        config = small_gpt2(tokenizer, context=args.context)
        config.num_labels, config.pad_token_id = labels, tokenizer.pad_token_id
        return GPT2ForSequenceClassification(config)
    with rank_zero_first():
        return AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=labels, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
        )


def make_optimizer(model: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW that does not decay biases and layer norms; a learning rate that rises and then falls in straight lines."""
    plain = [name for name, _ in model.named_parameters() if name.endswith("bias") or ".ln_" in name]
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in plain], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-4)
    return optimizer, linear_schedule_with_warmup(optimizer, max(1, steps // 10), steps)


def epochs(loader: Any, steps: int) -> Iterator[Batch]:
    """``steps`` batches; a new order in each epoch."""
    given = 0
    for epoch in range(steps):
        loader.set_epoch(epoch)
        for batch in loader:
            if given == steps:
                return
            given += 1
            yield batch


@torch.no_grad()
def accuracy(model: Any, loader: Any, device: Any) -> float:
    """The share of texts whose label is right. Through stages, too, a plain call is for inference, on every rank."""
    model.eval()
    right = count = 0
    for batch in loader:
        logits = model(**{name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}).logits
        right += (logits.argmax(-1).cpu() == batch["labels"]).sum().item()
        count += len(logits)
    return right / count


def train_plain(model: Any, batches: list[Batch], skipped: list[bool], device: Any) -> list[float]:
    """One process, fp32, whole batches, nothing of autopar; leaves out the steps that fp16 left out."""
    losses = []
    optimizer, scheduler = make_optimizer(model, len(batches))
    for batch, skip in zip(tqdm(batches, "plain"), skipped, strict=True):
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
    parser = arguments(__doc__, steps=200, batch_size=8)
    parser.add_argument("--pipeline-parallel-size", type=int, help="stages of one model replica; by default 2")
    parser.add_argument("--zero-stage", type=int, default=1, choices=[0, 1, 3], help="3, FSDP2, needs one stage")
    parser.add_argument("--precision", default="fp16", choices=["fp32", "bf16", "fp16"], help="what it computes in")
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train the plain model in fp32, on rank 0, which must be able to hold it",
    )
    args = parser.parse_args()
    rank, world = start()
    tokenizer = load_tokenizer(args)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.pad_token or tokenizer.eos_token, "right"
    examples = load_examples(args.dataset)
    tests = Examples(examples[::5], tokenizer, args.context)  # every fifth text is held out
    trains = Examples([example for place, example in enumerate(examples) if place % 5], tokenizer, args.context)
    model = make_model(args, tokenizer, labels=len({label for _, label in examples}))
    model.train(not args.compare)  # dropout draws other numbers in one process than in two: without it runs compare
    plain = copy.deepcopy(model) if args.compare and rank == 0 else None

    # Optimizer and scheduler come first, from the plain model; initialize gives back the same optimizer.
    optimizer, scheduler = make_optimizer(model, args.steps)
    config = {
        "model_parallelism": {
            "tensor_parallel_size": args.tensor_parallel_size or 1,
            "pipeline_parallel_size": args.pipeline_parallel_size or (2 if world % 2 == 0 else 1),
        },
        "pipeline": {"schedule": "1f1b", "microbatch_size": 1},
        "zero": {"stage": args.zero_stage},
        "precision": {"dtype": args.precision},
        "gradient_clipping": 1.0,
    }
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler)
    mpu = model.mpu
    tp, pp, dp, _ = mpu.sizes
    say(f"tensor parallel {tp} x pipeline parallel {pp} x data parallel {dp} on {mpu.device.type}, {args.precision}")

    loader = autopar.prepare_dataloader(trains, args.batch_size, shuffle=True, seed=0, drop_last=True, mpu=mpu)
    losses, whole_batches, skipped = [], [], []
    for batch in tqdm(epochs(loader, args.steps), "parallel", args.steps, disable=rank > 0):
        # Forward and backward of all micro-batches through all stages, loss scale included.
        out = model.execute_pipeline(
            batch,
            criterion=lambda outputs, inputs: outputs.loss,
            optimizer=optimizer,
            forward_only=False,  # also in eval mode, which leaves dropout out
            broadcast_loss=True,  # else only the last stage has it
        )
        optimizer.step()  # unscales, clips, skips if there was an overflow on any rank, shares the new weights
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
        scheduler.step()
        parts: list[tuple[float, Batch]] = [(0.0, batch)] * dp
        dist.all_gather_object(parts, (out.loss.item(), batch), group=mpu.dp.group)
        losses.append(sum(loss for loss, _ in parts) / dp)
        whole_batches.append({name: torch.cat([part[name] for _, part in parts]) for name in batch})
    say(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}, {optimizer.skipped_steps} steps skipped")
    testing = DataLoader(tests, batch_size=32)
    reached = accuracy(model, testing, mpu.device)
    often = tests.columns["labels"].bincount().max().item() / len(tests)
    say(f"accuracy {reached:.4f} on {len(tests)} texts held out; always the same label: {often:.4f}")

    if plain is not None:
        plain.to(mpu.device)
        expected = train_plain(plain, whole_batches, skipped, mpu.device)
        correct = accuracy(plain, testing, mpu.device)
        say(f"one process, fp32, whole batch of {args.batch_size * dp}: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
        say(f"one process, fp32: accuracy {correct:.4f}; difference of accuracies: {abs(correct - reached):.4f}")
        say(f"largest difference of losses: {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
