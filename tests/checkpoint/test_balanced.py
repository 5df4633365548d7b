"""Every rank writes equally many bytes, and none gathers what it does not hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.checkpoint import Manifest, save
from autopar.checkpoint.save import shares
from autopar.checkpoint.shards import ShardReader, check_checkpoint
from autopar.storage.safetensors_io import dtype_of, nbytes
from tests.checkpoint.hybrid import Mesh, Run, assert_same
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.small import llama

OF_FOUR = [*(Mesh(1, 1, zero) for zero in range(4)), *(Mesh(2, 1, zero) for zero in (2, 3)), Mesh(4, 1)]
OF_FOUR += [Mesh(1, 2), Mesh(1, 2, 1), Mesh(2, 2)]


@contextmanager
def shared_out() -> Iterator[None]:
    """Share out tensors of models of any size."""
    before, save.LEAST = save.LEAST, 1
    try:
        yield
    finally:
        save.LEAST = before


def loads(folder: Path, world: int) -> list[int]:
    found: dict[tuple[int, int, int], int] = {}
    for part in Manifest.read(folder).parts.values():
        for record in part.files.values():
            held = [part.tensors[name] for name in record.checksums]
            size = sum(nbytes(dtype_of(tensor.dtype), record.shape(tensor)) for tensor in held)
            place = (record.tp, record.pp, record.dp)
            found[place] = found.get(place, 0) + size
    return [*found.values(), *[0] * (world - len(found))]


def assert_balanced(folder: Path, where: Any) -> None:
    each = loads(folder, dist.get_world_size())
    assert max(each) <= 1.15 * sum(each) / len(each), f"{where}: {each}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pooled(world_size=4)
def test_every_rank_writes_its_share_and_any_mesh_reads_it(tmp_path, precision):
    saved = {}
    with shared_out():
        for number, mesh in enumerate(OF_FOUR):
            run = Run("llama", mesh, precision)
            run.steps(0, 2)
            run.save(tmp_path / str(number), async_save=number % 2 == 1)
            saved[number] = run.whole()
            run.model.wait_for_save()
            assert_balanced(tmp_path / str(number), mesh)
    for number in range(dist.get_rank(), len(OF_FOUR), dist.get_world_size()):
        assert check_checkpoint(tmp_path / str(number))["problems"] == []
    for number, target in enumerate(OF_FOUR):
        run = Run("llama", target, precision, other=True)
        for source in {number, (number + 3) % len(OF_FOUR)}:
            run.load(tmp_path / str(source))
            due = {n: t for n, t in saved[source].items() if precision == "fp32" or not n.endswith("::stepped")}
            assert_same({n: t for n, t in run.whole().items() if n in due}, due, f"{OF_FOUR[source]} to {target}")


@pooled(world_size=4)
def test_small_models_have_few_files_and_an_error_of_a_rank_is_everyones(tmp_path):
    run = Run("gpt2", Mesh(1, 1, 1))
    run.steps(0, 1)
    run.save(tmp_path / "ckpt")
    files = Manifest.read(tmp_path / "ckpt").parts["model"].files
    assert list(files) == ["model-tp0-pp0.safetensors"]
    if dist.get_rank() == 2:
        run.model.transformer.h[0].ln_1.weight.data.add_(1.0)
    with shared_out(), raises_everywhere(save.CheckpointError, "ln_1.weight must be identical on rank 0 and rank 2"):
        run.save(tmp_path / "ckpt")


@pooled(world_size=4)
def test_tied_weights_own_buffers_and_empty_tensors(tmp_path):
    plain = llama(tie_word_embeddings=True, intermediate_size=200)  # larger than the embedding: owners differ by stage
    plain.model.norm.register_buffer("count", torch.zeros(3))
    optimizer = torch.optim.AdamW(plain.parameters())
    model, optimizer = autopar.initialize(plain, {"pp": 2, "zero": {"stage": 1}}, optimizer=optimizer)
    ids = torch.arange(24).view(4, 6)
    model.execute_pipeline({"input_ids": ids, "labels": ids}, optimizer=optimizer)
    optimizer.step()
    for name, buffer in model.named_buffers():
        if name.endswith("count"):
            buffer.fill_(model.mpu.dp.rank + 1.0)
    with shared_out():
        model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer, extra={"seen": torch.empty(0)})
    assert check_checkpoint(tmp_path / "ckpt")["problems"] == []
    with ShardReader(tmp_path / "ckpt") as shards:
        assert shards.lazy("model.norm.count").read().tolist() == [1.0] * 3  # of the first replica
    extra: dict[str, Any] = {}
    model.from_parallelized(tmp_path / "ckpt", optimizer=optimizer, extra=extra)
    assert extra["seen"].shape == (0,)


def described(**sizes: int) -> dict[str, list[Any]]:
    return {key: [size, key] for key, size in sizes.items()}


def test_the_holders_of_a_set_share_it_evenly(monkeypatch):
    monkeypatch.setattr(save, "LEAST", 1)
    spans = shares([described(a=70, all=131), described(b=10, all=131), described(all=131), {}])
    assert spans == [{"a": (0, 70), "all": (0, 44)}, {"b": (0, 10), "all": (44, 88)}, {"all": (88, 131)}, {}]
    monkeypatch.undo()  # of a small model few ranks write
    assert shares([described(all=1 << 20)] * 4) == [{"all": (0, 1 << 20)}, {}, {}, {}]
    monkeypatch.setattr(save, "LEAST", 100)
    assert [len(mine) for mine in shares([described(all=200)] * 4)] == [1, 1, 0, 0]
    assert [len(mine) for mine in shares([described(all=400)] * 4)] == [1, 1, 1, 1]
    other = {"all": [399, "less"]}  # a rank with another set writes none of it
    assert shares([described(all=400), other])[1] == {}
