"""A tiny Hugging Face model with every kind of tensor, a hand-made plan for it, and an MPU that needs no processes."""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from autopar.checkpoint import attach, save
from autopar.checkpoint.save import snapshot
from autopar.checkpoint.shards import ShardReader
from autopar.checkpoint.state import config_writer, state_of
from autopar.distributed.axis import MeshSizes
from autopar.layout import Block, Layout, aligned_shards, even_shards, replicated_shards
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.files import NAME, checksum, file_checksum
from autopar.storage.safetensors_io import SafetensorsWriter

HEADS, KV_HEADS, WIDTH, VOCAB, HIDDEN = 6, 2, 2, 17, 4


class TinyConfig(PreTrainedConfig):
    model_type = "tiny"


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config: TinyConfig, seed: int = 0) -> None:
        super().__init__(config)
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH)
        self.proj = nn.Linear(HEADS * WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.bfloat16)
        self.gate = nn.Parameter(torch.randn(7, 3).half())
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("step", torch.tensor(seed + 5))
        self.register_buffer("mask", torch.rand(3, 3) > 0.5)
        self.register_buffer("scratch", torch.rand(5, dtype=torch.float64))
        nn.init.normal_(self.norm.weight)


def layouts(tp: int) -> dict[str, Layout]:
    """What is sharded over ``tp`` ranks: fused and uneven, KV heads replicated, a vocabulary of 17."""
    kv = replicated_shards(KV_HEADS, tp)
    heads = aligned_shards(HEADS, KV_HEADS, kv)
    q, k = Block("heads", HEADS, WIDTH, heads), Block("kv_heads", KV_HEADS, WIDTH, kv)
    fused = Layout.of(0, [q, k, k])
    return {
        "embed.weight": Layout.of(0, [Block("vocab", VOCAB, 1, even_shards(VOCAB, tp))]),
        "qkv.weight": fused,
        "qkv.bias": fused,
        "proj.weight": Layout.of(1, [q]),
        "gate": Layout.of(0, [Block("ffn", 7, 1, even_shards(7, tp))]),
    }


def make_plan(tp: int, prefix: str = "") -> Plan:
    shared = layouts(tp)
    tensors = {}
    for name, tensor in TinyModel(TinyConfig()).state_dict().items():
        if name != "head.weight":
            tensors[prefix + name] = TensorPlan(
                prefix + name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                shared.get(name),
                (prefix + "head.weight",) if name == "embed.weight" else (),
                None if name == "scratch" else name,
            )
    return Plan(tp, "tiny", "tiny.yaml", tensors, {})


def shard(model: nn.Module, plan: Plan, tp_rank: int) -> None:
    """Keep what one rank holds, in place."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in plan.tensors.items():
        if tensor.layout is not None:
            state[name].data = tensor.layout.shard(state[name].data, tp_rank)


def fake_mpu(tp: int = 1, t: int = 0, pp: int = 1, p: int = 0, dp: int = 1, d: int = 0) -> SimpleNamespace:
    """Enough of an MPU to write one shard."""
    axis = lambda size, rank: SimpleNamespace(size=size, rank=rank)  # noqa: E731
    sizes = MeshSizes(tp, pp, dp)
    return SimpleNamespace(
        tp=axis(tp, t), pp=axis(pp, p), dp=axis(dp, d), dp_cp=axis(dp, d), cp=axis(1, 0), sizes=sizes,
        shards=axis(tp, t), copies=axis(dp, d), saved_sizes=sizes,
        rank=(p * dp + d) * tp + t, world_size=tp * pp * dp, random_tracker=None,
    )  # fmt: skip


def tiny(mpu: object, seed: int = 0, plan: Plan | None = None) -> TinyModel:
    """A parallelized TinyModel."""
    plan = plan or make_plan(mpu.sizes.tp)
    model = TinyModel(TinyConfig(), seed)
    shard(model, plan, mpu.tp.rank)
    attach(model, plan, mpu, model, "", {"embed.weight": [0, 1]} if mpu.sizes.pp > 1 else None)
    return model


def moment(name: str, key: str, seed: int, like: TensorPlan) -> torch.Tensor:
    """The whole tensor of an optimizer's state, made from its name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}::{key}".encode()) + seed)
    return torch.rand(like.shape, generator=generator).to(getattr(torch, like.dtype))


def with_moments(model: Any, seed: int = 0) -> torch.optim.AdamW:
    """The optimizer of a parallelized model, as if it had taken 3 steps; its state depends on names and seed only."""
    state = state_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25 + seed)
    for name, parameter in model.named_parameters():
        due = state.plan.tensors[state.plan.canonical(name)]
        optimizer.state[parameter] = {"step": torch.tensor(3.0 + seed)}
        for key in ("exp_avg", "exp_avg_sq"):
            whole = moment(due.name, key, seed, due)
            shard = whole if due.layout is None else due.layout.shard(whole, state.mpu.tp.rank)
            optimizer.state[parameter][key] = shard
    return optimizer


SAVE_ID = "0123456789abcdef"
STAGES = [("embed", "qkv", "step"), ("proj", "norm", "gate", "head", "mask", "scratch")]


def written(ranks: list[tuple[nn.Module, save.Snapshot]], folder: Path, save_id: str = SAVE_ID) -> list[dict[str, Any]]:
    """Write the files of ranks that have these models, in order; returns their reports."""
    writers: Any = [SimpleNamespace(state=state_of(model), progress=False) for model, _ in ranks]
    spans = save.shares([mine.sizes() for _, mine in ranks])
    cut = [mine.cut(span) for (_, mine), span in zip(ranks, spans, strict=True)]
    return [save.Writer.write_shards(writer, mine, folder, save_id) for writer, mine in zip(writers, cut, strict=True)]


def save_alone(
    folder: Path, tp: int, seed: int = 0, pp: int = 1, save_id: str = SAVE_ID, optimizer: bool = False, **training: Any
) -> TinyModel:
    """Write a checkpoint with the shards of all ranks from one process; returns the plain model.

    ``training``: ``lr_scheduler`` and ``extra``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = []
    for p in range(pp):
        for t in range(tp):
            model = tiny(fake_mpu(tp, t, pp, p), seed)
            if pp > 1:
                for name in [name for s, names in enumerate(STAGES) if s != p for name in names]:
                    delattr(model, name)
            mine = snapshot(model, with_moments(model, seed) if optimizer else None, **training)
            ranks.append((model, mine))
    reports = written(ranks, folder, save_id)
    plain = tiny(fake_mpu(), seed)
    config_writer(plain)(folder)
    along = {"config.json": file_checksum(folder / "config.json")}
    save._manifest(state_of(model), save_id, reports, along).write(folder)
    return plain


def rewrite_manifest(folder: Path, change: Callable[[Any], Any], checksum_too: bool = True) -> None:
    """Edit ``autopar.json``; ``change`` returns the new content, or returns the old one edited."""
    path = folder / "autopar.json"
    data = json.loads(path.read_text())
    old = data.pop(NAME)
    data = change(data)
    text = json.dumps(data, indent=1).encode()
    if isinstance(data, Mapping):
        text = text.removesuffix(b"\n}")
        text += f',\n "{NAME}": "{checksum(text) if checksum_too else old}"\n}}\n'.encode()
    path.write_bytes(text)


def saved_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach() for k, v in model.state_dict().items() if k not in ("head.weight", "scratch")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit-equal, names and order included."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def local(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the tensors of this rank."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all tensors in an optimizer's state, in the order of its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [v.clone() for p in parameters for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_files(one: Path, other: Path) -> None:
    ours, theirs = files(one), files(other)
    assert sorted(ours) == sorted(theirs)
    assert not [name for name in ours if ours[name] != theirs[name]]


@contextlib.contextmanager
def before_each_write(call: Callable[[str], object]) -> Iterator[None]:
    """Call this with the name of each tensor before it is written."""
    write = SafetensorsWriter.write

    def wrapped(self: SafetensorsWriter, name: str, tensor: torch.Tensor) -> None:
        call(name)
        write(self, name, tensor)

    with mock.patch.object(SafetensorsWriter, "write", wrapped):
        yield


def raising(error: BaseException, at: str = "") -> Callable[[str], None]:
    """What raises this for a tensor of this name, or for any."""

    def call(name: str) -> None:
        if at in ("", name):
            raise error

    return call


FULL_DISK = OSError(28, "No space left on device")


def stored_is(folder: Path, weights: Mapping[str, torch.Tensor], seed: int = 0) -> None:
    """Assert that the files hold these weights, and the moments of this seed."""
    with ShardReader(folder, ("model", "optimizer")) as shards:
        for name, entry in shards.manifest.tensors.items():
            assert torch.equal(shards.lazy(name).read(), weights[name]), name
            for key in ("exp_avg", "exp_avg_sq") if name in shards.manifest.parameters else ():
                due = moment(name, key, seed, entry)
                assert torch.equal(shards.lazy(f"{name}::{key}", "optimizer").read(), due), f"{key} of {name}"


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by part and name."""
    with ShardReader(folder, ("model", "optimizer", "extra")) as shards:
        return {
            f"{part}/{name}": shards.lazy(name, part).read()
            for part, entry in shards.manifest.parts.items()
            for name in entry.tensors
        }
