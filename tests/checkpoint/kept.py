"""The runs behind ``assets/``: checkpoints that an earlier version wrote and every later one must read.

    fp32-tp2-pp2    GPT-2, 2 steps of AdamW on 4 ranks, with a scheduler, extra data and named random streams
    fp16-zero1      the same on 2 replicas: fp32 master weights, a loss scale, and ZeRO-1

GPT-2 has tied embeddings and fused projections; 51 words, 3 heads and 19 hidden units are uneven over 2 ranks. Each
archive holds the folder NAME, and NAME.safetensors: what the run had when it saved and after one more step, logits,
random draws. They were written at commit d8de7cd with torch 2.13 and transformers 5.23, and stay as they are::

    torchrun --nproc-per-node 4 tests/checkpoint/kept.py fp32-tp2-pp2 OUTPUT
    torchrun --nproc-per-node 2 tests/checkpoint/kept.py fp16-zero1 OUTPUT
    tar cJf tests/checkpoint/assets/NAME.tar.xz -C OUTPUT NAME NAME.safetensors
"""

from __future__ import annotations

import random
import shutil
import sys
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.tensor_parallel import manual_seed

ASSETS = Path(__file__).parent / "assets"
MESHES = {"fp32-tp2-pp2": (2, 2), "fp16-zero1": (1, 1)}
"""Name -> tensor- and pipeline-parallel size."""


def unpack(name: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Unpack an archive into ``folder``: the checkpoint, and what its run had."""
    from safetensors.torch import load_file

    with tarfile.open(ASSETS / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name, load_file(folder / f"{name}.safetensors")


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_embd=12, n_head=3, n_inner=19, vocab_size=51, n_positions=16, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, initializer_range=0.1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batch(step: int) -> dict[str, torch.Tensor]:
    """4 texts of 8 words, the same on every machine."""
    ids = torch.from_numpy(np.random.RandomState(step).randint(1, 51, (4, 8)))
    return {"input_ids": ids, "labels": ids.clone()}


class Run:
    """GPT-2 in training: AdamW with two groups, a cosine schedule, global batches of 4.

    Args:
        tp, pp: sizes; replicas are what remains of the world.
        precision: of the run, ``fp32`` or ``fp16`` with ZeRO-1.
        seed: of the weights.
    """

    def __init__(self, tp: int, pp: int, precision: str = "fp32", seed: int = 0) -> None:
        model = gpt2(seed)
        half = precision == "fp16"
        config = {
            "model_parallelism": {"tensor_parallel_size": tp, "pipeline_parallel_size": pp},
            "pipeline": {"microbatch_size": 1},
            "zero": {"stage": int(half)},
            "precision": {
                "dtype": precision,
                **({"initial_scale": 256.0 + seed, "growth_interval": 2} if half else {}),
            },
        }
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        self.model, self.optimizer = autopar.initialize(model, config, optimizer=optimizer)

    def step(self, number: int) -> None:
        """One optimizer step on the part of a global batch that this replica has."""
        dp = self.model.mpu.dp
        mine = {key: value.chunk(dp.size)[dp.rank] for key, value in batch(number).items()}
        self.model.execute_pipeline(mine, optimizer=self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def weights(self, folder: Path) -> dict[str, torch.Tensor]:
        """The whole weights, under the plain model's names, without the tied copy; ``folder`` is made on the way."""
        self.model.save_parallelized(folder, merge_checkpoints=True)
        plain = GPT2LMHeadModel.from_pretrained(folder, dtype="auto").state_dict()
        return {name: tensor for name, tensor in plain.items() if name != "lm_head.weight"}

    def draws(self) -> torch.Tensor:
        """Three random numbers of each generator that this rank draws from next, the named stream last."""
        drawn = [random.random() for _ in range(3)], np.random.rand(3), torch.rand(3, dtype=torch.float64)
        with self.model.mpu.random_tracker.fork():
            return torch.stack([*(torch.as_tensor(numbers) for numbers in drawn), torch.rand(3, dtype=torch.float64)])


def extra() -> dict[str, Any]:
    """Data of the user's own: of every kind that a checkpoint can hold."""
    return {
        "step": 2,
        "texts": ["ä", "", None],
        "losses": [0.1, float("inf"), float("-inf")],
        "pair": (1, True),
        "seen": {3, 1, 2},
        "order": OrderedDict(b=1, a=2),
        3: "a key that is no text",
        "$": "a key that JSON needs itself",
        "kind": torch.bfloat16,
        "shape": torch.Size([2, 3]),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "number": np.float32(0.5),
        "ema": {"wte": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
    }


def make(name: str, folder: Path) -> None:
    """Train, save, and note what the run had and what it did next. Every rank calls it."""
    from safetensors.torch import save_file

    tp, pp = MESHES[name]
    run = Run(tp, pp, name.partition("-")[0])
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    manual_seed(1234, run.model.mpu)
    run.step(0)
    run.step(1)
    run.model.save_parallelized(folder / name, optimizer=run.optimizer, lr_scheduler=run.scheduler, extra=extra())
    draws: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(draws, run.draws())
    kept = {f"saved {key}": value for key, value in run.weights(folder / "saved").items()}
    run.step(2)
    kept |= {f"next {key}": value for key, value in run.weights(folder / "next").items()}
    if dist.get_rank() == 0:
        plain = GPT2LMHeadModel.from_pretrained(folder / "saved", dtype="auto").eval()
        with torch.no_grad():
            kept["logits"] = plain(input_ids=batch(9)["input_ids"]).logits
        kept["draws"] = torch.stack(draws)
        kept["lr"] = torch.tensor(run.scheduler.get_last_lr(), dtype=torch.float64)
        kept["loss_scale"] = torch.tensor(float(run.optimizer.loss_scale))
        save_file(kept, folder / f"{name}.safetensors")
        shutil.rmtree(folder / "saved")
        shutil.rmtree(folder / "next")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    make(sys.argv[1], Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
