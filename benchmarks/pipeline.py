"""Efficiency of pipeline schedules over 2 processes, one thread each, against one process in the same run.

    .venv/bin/python benchmarks/pipeline.py                   # 1f1b and gpipe, 8 micro-batches
    .venv/bin/python benchmarks/pipeline.py --family gpt2 --rounds 8

For each schedule: the time of one process (the other sleeps) over twice the time of the pipeline, as a share of
m / (m + p - 1), which a pipeline of p equal stages and m micro-batches without any cost reaches; and the most memory
that activations need at one time, on each stage. Rounds of one process and of the pipeline take turns, and the fastest
of each counts, so that what else runs on the machine disturbs both alike. CPU seconds tell what the pipeline itself
costs, whatever else runs: their sum over the stages is that of one process where it costs nothing.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, MICROBATCHES = 2, 8


def build(family: str, hidden: int, layers: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if family == "gpt2":
        config: Any = GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=hidden // 64, vocab_size=512, n_positions=512, bos_token_id=0
        )
        config.eos_token_id = 0
        config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
        return GPT2LMHeadModel(config)
    heads = hidden // 64
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=hidden * 11 // 4 // 64 * 64,
            vocab_size=512,
            max_position_embeddings=512,
        )
    )


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Of the clock, and of this process's CPU."""
    started = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started[0], time.process_time() - started[1]


class Turns:
    """One rank works, the others sleep: a barrier would spin."""

    def __init__(self, folder: str) -> None:
        self.folder, self.number = Path(folder), itertools.count()

    def alone(self, work: Callable[[], Any]) -> tuple[float, float]:
        done = self.folder / f"done-{next(self.number)}"
        taken = 0.0, 0.0
        dist.barrier()
        if dist.get_rank() == 0:
            taken = seconds(work)
            done.touch()
        while not done.exists():
            time.sleep(0.02)
        return taken

    def together(self, work: Callable[[], Any]) -> tuple[float, float]:
        dist.barrier()

        def until_all_are_done() -> None:
            work()
            dist.barrier()

        return seconds(until_all_are_done)


def activation_peak(work: Callable[[], Any]) -> int:
    """The most bytes that were saved for backward at one time, weights aside; a storage counts once."""

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    alive: weakref.WeakSet[Saved] = weakref.WeakSet()
    most = 0

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal most
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return tensor
        saved = Saved(tensor)
        alive.add(saved)
        storages = {s.tensor.untyped_storage().data_ptr(): s.tensor.untyped_storage().nbytes() for s in alive}
        most = max(most, sum(storages.values()))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda s: s.tensor if isinstance(s, Saved) else s):
        work()
    return most


def rank_main(rank: int, folder: str, options: dict[str, Any]) -> None:
    import autopar

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    turns = Turns(folder)
    plain = build(options["family"], options["hidden"], options["layers"])
    ids = torch.randint(0, 512, (MICROBATCHES, options["seq"]))
    batch = {"input_ids": ids, "labels": ids}

    def one_process() -> None:
        for row in range(MICROBATCHES):
            (plain(input_ids=ids[row : row + 1], labels=ids[row : row + 1]).loss / MICROBATCHES).backward()

    found: dict[str, Any] = {}
    for schedule in ("1f1b", "gpipe"):
        piped = autopar.initialize(
            copy.deepcopy(plain),
            {
                "model_parallelism": {"pipeline_parallel_size": RANKS},
                "pipeline": {"schedule": schedule, "microbatch_size": 1, "layers_per_stage": options["stages"] or []},
            },
        )
        step = functools.partial(piped.execute_pipeline, batch)
        turns.together(step)
        ones, twos = [], []
        for _ in range(options["rounds"]):
            ones.append(turns.alone(one_process))
            twos.append(turns.together(step))
        peak: list[Any] = [None] * RANKS
        dist.all_gather_object(peak, activation_peak(step))
        one, two = min(taken for taken, _ in ones), min(taken for taken, _ in twos)
        busy: list[Any] = [None] * RANKS
        dist.all_gather_object(busy, min(cpu for _, cpu in twos))
        ideal = MICROBATCHES / (MICROBATCHES + RANKS - 1)
        found[schedule] = {
            "one process, s": round(one, 3),
            "pipeline, s": round(two, 3),
            "speedup": round(one / two, 3),
            "share of m / (m + p - 1)": round(one / two / RANKS / ideal, 3),
            "CPU of one process, s": round(min(cpu for _, cpu in ones), 3),
            "CPU of each stage, s": [round(each, 3) for each in busy],
            "activations, MB per stage": [round(each / 2**20, 1) for each in peak],
            "blocks per stage": [stop - start for start, stop in itertools.pairwise(piped._autopar.stages.bounds)],
            "load": round(os.getloadavg()[0], 1),
        }
        if options["profile"]:
            table = profile(step)
            print(table if rank == 0 else "", end="")
        piped.mpu.destroy()
    if rank == 0:
        print(json.dumps({"model": options, "micro-batches": MICROBATCHES, "processes": RANKS, **found}, indent=2))
    dist.destroy_process_group()


def profile(work: Callable[[], Any]) -> str:
    with torch.profiler.profile() as made:
        work()
    return str(made.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="*", help="blocks of each stage; default: by parameters")
    parser.add_argument("--profile", action="store_true", help="print where the first stage's time goes")
    options = vars(parser.parse_args())
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, options), nprocs=RANKS)


if __name__ == "__main__":
    main()
