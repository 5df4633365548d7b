"""Real ranks fail to save or to load, all of them; the previous checkpoint and the model stay."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.layout import Block, Layout
from autopar.plan.plan import TensorPlan
from autopar.storage.safetensors_io import SafetensorsWriter
from tests.checkpoint.refusals import refusals
from tests.checkpoint.test_broken import break_mixed, break_swapped, flip
from tests.checkpoint.tiny import TinyConfig, TinyModel, local, make_plan, same, tiny, with_layout
from tests.harness.worlds import pooled, spawn


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_called_on_one_rank_only_then_properly(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu)
    for method in ("save_parallelized", "from_parallelized"):
        if mpu.rank == 1:
            start = time.monotonic()
            with pytest.raises(
                CheckpointError, match=f"^{method} was called on rank 1 but not on rank 0 of 2 within 1 s"
            ):
                getattr(model, method)(tmp_path / "ckpt", timeout=1)
            assert time.monotonic() - start < 5
        dist.barrier()
        assert method == "from_parallelized" or not (tmp_path / "ckpt").exists()
        getattr(model, method)(tmp_path / "ckpt")


def _wrong_saves(folder: Path, mpu: MPU, model: Any) -> list[tuple[dict[str, object], str]]:
    """Arguments, some as a script for OSLO or transformers gives them, some on one rank only; and what is said."""
    x = str(folder / "x")
    return [
        ({"save_directory": x, "directory": x}, f"save_parallelized got directory='{x}' and save_directory='{x}':"
                                                " pass only one"),
        ({}, "directory=None must be a path"),
        ({"save_directory": x, "save_function": torch.save}, "does not support save_function=<function>, only save"),
        ({"save_directory": x, "state_dict": model.state_dict()}, "does not support state_dict=<PartialStateDict>"),
        ({"directory": x, "push_to_hub": True}, "not support push_to_hub=True, only push_to_hub=False"),
        ({"directory": x, "safe_serialization": False}, "does not support safe_serialization=False"),
        ({"directory": x, "scheduler": 3}, "has no argument 'scheduler'. Did you mean 'lr_scheduler'?"),
        ({"directory": x, "max_shard_sise": 3}, "has no argument 'max_shard_sise'. Did you mean 'max_shard_size'?"),
        ({"directory": x, **({"optimiser": 3} if mpu.rank == 1 else {})}, "'optimiser'. Did you mean 'optimizer'?"),
        ({"directory": x, "tokenizer": 3}, "tokenizer must have a save_pretrained method; got int"),
        ({"directory": 3}, "directory=3 must be a path"),
        ({"directory": ""}, "directory='' must be a path"),
        ({"directory": x, "merge_checkpoints": "yes"}, "merge_checkpoints='yes'"),
        ({"directory": x, "merge_checkpoints": True, "max_shard_size": "5 bananas"},
         "max_shard_size must be a number of bytes, or a text such as '5GB'; got '5 bananas'"),
        ({"directory": x, "merge_checkpoints": True, "format": "gguf"},
         "format='gguf' must be one of 'safetensors', 'bin'"),
        ({"directory": x, "format": "bin"}, "needs merge_checkpoints=True"),
        ({"directory": x, "async_save": "yes"}, "async_save='yes' must be True or False"),
        ({"directory": x, "async_save": True, "extra": {"f": print}}, "extra.f"),
        ({"directory": x, "timeout": 0}, "timeout=0 must be"),
        ({"directory": x, "timeout": True}, "timeout=True must be"),
        ({"directory": x, "timeout": "1"}, "timeout='1' must be"),
        ({"directory": folder / "file"}, "must be a folder, got a file"),
        ({"directory": folder / "file" / "x"}, "cannot make"),
        ({"directory": folder / "photos"}, "holds model.safetensors without autopar.json or config.json"),
        ({"directory": folder / "x-1", "keep_last": 1, "merge_checkpoints": True}, "not supported with merge_"),
        ({"directory": folder / f"own{mpu.rank}"}, "ranks made different calls: directory"),
        ({"directory": x, "merge_checkpoints": mpu.rank == 0},
         "ranks made different calls: merge_checkpoints is True on rank 0 and False"),
        ({"directory": x, "merge_checkpoints": 1 if mpu.rank else True}, "merge_checkpoints=1"),
    ]  # fmt: skip


@pooled(world_size=2)
def test_wrong_arguments(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu)
    x = str(tmp_path / "x")
    (tmp_path / f"own{mpu.rank}").mkdir()
    if mpu.rank == 0:
        (tmp_path / "file").write_text("x")
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "model.safetensors").write_text("x")
    dist.barrier()

    def kept() -> bool:
        found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
        return found == ["file", "own0", "own1", "photos", "photos/model.safetensors"]

    with refusals(kept) as refuse:
        for arguments, message in _wrong_saves(tmp_path, mpu, model):
            refuse(arguments, message, model.save_parallelized, **arguments)
        refuse("no folder", "directory=None must be a path", model.from_parallelized, None)
    model.save_parallelized(
        save_directory=x, save_config=True, state_dict=None, mapping=None, push_to_hub=False, safe_serialization=True
    )
    before = local(model)
    for arguments in ({"save_directory": x}, {"path": x}, {"directory": x, "strict": True}):
        with torch.no_grad():
            model.norm.weight.zero_()
        assert model.from_parallelized(**arguments) is model
        assert same(local(model), before)
    with refusals() as refuse:
        for arguments, message in (
            ({"directory": x, "path": x}, "got directory="),
            ({"path": x, "device_map": "auto"}, "from_parallelized does not support device_map='auto'"),
            ({"path": x, "verfy": False}, "has no argument 'verfy'. Did you mean 'verify'?"),
        ):
            refuse(arguments, message, model.from_parallelized, **arguments)
        call = model.from_parallelized if mpu.rank else model.save_parallelized
        refuse("another call", "ranks made different calls: function is 'save_parallelized' on rank 0", call, x)


CHANGES: list[tuple[str, Callable[[Any], object]]] = [  # what is said, and what was done to the model on rank 1
    ("new: gait; gone: step", lambda m: (m.register_buffer("gait", torch.ones(1)), delattr(m, "step"))),
    ("on tensor-parallel rank 1, got [9, 3]", lambda m: setattr(m, "gate", nn.Parameter(torch.ones(9, 3)))),
    ("must be tied", lambda m: setattr(m.head, "weight", nn.Parameter(m.embed.weight.detach().clone()))),
    ("meta device", lambda m: m.to("meta")),
    ("norm.weight is bfloat16 on one rank and float32 on rank 1", lambda m: m.norm.float()),
]


@pooled(world_size=2)
def test_a_model_that_has_changed_is_not_saved(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    with refusals(lambda: os.listdir(tmp_path) == []) as refuse:
        for message, change in CHANGES:
            model = tiny(mpu)
            if mpu.rank == 1:  # on one rank only: the other one must not go ahead
                change(model)
            refuse(message, message, model.save_parallelized, tmp_path / "ckpt")


def _full_disk(patch: pytest.MonkeyPatch, model: Any) -> None:
    write = SafetensorsWriter.write

    def full(self, name, tensor):
        if name == "gate":
            raise OSError(28, "No space left on device")
        write(self, name, tensor)

    if dist.get_rank() == 1:
        patch.setattr(SafetensorsWriter, "write", full)


def _config(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.config.oops = object()


def _not_shared(patch: pytest.MonkeyPatch, model: Any) -> None:
    _removed(patch, model, rank=1)


def _removed(patch: pytest.MonkeyPatch, model: Any, rank: int = 0) -> None:
    is_dir = Path.is_dir
    if dist.get_rank() == rank:
        patch.setattr(Path, "is_dir", lambda self: ".tmp-" not in str(self) and is_dir(self))


FULL = ("cannot write model-tp1-pp0.safetensors", "No space left", "rank 1 of 2")
ROWS: list[tuple[str, Callable[[pytest.MonkeyPatch, Any], None], dict[str, bool], tuple[str, ...]]] = [
    ("a full disk", _full_disk, {"merge_checkpoints": False}, FULL),
    ("a full disk while merging", _full_disk, {"merge_checkpoints": True}, FULL),
    ("a config that cannot be saved", _config, {}, ("TypeError",)),
    ("a folder that is not shared", _not_shared, {}, ("rank 1 does not see the folder",)),
    ("a folder that was removed", _removed, {}, ("does not see the folder",)),
]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    tiny(mpu).save_parallelized(tmp_path / "ckpt")
    old = {path.name: path.read_bytes() for path in (tmp_path / "ckpt").iterdir()}

    def kept() -> bool:
        return os.listdir(tmp_path) == ["ckpt"] and old == {
            path.name: path.read_bytes() for path in (tmp_path / "ckpt").iterdir()
        }

    with refusals(kept) as refuse:
        for name, prepare, options, parts in ROWS:
            model = tiny(mpu, 1)
            with pytest.MonkeyPatch.context() as patch:
                prepare(patch, model)
                refuse(name, parts, model.save_parallelized, tmp_path / "ckpt", **options)
                if name == "a folder that is not shared":
                    refuse(name, parts, model.save_parallelized, tmp_path / "new")
    tiny(mpu).save_parallelized(tmp_path / "ckpt")


def die_while_saving(folder: str, victim: int, merge: bool) -> None:
    mpu = MPU(tensor_parallel_size=2)  # 2 x 2
    tiny(mpu, seed=0).save_parallelized(folder)
    dist.barrier()
    if mpu.rank == victim:
        write = SafetensorsWriter.write

        def die(self, name, tensor):
            write(self, name, tensor)
            if name == "gate":
                os.kill(os.getpid(), signal.SIGKILL)

        SafetensorsWriter.write = die
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=f"^rank {victim} of 4 failed.*\n.*{Path(folder).name}.*(unch|complete)"):
        tiny(mpu, seed=1).save_parallelized(folder, merge_checkpoints=merge)
    assert time.monotonic() - start < 10


def load_old(folder: str) -> None:
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu, seed=1).from_parallelized(folder)
    assert same(local(model), local(tiny(mpu, seed=0)))
    model.save_parallelized(folder)


@pytest.mark.tier("all")
@pytest.mark.parametrize(("victim", "merge"), [(1, False), (0, False), (1, True)])
def test_a_rank_killed_in_the_middle_of_a_save(tmp_path, victim, merge):
    folder = tmp_path / "ckpt"
    spawn(__name__, "die_while_saving", 4, 60, (str(folder), victim, merge), expect_dead=(victim,))
    left = [name for name in os.listdir(tmp_path) if name != "ckpt"]
    assert len(left) == (1 if victim == 0 else 0)  # rank 0 cleans up, unless it is the one that died
    assert not any((tmp_path / name / "autopar.json").exists() for name in left)
    spawn(__name__, "load_old", 2, 60, (str(folder),))
    assert os.listdir(tmp_path) == ["ckpt"]


Tensors = Mapping[str, TensorPlan]


SHARD = "model-tp1-pp0.safetensors"


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [  # name of the folder, what is done to it, what is said
    ("truncated", lambda f: os.truncate(f / SHARD, 700), f"{SHARD} is truncated or overwritten: expected"),
    ("missing", lambda f: os.remove(f / SHARD), f"missing is incomplete: 1 of 2 shards found, {SHARD} is missing"),
    ("swapped", break_swapped, f"model-tp0-pp0.safetensors was saved as {SHARD}"),
    ("mixed", lambda f: break_mixed(f, pp=1), f"{SHARD} belongs to another save"),
    ("flipped", lambda f: flip(f / SHARD), f"{SHARD} is damaged"),
    ("garbage", lambda f: (f / "autopar.json").write_text("{"), "autopar.json is not a manifest"),
    ("chkpt", shutil.rmtree, "does not exist. Did you mean 'ckpt'?"),
]


def _other_shape(model: Any, tensors: Tensors) -> Tensors:
    model.gate = nn.Parameter(torch.zeros(4 if model._autopar_checkpoint.mpu.tp.rank == 0 else 3, 2, dtype=torch.half))
    return {**tensors, "gate": replace(tensors["gate"], shape=(7, 2))}


def _other_name(model: Any, tensors: Tensors) -> Tensors:
    model.gait, model.gate = model.gate, None
    return {("gait" if n == "gate" else n): replace(t, name="gait") if n == "gate" else t for n, t in tensors.items()}


def _other_type(model: Any, tensors: Tensors) -> Tensors:
    model.step.data = model.step.data.float()
    return tensors


MODELS: list[tuple[Callable[[Any, Tensors], Tensors], tuple[str, ...]]] = [
    (_other_shape, ("gate has shape [7, 3] in", "and [7, 2] in the model")),
    (
        _other_name,
        ("1 missing, 1 unexpected", "Missing in the checkpoint: gait. Did you mean 'gate'?", "Unexpected: gate"),
    ),
    (_other_type, ("step is int64 in", "and float32 in the model")),
]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_checkpoints_that_do_not_fit_change_nothing(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu)
    before = local(model)
    tiny(mpu, seed=1).save_parallelized(tmp_path / "ckpt")
    if mpu.rank == 0:
        for name, damage, _ in DAMAGES:
            damage(Path(shutil.copytree(tmp_path / "ckpt", tmp_path / name)))
    dist.barrier()
    with refusals(lambda: same(local(model), before)) as refuse:
        for name, _, message in DAMAGES:
            refuse(name, message, model.from_parallelized, tmp_path / name)
    if mpu.rank == 1:  # a node with its own disk
        shutil.copytree(tmp_path / "ckpt", tmp_path / "mine")
    dist.barrier()
    model.from_parallelized(tmp_path / "ckpt")
    assert same(local(model), local(tiny(mpu, seed=1)))
    with refusals(lambda: same(local(model), before)) as refuse:
        for change, messages in MODELS:
            model, plan = tiny(mpu), make_plan(2)
            plan = replace(plan, tensors=change(model, plan.tensors))
            model._autopar_checkpoint = replace(model._autopar_checkpoint, plan=plan)
            before = local(model)
            refuse(change.__name__, messages, model.from_parallelized, tmp_path / "ckpt")


@pooled(world_size=2)
def test_a_model_that_is_shared_out_differently_takes_its_own_ranges(tmp_path):
    """Even where the local shapes are the same and the units are others: interleaved instead of side by side."""
    mpu = MPU(tensor_parallel_size=2)
    tiny(mpu, seed=1).save_parallelized(tmp_path / "ckpt")
    full = TinyModel(TinyConfig(), seed=1).proj.weight.data
    uneven = Layout.of(1, [Block("heads", 6, 2, ((0, 2), (2, 6)))])
    interleaved = Layout.of(1, [Block("heads", 2, 3, ((0, 1), (1, 2))), Block("heads", 2, 3, ((0, 1), (1, 2)))])
    for layout in (uneven, interleaved):
        model = tiny(mpu)
        plan = with_layout(make_plan(2), "proj.weight", layout)
        model.proj.weight.data = layout.shard(torch.zeros_like(full), mpu.tp.rank)
        model._autopar_checkpoint = replace(model._autopar_checkpoint, plan=plan)
        model.from_parallelized(tmp_path / "ckpt")
        assert torch.equal(model.proj.weight, layout.shard(full, mpu.tp.rank))
        assert torch.equal(model.gate, tiny(mpu, seed=1).gate)
    assert full[:, :6].shape == model.proj.weight.shape and not torch.equal(full[:, :6], model.proj.weight)
