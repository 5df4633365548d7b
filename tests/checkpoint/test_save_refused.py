"""Saving and loading in unusual ways, or real ranks fail, all of them: the previous checkpoint and the model stay."""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

from autopar.checkpoint import merge_checkpoint
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.layout import Block, Layout
from autopar.plan.plan import TensorPlan
from tests.checkpoint.refusals import refusals
from tests.checkpoint.tiny import (
    FULL_DISK,
    TinyConfig,
    TinyModel,
    before_each_write,
    files,
    flip,
    local,
    make_plan,
    raising,
    same,
    tiny,
)
from tests.harness.worlds import distributed, pooled
from tests.small import gpt2, parallel


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
def test_a_model_that_has_changed_or_an_optimizer_that_differs_is_not_saved(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    with refusals(lambda: os.listdir(tmp_path) == []) as refuse:
        for message, change in CHANGES:
            model = tiny(mpu)
            if mpu.rank == 1:  # on one rank only: the other one must not go ahead
                change(model)
            refuse(message, message, model.save_parallelized, tmp_path / "ckpt")
        model = tiny(MPU())  # of replicas, the only optimizer that has stepped is not the one that writes
        optimizer = torch.optim.AdamW(model.parameters())
        if mpu.rank == 1:
            one_step(model, optimizer)
        refuse("optimizers differ", (), model.save_parallelized, tmp_path / "ckpt", optimizer=optimizer)


def _full_disk() -> Any:
    return before_each_write(raising(FULL_DISK, "gate")) if dist.get_rank() == 1 else nullcontext()


def _with_a_bad_config(model: Any) -> Any:
    model.config.oops = object()
    return nullcontext()


def _removed(rank: int) -> Any:
    is_dir = Path.is_dir
    if dist.get_rank() != rank:
        return nullcontext()
    return mock.patch.object(Path, "is_dir", lambda self: ".tmp-" not in str(self) and is_dir(self))


FULL = ("cannot write model-tp1-pp0.safetensors", "No space left", "rank 1 of 2")
ROWS: list[tuple[str, Callable[[Any], Any], dict[str, bool], tuple[str, ...]]] = [  # name, what happens, options, words
    ("a full disk", lambda _: _full_disk(), {"merge_checkpoints": False}, FULL),
    ("a full disk while merging", lambda _: _full_disk(), {"merge_checkpoints": True}, FULL),
    ("a config that cannot be saved", _with_a_bad_config, {}, ("TypeError",)),
    ("a folder that is not shared", lambda _: _removed(1), {}, ("rank 1 does not see the folder",)),
    ("a folder that was removed", lambda _: _removed(0), {}, ("does not see the folder",)),
]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    tiny(mpu).save_parallelized(tmp_path / "ckpt")
    old = files(tmp_path / "ckpt")

    def kept() -> bool:
        return os.listdir(tmp_path) == ["ckpt"] and old == files(tmp_path / "ckpt")

    with refusals(kept) as refuse:
        for name, happens, options, parts in ROWS:
            model = tiny(mpu, 1)
            with happens(model):
                refuse(name, parts, model.save_parallelized, tmp_path / "ckpt", **options)
                if name == "a folder that is not shared":
                    refuse(name, parts, model.save_parallelized, tmp_path / "new")
    tiny(mpu).save_parallelized(tmp_path / "ckpt")


Tensors = Mapping[str, TensorPlan]


SHARD = "model-tp1-pp0.safetensors"


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [  # name of the folder, what is done to it, what is said
    ("missing", lambda f: os.remove(f / SHARD), f"missing is incomplete: 1 of 2 shards found, {SHARD} is missing"),
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
    mpu = MPU(tensor_parallel_size=2)
    tiny(mpu, seed=1).save_parallelized(tmp_path / "ckpt")
    full = TinyModel(TinyConfig(), seed=1).proj.weight.data
    uneven = Layout.of(1, [Block("heads", 6, 2, ((0, 2), (2, 6)))])
    interleaved = Layout.of(1, [Block("heads", 2, 3, ((0, 1), (1, 2))), Block("heads", 2, 3, ((0, 1), (1, 2)))])
    for layout in (uneven, interleaved):
        model = tiny(mpu)
        plan = make_plan(2)
        plan = replace(
            plan, tensors={**plan.tensors, "proj.weight": replace(plan.tensors["proj.weight"], layout=layout)}
        )
        model.proj.weight.data = layout.shard(torch.zeros_like(full), mpu.tp.rank)
        model._autopar_checkpoint = replace(model._autopar_checkpoint, plan=plan)
        model.from_parallelized(tmp_path / "ckpt")
        assert torch.equal(model.proj.weight, layout.shard(full, mpu.tp.rank))
        assert torch.equal(model.gate, tiny(mpu, seed=1).gate)
    assert full[:, :6].shape == model.proj.weight.shape and not torch.equal(full[:, :6], model.proj.weight)


@distributed(world_size=1)
def test_without_torchrun(tmp_path):
    dist.destroy_process_group()
    model = tiny(MPU())  # starts its own group, with a store of another kind
    assert isinstance(dist.distributed_c10d._get_default_store(), dist.PrefixStore)
    for _ in range(3):
        model.save_parallelized(tmp_path / "ckpt")
    assert same(local(tiny(MPU(), 1).from_parallelized(tmp_path / "ckpt")), local(model))
    dist.destroy_process_group()
    with pytest.raises(CheckpointError, match="process group, but it was destroyed"):
        model.save_parallelized(tmp_path / "ckpt")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_half_precision_is_saved_as_it_is_and_loading_converts_with_a_warning(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu).to(torch.bfloat16)
    model.save_parallelized(tmp_path / "ckpt")
    assert json.loads((tmp_path / "ckpt" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.warns(UserWarning, match="7 tensors were converted on loading, gate from bfloat16 to float16"):
        other = tiny(mpu, 1).from_parallelized(tmp_path / "ckpt")
    assert torch.equal(other.embed.weight, model.embed.weight.float())
    model.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    assert load_file(tmp_path / "merged" / "model.safetensors")["qkv.weight"].dtype == torch.bfloat16


class Words:
    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        (Path(folder) / "tokenizer.json").write_text("words")


@pooled(world_size=2)
def test_the_tokenizers_files_come_along(tmp_path):
    model = tiny(MPU(tensor_parallel_size=2))
    shards, whole = tmp_path / "ckpt", tmp_path / "whole"
    model.save_parallelized(shards, tokenizer=Words())
    model.save_parallelized(shards)  # they are the user's, and stay
    model.save_parallelized(whole, merge_checkpoints=True, tokenizer=Words())
    model.from_parallelized(shards)
    for step in (1, 2):
        model.save_parallelized(tmp_path / f"step-{step}", tokenizer=Words(), keep_last=1)
    dist.barrier()
    assert not (tmp_path / "step-1").exists(), "they are part of a checkpoint, and go with it"
    if dist.get_rank() == 0:
        merge_checkpoint(shards, tmp_path / "merged")
        for folder in (shards, whole, tmp_path / "merged"):
            assert (folder / "tokenizer.json").read_text() == "words"


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pooled(world_size=1)
def test_odd_views_keep_their_values_and_a_refused_generation_config_does_not_stop_a_save(tmp_path):
    model = parallel(gpt2(), 1)
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.3
    value = torch.tensor([1 + 2j]).conj()
    with pytest.warns(UserWarning, match="generation_config.json is not saved"):
        model.save_parallelized(tmp_path / "ckpt", extra={"conj": value, "neg": value.imag})
    assert not (tmp_path / "ckpt" / "generation_config.json").exists()
    assert json.loads((tmp_path / "ckpt" / "config.json").read_text())["model_type"] == "gpt2"
    found: dict[str, torch.Tensor] = {}
    model.from_parallelized(tmp_path / "ckpt", extra=found)
    assert found["conj"].tolist() == [1 - 2j] and found["neg"].tolist() == [-2]


@pooled(world_size=1)
def test_optimizers_and_schedulers_that_are_refused_change_nothing(tmp_path):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups[0]["params"], {})

    model = tiny(MPU())
    inner = torch.optim.AdamW(model.parameters())
    one_step(model, inner)
    model.save_parallelized(tmp_path / "ckpt", optimizer=inner, lr_scheduler=LambdaLR(inner, lambda step: 1.0))
    with torch.no_grad():
        model.embed.weight.add_(1)
    before, other = local(model), CosineAnnealingLR(inner, 5)
    with refusals(lambda: same(local(model), before)) as refuse:
        for call in (model.save_parallelized, model.from_parallelized):
            said = "Wrapper wraps a AdamW (attribute 'inner')"
            refuse("an optimizer around another one", said, call, tmp_path / "ckpt", optimizer=Wrapper(inner))
        for scheduler in (other, SequentialLR(inner, [other, other], [3])):
            said = "lr_scheduler must be a LambdaLR"
            refuse(type(scheduler), said, model.from_parallelized, tmp_path / "ckpt", lr_scheduler=scheduler)
        with torch.inference_mode():
            refuse("inference mode", "in torch.inference_mode", model.from_parallelized, tmp_path / "ckpt")
