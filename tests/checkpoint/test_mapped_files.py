"""Files that are mapped on request: the same model, no copy of what lies together, files untouched."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

import autopar
from autopar.errors import CheckpointError
from autopar.layout import Block, Layout, even_shards
from autopar.storage import lazy_tensor
from autopar.storage.files import RangeFile
from autopar.storage.lazy_tensor import Joined, Stored, map_shard, narrowed
from tests.checkpoint.loading import same, shared, tp
from tests.pool import pooled
from tests.small import gpt2, llama


@pytest.fixture
def file(tmp_path):
    """Numbers 0 to 8191 from byte 8 on."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(8) + torch.arange(8192.0).numpy().tobytes())
    return path


def none_to_give(*args, **kwargs):
    raise OSError("Cannot allocate memory")


def rows(count: int, size: int) -> Layout:
    return Layout.of(0, [Block("row", count, 1, even_shards(count, size))])


def test_what_lies_together_is_mapped_and_the_rest_is_not(file, monkeypatch):
    monkeypatch.setattr(lazy_tensor, "_MAPPED", 16)
    values = torch.arange(8192.0).view(64, 128)
    stored = Stored(RangeFile(file, True), 8, torch.float32, (64, 128))
    assert torch.equal(map_shard(stored, rows(64, 3), 1), values[22:43])
    assert torch.equal(map_shard(stored, None, 0), values)
    assert torch.equal(stored.mapped(((3, 4), (5, 50))), values[3:4, 5:50])
    assert stored.mapped(((3, 5), (5, 50))) is None  # two runs
    with monkeypatch.context() as without:
        without.setattr(mmap, "mmap", none_to_give)
        assert Stored(RangeFile(file, True), 8, torch.float32, (64, 128)).mapped(((0, 64), (0, 128))) is None
    columns = Layout.of(1, [Block("column", 128, 1, even_shards(128, 2))])
    assert map_shard(stored, columns, 0) is None
    fused = Layout.of(0, [Block("row", 32, 1, even_shards(32, 2))] * 2)
    assert map_shard(stored, fused, 0) is None
    assert stored.mapped(((3, 4), (5, 6))) is None  # too little
    odd = Stored(RangeFile(file, True), 6, torch.float32, (64, 128))
    assert odd.mapped(((0, 64), (0, 128))) is None  # floats that do not begin at a multiple of 4
    read = Stored(RangeFile(file), 8, torch.float32, (64, 128))
    assert map_shard(read, None, 0) is None
    halves = Joined([narrowed(stored, 0, 0, 32), narrowed(stored, 0, 32, 64)], 0)
    assert torch.equal(map_shard(halves, rows(64, 2), 1), values[32:])
    assert map_shard(halves, rows(64, 1), 0) is None  # in two parts
    assert torch.equal(halves.mapped(((40, 50), (0, 128))), values[40:50])


def test_writes_stay_in_memory_and_the_map_lives_as_long_as_its_tensors(file):
    before = file.read_bytes()
    opened = RangeFile(file, True)
    view = opened.view(8, torch.float32, (8192,))
    opened.close()
    del opened
    view.mul_(2)
    assert view[-1] == 2 * 8191 and file.read_bytes() == before
    assert view.untyped_storage().nbytes() == 8192 * 4  # torch.save writes no more than that


def test_a_file_that_ended_meanwhile_or_cannot_be_mapped_is_an_error(file, tmp_path):
    stored = Stored(RangeFile(file, True), 8, torch.float32, (1 << 20,))
    with pytest.raises(CheckpointError, match=r"ends at byte 32776, 4194312 are needed"):
        stored.mapped(((0, 1 << 20),))
    with pytest.raises(CheckpointError, match=r"cannot be mapped.*disable_mmap=True reads it"):
        RangeFile(tmp_path / "gone", True).view(0, torch.float32, (1,))


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="where Linux tells what is mapped")
def test_all_tensors_of_a_file_have_one_map_which_ends_with_them(file):
    opened = RangeFile(file, True)
    views = [opened.view(8 * place, torch.float32, ()) for place in range(1, 100)]
    opened.close()
    assert Path("/proc/self/maps").read_text().count(str(file)) == 1
    assert views[3] == 6
    del views
    gc.collect()
    assert str(file) not in Path("/proc/self/maps").read_text()


def mapped_bytes(model: torch.nn.Module, folder: Path) -> int:
    """Bytes of the parameters that lie in maps of files in ``folder``."""
    areas = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            low, high = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
            areas.append((low, high))
    return sum(p.nbytes for p in model.parameters() if any(low <= p.data_ptr() < high for low, high in areas))


@pooled(world_size=2)
def test_a_model_is_the_same_mapped_trains_and_leaves_its_file_alone(tmp_path):
    lazy_tensor._MAPPED = 256
    try:
        for number, model in enumerate((llama(num_hidden_layers=2), gpt2())):
            folder = shared(tmp_path / f"{number}", model)
            kept = (Path(folder) / "model.safetensors").read_bytes()
            expected = autopar.initialize(type(model).from_pretrained(folder), tp(2))
            loaded = autopar.from_pretrained(type(model), folder, tp(2), disable_mmap=False)
            same(loaded, expected)
            with autopar.lazy_init():
                lazily = type(model).from_pretrained(folder, disable_mmap=False)
            lazily = autopar.initialize(lazily, tp(2))
            same(lazily, expected)
            read = autopar.from_pretrained(type(model), folder, tp(2), disable_mmap=True)
            assert mapped_bytes(read, tmp_path) == 0
            total = sum(p.nbytes for p in loaded.parameters())
            if Path("/proc/self/maps").is_file():
                assert mapped_bytes(loaded, tmp_path) == mapped_bytes(lazily, tmp_path) > 0.3 * total
            for one in (loaded, expected):
                optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
                ids = torch.arange(14).view(2, 7)
                for _ in range(3):
                    one(input_ids=ids, labels=ids).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            same(loaded, expected)
            assert (Path(folder) / "model.safetensors").read_bytes() == kept
            loaded.save_parallelized(str(tmp_path / f"{number}-shards"))
            again = autopar.from_pretrained(type(model), str(tmp_path / f"{number}-shards"), tp(2), disable_mmap=False)
            same(again, expected)
            assert mapped_bytes(again, tmp_path) > 0.3 * total
            half = autopar.from_pretrained(type(model), folder, tp(2), dtype=torch.bfloat16, disable_mmap=False)
            assert mapped_bytes(half, tmp_path) == 0  # of another dtype
    finally:
        lazy_tensor._MAPPED = 1 << 16


@pytest.mark.parametrize("stage", [0, 1, 3])
@pooled(world_size=2)
def test_replicas_that_shard_states_or_weights_take_mapped_ones(tmp_path, stage):
    """Stage 0: by torch's ``fully_shard``."""
    lazy_tensor._MAPPED = 16
    try:
        plain = llama(num_hidden_layers=2)
        folder = shared(tmp_path / "m", plain)
        config = tp(1) | ({"zero": {"stage": stage}} if stage else {})

        def make(model):
            return torch.optim.AdamW(model.parameters(), lr=1e-2)

        if stage:
            given = autopar.initialize(plain, config, optimizer=make(plain))
            made = autopar.from_pretrained(LlamaForCausalLM, folder, config, optimizer=make, disable_mmap=False)
        else:
            models = [
                autopar.initialize(plain, config),
                autopar.from_pretrained(LlamaForCausalLM, folder, config, disable_mmap=False),
            ]
            given, made = ((fully_shard(model, mesh=model.mpu.mesh["dp"]), make(model)) for model in models)
        losses = []
        ids = torch.arange(14).view(2, 7)
        for model, optimizer in (given, made):
            model.train()
            for _ in range(3):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[:3] == losses[3:]
    finally:
        lazy_tensor._MAPPED = 1 << 16
