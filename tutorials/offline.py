"""What the tutorials share: a model, a tokenizer and a text that need no network, and the start of a process."""

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
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedTokenizerFast
from transformers.utils import logging

from autopar.distributed.mesh import MPU
from autopar.distributed.process import start_process_group

# peft imports it with transformers' Trainer: on each rank it would warn of a kernel for CPUs that is not there.
python_logging.getLogger("bitsandbytes").setLevel(python_logging.ERROR)

HERE = Path(__file__).resolve().parent
TEXT = HERE / "data" / "state_of_the_union.txt"
END = "<|endoftext|>"


def arguments(description: str | None, *, steps: int, batch_size: int) -> argparse.ArgumentParser:
    """The options that all tutorials have."""
    summary = (description or "").strip().split("\n")[0]
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", help="name on the hub or local folder; by default a small random GPT-2")
    add("--dataset", help="text file, folder or name on the hub (NAME or NAME:CONFIG); by default the text in data/")
    add("--tensor-parallel-size", type=int, help="ranks that share one model replica")
    add("--steps", type=int, default=steps, help="training steps, or tokens to generate")
    add("--batch-size", type=int, default=batch_size, help="sequences per replica and step")
    add("--output", type=Path, default=HERE / "out", help="folder for the tokenizer and the checkpoints")
    add("--context", type=int, default=64, help="tokens per sequence")
    add("--vocab-size", type=int, default=2048, help="size of the tokenizer that is trained without --model")
    return parser


# -- processes ----------------------------------------------------------------------------------------------------


def start() -> tuple[int, int]:
    """Start this process; returns its rank and the number of processes.

    ``autopar.initialize`` starts the process group by itself. Here it happens earlier, because ranks wait for each
    other while rank 0 makes files, and on the CPU where a machine has fewer GPUs than processes.
    """
    logging.set_verbosity_error()  # of transformers
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


def whole_world(args: argparse.Namespace) -> int:
    """The tensor-parallel size where all processes share one model replica."""
    world = dist.get_world_size()
    if args.tensor_parallel_size not in (None, world):
        raise SystemExit(
            f"error: this tutorial has tensor parallelism only: --tensor-parallel-size {args.tensor_parallel_size} "
            f"does not match {world} process(es). Tutorial 4 adds data parallelism."
        )
    return world


def mesh(mpu: MPU) -> str:
    """The sizes in words."""
    return f"tensor parallel {mpu.sizes.tp} x data parallel {mpu.sizes.dp} on {mpu.device.type}"


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Rank 0 runs the body (which fills a cache), then the others do."""
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


# -- text ---------------------------------------------------------------------------------------------------------


def load_text(name: str | None = None) -> list[str]:
    """Paragraphs of a text file, or of the column ``text`` of a dataset; by default of the text in ``data/``."""
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
    """A text cut into sequences of ``context`` tokens, for a causal language model."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, context: int) -> None:
        end = tokenizer.eos_token_id
        lines = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([token for line in lines for token in [*line, *([] if end is None else [end])]])
        count = len(ids) // context
        if count == 0:
            raise SystemExit(f"error: the text has {len(ids)} tokens, fewer than one sequence of {context}")
        self.ids = ids[: count * context].view(count, context)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def unigram_loss(train: Blocks, validation: Blocks, vocab_size: int) -> float:
    """Nats per token of the best guess that ignores the context: what a model must beat to have learnt anything."""
    counts = Counter(train.ids.flatten().tolist())
    table = torch.tensor([counts[token] + 1.0 for token in range(vocab_size)], dtype=torch.float64)
    return -(table / table.sum()).log()[validation.ids[:, 1:]].mean().item()


# -- tokenizer and model ------------------------------------------------------------------------------------------


def load_tokenizer(args: argparse.Namespace) -> Any:
    """The tokenizer of ``--model``; without it a byte-level BPE, trained on the text in ``data/`` and kept."""
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
    """A GPT-2 that trains on a CPU: no dropout, one vocabulary with the tokenizer."""
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
    """The causal language model of ``--model``, or a small random GPT-2; in memory, on the CPU, in fp32."""
    if args.model is None:
        return AutoModelForCausalLM.from_config(small_gpt2(tokenizer, context=args.context))
    try:
        with rank_zero_first():
            return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: --model {args.model} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
