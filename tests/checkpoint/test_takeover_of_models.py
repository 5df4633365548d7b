"""Weights of a model that lie in maps of files get storage as torch gives it, wherever the file has them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

import autopar
from autopar.storage import takeover
from autopar.storage.private_map import copy_pages, drop_clean_pages, pages_can_be_replaced
from autopar.storage.range_file import Access, RangeFile
from autopar.storage.takeover import Takeover
from tests.checkpoint.loading import same, shared, small_maps, tp
from tests.pool import pooled
from tests.small import llama

pytestmark = pytest.mark.skipif(not pages_can_be_replaced(), reason="Linux since 5.7 replaces the pages of a map")

ROWS, COLUMNS = 2048, 1537  # 12 MiB: three pieces
VALUES = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weight"
    path.write_bytes(bytes(4) + VALUES.numpy().tobytes())
    return path


def loaded(file: Path, threads: int = 1) -> tuple[nn.Linear, Takeover]:
    """A layer whose weight lies in a map, 4 bytes off."""
    opened = RangeFile(file, Access.OWN)
    layer = nn.Linear(COLUMNS, ROWS, bias=False, device="meta")
    layer.weight = nn.Parameter(opened.view(4, torch.float32, (ROWS, COLUMNS)))
    assert layer.weight.data_ptr() % 16 == 4
    return layer, Takeover([opened], threads, layer)


def aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_they_get_storage_that_torch_gave(file, threads):
    layer, taken = loaded(file, threads)
    weight, optimizer = layer.weight, torch.optim.SGD(layer.parameters(), lr=1)
    taken.wait()
    file.write_bytes(b"")
    assert layer.weight is weight and aligned(weight) and torch.equal(weight, VALUES)
    assert str(file) not in Path("/proc/self/maps").read_text()
    layer(torch.ones(1, COLUMNS)).sum().backward()
    optimizer.step()
    assert torch.equal(weight, VALUES - 1)
    weight.untyped_storage().resize_(0)  # as sharded data parallelism does


def test_places_in_a_storage_stay(file):
    layer, taken = loaded(file)
    layer.weight = nn.Parameter(layer.weight.data.t()[3:90, 2:], requires_grad=False)
    taken.wait()
    file.write_bytes(b"")
    assert torch.equal(layer.weight, VALUES.t()[3:90, 2:]) and not layer.weight.requires_grad
    assert layer.weight.stride() == (1, COLUMNS) and aligned(layer.weight.as_strided((1,), (1,), 0))


def test_what_is_written_meanwhile_stays(file, monkeypatch):
    """Also if it is interrupted after some pieces, and done again."""
    layer, taken = loaded(file)
    with torch.no_grad():
        layer.weight[5] = 1
        layer.weight[-1] = 2
    expected = layer.weight.detach().clone()
    copied = []

    def interrupted(source: int, target: int, length: int) -> int:
        copied.append(length)
        if len(copied) == 3:
            signal.raise_signal(signal.SIGINT)
        return copy_pages(source, target, length)

    monkeypatch.setattr(takeover, "copy_pages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        taken.wait()
    monkeypatch.undo()
    assert torch.equal(layer.weight, expected) and not aligned(layer.weight)
    taken.wait()
    file.write_bytes(b"")
    assert torch.equal(layer.weight, expected) and aligned(layer.weight)
    assert max(copied) <= takeover._PIECE


def test_hardly_anything_is_held_twice(file, monkeypatch):
    """Pages of the map go as soon as they were copied."""
    layer, taken = loaded(file)
    layer.weight.sum()  # all of them are here
    resident = []

    def watched(source: int, target: int, length: int) -> int:
        resident.append(_resident(file))
        return copy_pages(source, target, length)

    monkeypatch.setattr(takeover, "copy_pages", watched)
    taken.wait()
    everything = layer.weight.numel() * 4 // 1024
    assert resident[0] >= everything and len(resident) >= 3
    assert resident == sorted(resident, reverse=True)
    assert resident[-1] <= takeover._PIECE // 1024


def _resident(file: Path) -> int:
    """KiB of the maps of a file."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def test_pages_are_kept_where_one_was_written(file):
    layer, _taken = loaded(file)
    with torch.no_grad():
        layer.weight[0, 1] = 7
    layer.weight.sum()
    start, everything = layer.weight.data_ptr() - 4, _resident(file)
    length = 2 << 20
    drop_clean_pages(start, length)
    assert layer.weight[0, 1] == 7 and _resident(file) == everything
    drop_clean_pages(start + length, length)
    assert _resident(file) <= everything - 2048
    assert torch.equal(layer.weight[1:], VALUES[1:])  # and come again


@pytest.mark.parametrize("other", ["detached", "array", "graph", "parameter"])
def test_a_storage_that_others_look_at_stays_at_its_address(file, other):
    layer, taken = loaded(file)
    place = layer.weight.data_ptr()
    looks = {
        "detached": layer.weight.detach,
        "array": lambda: torch.from_numpy(layer.weight.detach().numpy()),
        "graph": layer.weight.t,
        "parameter": lambda: nn.Parameter(layer.weight.data),
    }[other]()
    taken.wait()
    file.write_bytes(b"")
    assert layer.weight.data_ptr() == place and torch.equal(layer.weight, VALUES)
    with torch.no_grad():
        layer.weight[0, 0] = -5
    assert looks[0, 0] == -5


def test_a_weight_that_was_moved_into_another_layer_is_found(file):
    layer, taken = loaded(file)
    weight, layer.weight = layer.weight, None
    layer.register_module("inner", nn.Linear(1, 1))
    layer.inner.weight = weight
    taken.wait()
    assert aligned(weight) and torch.equal(weight, VALUES)


def test_a_weight_whose_model_is_gone_is_the_processs_own_too(file):
    layer, taken = loaded(file)
    weight = layer.weight
    del layer
    taken.wait()
    file.write_bytes(b"")
    assert torch.equal(weight, VALUES)


def test_what_a_signals_handler_writes_meanwhile_stays(file, monkeypatch):
    layer, taken = loaded(file)

    def handler(*_: object) -> None:
        monkeypatch.setattr(takeover, "copy_pages", copy_pages)
        taken.wait()
        with torch.no_grad():
            layer.weight.fill_(3)

    def interrupted(source: int, target: int, length: int) -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        return copy_pages(source, target, length)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(takeover, "copy_pages", interrupted)
        taken.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert torch.equal(layer.weight, torch.full_like(VALUES, 3))


def test_a_file_that_is_cut_off_meanwhile_is_an_error(file):
    _layer, taken = loaded(file)
    os.truncate(file, 100)
    with pytest.raises(autopar.errors.CheckpointError, match=r"while it was being loaded \(it had .* bytes, now 100\)"):
        taken.wait()


def test_weights_can_be_trained_whoever_used_them_first(file):
    for first in ("inference", "meta"):
        layer, taken = loaded(file)
        with torch.inference_mode() if first == "inference" else torch.device("meta"):
            taken.wait()
        assert aligned(layer.weight) and not layer.weight.is_inference()
        layer(torch.ones(2, COLUMNS)).sum().backward()
        assert torch.equal(layer.weight.grad, torch.full_like(VALUES, 2))


def shifted(folder: Path, offset: int) -> None:
    """Let the weights of a folder begin ``offset`` bytes after a multiple of 16, as they do in half of all files."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    spaces = (offset - 8 - length) % 16
    header = content[8 : 8 + length] + b" " * spaces
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


@pooled(world_size=2)
@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_rounds_as_one_that_was_read(tmp_path, offset, dtype):
    """Also in products with one row of float32, which do otherwise elsewhere."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    sizes = {"hidden_size": 256, "intermediate_size": 688, "vocab_size": 512, "num_hidden_layers": 1, **heads}
    plain = llama(**sizes).to(getattr(torch, dtype))
    folder = Path(shared(tmp_path / "m", plain))
    if dist.get_rank() == 0:
        shifted(folder, offset)
    dist.barrier()
    models = [
        autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(2), dtype=dtype, disable_mmap=disable)
        for disable in (None, True)
    ]
    head = models[0].lm_head.weight
    assert models[0]._autopar.takeover.copies and head.data_ptr() % 16 == offset % 16
    ids = torch.tensor([[17]])
    found, expected = (model(ids, labels=ids) for model in models)
    assert aligned(models[0].lm_head.weight) and models[0].lm_head.weight is head
    assert torch.equal(found.logits, expected.logits)
    for output in (found, expected):
        output.loss.backward()
    same(*models)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pooled(world_size=2)
def test_a_state_dict_before_the_first_forward_leaves_them_aligned(tmp_path):
    """It waits before it collects what it holds."""
    folder = Path(shared(tmp_path / "m", llama(num_hidden_layers=1)))
    if dist.get_rank() == 0:
        shifted(folder, 8)
    dist.barrier()
    with small_maps():
        for take in (lambda model: model, lambda model: model.model):
            model = autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(2))
            state = take(model).state_dict()
            assert model._autopar.takeover._ended
            assert all(aligned(parameter) for parameter in model.parameters())
            name = "embed_tokens.weight"
            held = next(tensor for key, tensor in state.items() if key.endswith(name))
            assert held.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pooled(world_size=2)
def test_the_first_use_may_be_an_export(tmp_path):
    folder = Path(shared(tmp_path / "m", llama(num_hidden_layers=1)))
    ids = torch.arange(14).view(2, 7)
    with small_maps():
        for strict in (True, False):
            model = autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(1))
            exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=strict)
            assert model._autopar.takeover._ended and "begin_forward" not in str(exported.graph)
            assert all(type(each) is nn.Parameter for each in model.parameters())
            found = exported.module()(input_ids=ids, use_cache=False).logits
            assert torch.allclose(found, model(input_ids=ids, use_cache=False).logits, atol=1e-5)
