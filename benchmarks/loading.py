"""Memory, bytes read and time of loading a checkpoint with tensor parallelism, against its rivals; and by mesh.

    python -m benchmarks loading                               # 2 processes, a Llama of 1 GB in one file
    python -m benchmarks loading --rounds 5 --shard-size 200MB
    python -m benchmarks loading --rounds 0 --meshes           # meshes of 4 processes alone, a Llama of 380 MB

Variants, each in fresh processes, which touch every parameter after loading (``s``), and run a short forward then
(``with a forward``):

* ``autopar``: ``autopar.from_pretrained``, which reads each rank's own byte ranges;
* ``initialize``: transformers' ``from_pretrained`` followed by ``autopar.initialize``;
* ``shards``: ``autopar.from_pretrained`` of the same weights, saved as shards by the same number of ranks, verified;
* ``parallelized``: ``model.from_parallelized`` of those, into a model that was built lazily, so with random weights;
* ``transformers``: transformers' own tensor-parallel loading, where accelerate is installed (it needs that).

Peak is that of the resident memory (VmHWM) above what the process had before it loaded; pages of a mapped file count,
as they do for a container's limit on resident memory. Bytes read are those of all read calls (``rchar``); what a map
brings in does not appear there. The checkpoint was written just before: it is read from the page cache.

By mesh, on 4 processes: the peak of anonymous memory above what the process had before, in even shares (a quarter of
the model), while ``autopar.from_pretrained`` reads the Hugging Face folder (``files``) or shards that another mesh has
saved (``shards``), while ``initialize`` draws a model of ``lazy_init`` (``drawn``), and while ``from_parallelized``
reads shards into that (``parallelized``).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.process_memory import anonymous_peak, bytes_read, high_water, status
from benchmarks.ranks import run_ranks
from benchmarks.variants import first_line

VARIANTS = ("autopar", "shards", "parallelized", "initialize", "transformers")
MIB = 1 << 20
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
MESHES: dict[str, dict[str, Any]] = {
    "tp 4": {"model_parallelism": {"tensor_parallel_size": 4}},
    "pp 4": {"model_parallelism": {"pipeline_parallel_size": 4}},
    "dp 4, ZeRO 2": {"zero": {"stage": 2}},
    "dp 4, ZeRO 3": {"zero": {"stage": 3}},
    "tp 2 x dp 2, ZeRO 2": {"model_parallelism": TP2, "zero": {"stage": 2}},
    "tp 2 x dp 2, ZeRO 3": {"model_parallelism": TP2, "zero": {"stage": 3}},
    "pp 2 x dp 2, ZeRO 3": {"model_parallelism": PP2, "zero": {"stage": 3}},
}
_OF_MESHES = {"intermediate_size": 1024, "vocab_size": 4000, "num_key_value_heads": 4}  # blocks of a quarter of a share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16, help="48 MB each")
    parser.add_argument("--shard-size", default="50GB", help="of the checkpoint's files")
    parser.add_argument("--meshes", nargs="*", choices=MESHES, default=list(MESHES), help="none: no loads by mesh")
    parser.add_argument("--disk", help="where to write the checkpoint (default: a temporary folder)")


def make(folder: str, layers: int, shard_size: str, **sizes: Any) -> None:
    """Write a Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_key_value_heads": 8, "intermediate_size": 2816, "vocab_size": 32000} | sizes
    config = LlamaConfig(hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, **sizes)
    with torch.no_grad():
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard_size)


def save_parallelized(options: dict[str, Any]) -> None:
    """On every rank: write the same weights as shards."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import autopar

    sizes = {"model_parallelism": {"tensor_parallel_size": dist.get_world_size()}}
    model = autopar.from_pretrained(AutoModelForCausalLM, options["source"], sizes, dtype=torch.float32)
    model.save_parallelized(options["source"] + "/parallelized", timeout=600)


def load(variant: str, folder: str, world: int) -> Any:
    """Load the checkpoint as a variant does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import autopar

    sizes = {"model_parallelism": {"tensor_parallel_size": world}}
    if variant == "autopar":
        return autopar.from_pretrained(AutoModelForCausalLM, folder, sizes, dtype=torch.float32)
    if variant == "shards":
        return autopar.from_pretrained(AutoModelForCausalLM, f"{folder}/parallelized", sizes, dtype=torch.float32)
    if variant == "parallelized":
        with autopar.lazy_init():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        return autopar.initialize(model, sizes).from_parallelized(f"{folder}/parallelized", timeout=600)
    if variant == "initialize":
        return autopar.initialize(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), sizes)
    from transformers.distributed import DistributedConfig

    settings = DistributedConfig(tp_size=world, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=settings, dtype=torch.float32)


def rank_main(options: dict[str, Any]) -> dict[str, Any]:
    """On every rank: load once, touch every page, run a forward, and tell what it took."""
    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama  # noqa: F401  (what every variant imports is no part of it)

    import autopar.pretrained  # noqa: F401

    dist.barrier()
    memory, read, start = status("VmRSS"), bytes_read(), time.perf_counter()
    share = 0
    try:
        model = load(options["variant"], options["source"], dist.get_world_size())
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.detach().view(-1)[:: 4096 // local.element_size()].sum().item()  # every page once
            share += local.numel() * local.element_size()
        taken, peak = time.perf_counter() - start, high_water() - memory
        with torch.no_grad():
            model(input_ids=torch.arange(16).view(1, 16))
    except Exception as error:  # no accelerate
        return {"missing": first_line(error)}
    measured = {"share": share, "s": taken, "read": bytes_read() - read, "peak": peak}
    return measured | {"used": time.perf_counter() - start, "peak used": high_water() - memory}


def mesh_main(options: dict[str, Any]) -> dict[str, list[float]]:
    """On every rank: load in each way, and return the peak in even shares, and the seconds."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    import autopar

    folder, mesh = options["source"], options["mesh"]

    def loaded(path: str) -> Any:
        return autopar.from_pretrained(AutoModelForCausalLM, path, mesh, dtype=torch.float32)

    def drawn(_: Any) -> Any:
        with autopar.lazy_init():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        return autopar.initialize(model, mesh)

    ways: dict[str, Callable[[Any], Any]] = {
        "files": lambda _: loaded(folder),
        "shards": lambda _: loaded(f"{folder}/parallelized"),
        "drawn": drawn,
        "parallelized": lambda model: model.from_parallelized(f"{folder}/parallelized", timeout=600),
    }
    loaded(options["warm"]).mpu.destroy()  # imports, and what is made once
    model, found = None, {}
    for name, way in ways.items():
        model = model if name == "parallelized" else None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # gives back what a way before has freed
        dist.barrier()
        start = time.perf_counter()
        with anonymous_peak() as peak:
            model = way(model)
        found[name] = [peak[0] / options["share"], time.perf_counter() - start]
    return found


def measure_meshes(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Load on every mesh, in fresh processes."""
    rows = []
    with tempfile.TemporaryDirectory(dir=options["disk"]) as folder:
        make(folder, options["layers"], options["shard_size"], **_OF_MESHES)
        make(f"{folder}/warm", 4, "50GB", **_OF_MESHES | {"intermediate_size": 32, "vocab_size": 100})
        run_ranks("benchmarks.loading:save_parallelized", {"source": folder}, 2)
        share = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 4
        for mesh in options["meshes"]:
            given = {"source": folder, "warm": f"{folder}/warm", "mesh": MESHES[mesh], "share": share}
            ranks = run_ranks("benchmarks.loading:mesh_main", given, 4)
            row: dict[str, Any] = {"mesh": mesh, "share, MiB": round(share / MIB)}
            for name in ranks[0]:
                row[f"{name}, peak / share"] = round(max(rank[name][0] for rank in ranks), 2)
                row[f"{name}, s"] = round(max(rank[name][1] for rank in ranks), 2)
            rows.append(row)
    return rows


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Load by every variant in turn, each time in fresh processes, read the bytes alone as a limit; then by mesh."""
    rows = measure_variants(options) if options["rounds"] else []
    return rows + (measure_meshes(options) if options["meshes"] else [])


def measure_variants(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Load by every variant in turn, each time in fresh processes; and read the bytes alone, as a limit."""
    world = options["processes"]
    rounds: dict[str, list[list[dict[str, Any]]]] = {variant: [] for variant in VARIANTS}
    reading = []
    with tempfile.TemporaryDirectory(dir=options["disk"]) as folder:
        make(folder, options["layers"], options["shard_size"])
        run_ranks("benchmarks.loading:save_parallelized", {"source": folder}, world)
        for _ in range(options["rounds"]):
            reading.append(read_files(Path(folder)))
            for variant in VARIANTS:
                given = {"variant": variant, "source": folder}
                rounds[variant].append(run_ranks("benchmarks.loading:rank_main", given, world))
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    rows = [{"variant": f"read all {size / MIB:.0f} MiB, one process", "s": round(statistics.median(reading), 3)}]
    return rows + [row_of(variant, measured) for variant, measured in rounds.items()]


def row_of(variant: str, measured: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Make a row: the worst rank's memory and bytes against its share, and the median of the slowest rank's time."""
    ranks = [rank for one in measured for rank in one]
    if any("missing" in rank for rank in ranks):
        return {"variant": variant, "missing": next(rank["missing"] for rank in ranks if "missing" in rank)}
    worst = max(ranks, key=lambda rank: rank["peak"] / rank["share"])
    most = max(ranks, key=lambda rank: rank["read"] / rank["share"])
    return {
        "variant": variant,
        "share, MiB": round(worst["share"] / MIB),
        "peak, MiB": round(worst["peak"] / MIB),
        "peak / share": round(worst["peak"] / worst["share"], 3),
        "with a forward": round(max(rank["peak used"] / rank["share"] for rank in ranks), 3),
        "read, MiB": round(most["read"] / MIB),
        "read / share": round(most["read"] / most["share"], 3),
        "s": round(statistics.median(max(rank["s"] for rank in one) for one in measured), 3),
        "with a forward, s": round(statistics.median(max(rank["used"] for rank in one) for one in measured), 3),
    }


def read_files(folder: Path) -> float:
    """Read all weights once; seconds."""
    start = time.perf_counter()
    buffer = bytearray(16 * MIB)
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start
