"""Helpers of the tutorials: a model, a tokenizer and a text that need no network, and a reference training loop."""

from __future__ import annotations

import argparse
import logging as python_logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedTokenizerFast
from transformers.utils import logging

from autopar.distributed.mesh import MPU
from autopar.distributed.process import start_process_group

# The Trainer imports peft, which imports bitsandbytes, which warns on each rank that a CPU kernel is missing.
python_logging.getLogger("bitsandbytes").setLevel(python_logging.ERROR)

HERE = Path(__file__).resolve().parent
TEXT = HERE / "data" / "state_of_the_union.txt"
END = "<|endoftext|>"


def arguments(about: str | None, *, steps: int, batch_size: int, compare: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options that all tutorials have, and ``--no-compare`` if ``compare``."""
    summary = (about or "").strip().split("\n")[0]
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", help="name on the hub or local folder; by default a small random GPT-2")
    add("--dataset", help="text file, folder or name on the hub (NAME or NAME:CONFIG); by default the text in data/")
    add("--tensor-parallel-size", type=int, help="ranks that share one replica")
    add("--steps", type=int, default=steps, help="training steps")
    add("--batch-size", type=int, default=batch_size, help="sequences per replica and step")
    add("--output", type=Path, default=HERE / "out", help="folder for the tokenizer and the checkpoints")
    add("--context", type=int, default=64, help="tokens per sequence")
    add("--vocab-size", type=int, default=2048, help="size of the tokenizer that is trained without --model")
    if compare:
        text = "also train the model on one process, rank 0, and compare the losses"
        add("--compare", action=argparse.BooleanOptionalAction, default=True, help=text)
    return parser


# -- processes ----------------------------------------------------------------------------------------------------


def start() -> tuple[int, int]:
    """Start the process group, and return the rank and the number of processes.

    ``autopar.initialize`` starts the process group by itself. The tutorials start it earlier, because the ranks wait
    while rank 0 writes the tokenizer. With fewer GPUs than processes they run on the CPU.
    """
    logging.set_verbosity_error()  # transformers prints no warnings
    logging.disable_progress_bar()
    torch.manual_seed(0)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    if not dist.is_initialized() and 0 < torch.cuda.device_count() < local:
        dist.init_process_group("gloo")
    else:
        start_process_group()
    return dist.get_rank(), dist.get_world_size()


def mesh(mpu: MPU) -> str:
    """Describe the mesh, for example "tp 2 x dp 2 on cpu". Stages and context parallelism appear if they are used."""
    sizes = {"tp": mpu.tp.size, "pp": mpu.pp.size, "cp": mpu.cp.size, "dp": mpu.dp.size}
    shown = [f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis in ("tp", "dp")]
    return f"{' x '.join(shown)} on {mpu.device.type}"


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def say_on_each_rank(words: str) -> None:
    """Print one line for each rank, in the order of the ranks."""
    lines = [""] * dist.get_world_size()
    dist.all_gather_object(lines, f"rank {dist.get_rank()}: {words}")
    say("\n".join(lines))


def finish() -> None:
    """Wait for all ranks, and end the process group."""
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the body on rank 0 first, which fills a cache, then on the other ranks."""
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


# -- text ---------------------------------------------------------------------------------------------------------


def load_text(name: str | None = None) -> list[str]:
    """Return the paragraphs of a text file or of the column ``text`` of a dataset; by default the text in ``data/``."""
    path = TEXT if name is None else Path(name)
    if path.is_file() and path.suffix in ("", ".txt", ".md"):
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    from datasets import load_dataset

    kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    try:
        with rank_zero_first():
            if path.is_file():
                data = load_dataset(kinds[path.suffix], data_files=str(path), split="train")
            else:
                data = load_dataset(*str(name).split(":", 1), split="train")
    except Exception as error:
        raise SystemExit(f"error: --dataset {name} cannot be read: {_first_line(error)}") from error
    if "text" not in data.column_names:
        raise SystemExit(f"error: --dataset {name} has no column 'text', only {', '.join(data.column_names)}")
    return [text for text in data["text"] if text.strip()]


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """A text in sequences of ``context`` tokens, for a causal language model.

    Only full batches of ``batch`` sequences are kept.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, context: int, batch: int = 1) -> None:
        end = tokenizer.eos_token_id
        lines = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([token for line in lines for token in [*line, *([] if end is None else [end])]])
        count = len(ids) // context // batch * batch
        if count == 0:
            raise SystemExit(f"error: the text has {len(ids)} tokens, fewer than {batch} sequence(s) of {context}")
        self.ids = ids[: count * context].view(count, context)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def unigram_loss(train: Blocks, validation: Blocks, vocab_size: int) -> float:
    """Return the loss, in nats per token, of the best guess that ignores the context."""
    counts = Counter(train.ids.flatten().tolist())
    table = torch.tensor([counts[token] + 1.0 for token in range(vocab_size)], dtype=torch.float64)
    return -(table / table.sum()).log()[validation.ids[:, 1:]].mean().item()


# -- training -----------------------------------------------------------------------------------------------------


def batches(data: Blocks, steps: int, size: int) -> list[torch.Tensor]:
    """Return one global batch of ``size`` sequences for each step; the data repeats."""
    rows = torch.arange(steps * size) % len(data)
    return list(data.ids[rows].split(size))  # [size, context] each


def train_reference(model: Any, steps: Sequence[torch.Tensor], lr: float = 1e-3, schedule: Any = None) -> list[float]:
    """Train on one process without autopar, with AdamW and clipping, and return the loss of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    scheduler = LambdaLR(optimizer, schedule or (lambda step: 1.0))
    device, losses = next(model.parameters()).device, []
    for ids in steps:
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def average(loss: torch.Tensor, mpu: MPU) -> float:
    """Return the mean of the replicas' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=mpu.dp.group)
    return total.item() / mpu.dp.size


def largest_difference(first: Sequence[float], second: Sequence[float]) -> str:
    """Return the largest difference between two lists of losses."""
    return f"{max(abs(a - b) for a, b in zip(first, second, strict=True)):.2e}"


# -- tokenizer and model ------------------------------------------------------------------------------------------


def load_tokenizer(args: argparse.Namespace) -> Any:
    """Load the tokenizer of ``--model``. Without a model, train a byte-level BPE on the text in ``data/`` once."""
    if args.model is not None:
        try:
            with rank_zero_first():
                return AutoTokenizer.from_pretrained(args.model)
        except (OSError, ValueError) as error:
            raise SystemExit(f"error: --model {args.model} has no readable tokenizer: {_first_line(error)}") from error
    folder = args.output / f"tokenizer-{args.vocab_size}"
    with rank_zero_first():
        if dist.get_rank() == 0 and not folder.is_dir():
            _train_tokenizer(load_text(), args.vocab_size, folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _train_tokenizer(texts: Sequence[str], vocab_size: int, folder: Path) -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(dir=folder.parent)
    tokenizer.save_pretrained(temporary)
    try:
        os.rename(temporary, folder)  # a folder that exists is complete
    except OSError:
        shutil.rmtree(temporary)


def small_gpt2(tokenizer: Any, *, context: int, layers: int = 2, hidden: int = 128, heads: int = 4) -> GPT2Config:
    """Return the config of a GPT-2 that trains on a CPU: no dropout, and the vocabulary of the tokenizer."""
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=context,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def load_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Load the causal language model of ``--model``, or build a small random GPT-2; on the CPU, in fp32."""
    if args.model is None:
        return AutoModelForCausalLM.from_config(small_gpt2(tokenizer, context=args.context))
    try:
        with rank_zero_first():
            return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: --model {args.model} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
