import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from autopar.errors import CheckpointError
from autopar.storage import safetensors_io as safetensors_stream
from autopar.storage.files import OutputFile
from autopar.storage.lazy_tensor import InMemory
from autopar.storage.safetensors_io import _CODES, SafetensorsReader, SafetensorsWriter
from tests.checkpoint.tiny import flip


def every_kind() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number, (code, dtype) in enumerate(_CODES.items()):
        tensors[f"é.{30 - number}.{code}"] = torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["one byte"] = torch.tensor(True)
    tensors["transposed"] = torch.randn(4, 6, generator=generator).t()
    return tensors


def write(path, tensors, metadata=None):
    specs = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    with SafetensorsWriter(path, specs, metadata or {"format": "pt"}) as writer:
        for name in writer.order:
            writer.write(name, tensors[name])
    return writer


def test_files_are_byte_for_byte_those_of_the_library(tmp_path):
    tensors = every_kind()
    write(tmp_path / "ours", tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_reading_returns_what_was_written(tmp_path):
    tensors = every_kind()
    checksums = write(tmp_path / "file", tensors, {"format": "pt", "autopar_tp": "3"}).checksums
    with SafetensorsReader(tmp_path / "file") as reader:
        assert reader.metadata == {"format": "pt", "autopar_tp": "3"}
        assert set(reader.entries) == set(tensors)
        for name, tensor in tensors.items():
            reader.verify(name, checksums[name])
            read = reader.lazy(name).read()
            assert read.dtype == tensor.dtype and read.shape == tensor.shape
            assert torch.equal(read.contiguous().view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
            reader.verify(name, checksums[name])


def test_one_flipped_bit_is_noticed(tmp_path):
    writer = write(tmp_path / "file", {"weight": torch.randn(100), "other": torch.randn(3)})
    flip(tmp_path / "file")  # the last byte, which is of "weight"
    with SafetensorsReader(tmp_path / "file") as reader:
        reader.verify("other", writer.checksums["other"])
        with pytest.raises(CheckpointError, match=r"damaged.*weight"):
            reader.verify("weight", writer.checksums["weight"])


@pytest.mark.parametrize("chunk", [4, 64, 1 << 20])
def test_copies_and_conversions_are_what_writing_gives(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(safetensors_stream, "_CHUNK", chunk)
    tensors = every_kind()
    converted = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    write(tmp_path / "same", tensors)
    write(tmp_path / "converted", converted)
    with SafetensorsReader(tmp_path / "same") as reader:
        for kind, like in (("same", tensors), ("converted", converted)):
            specs = {name: (t.dtype, tuple(t.shape)) for name, t in like.items()}
            with SafetensorsWriter(tmp_path / "copy", specs, {"format": "pt"}) as writer:
                for name in writer.order:
                    writer.copy(name, reader.lazy(name))
            assert (tmp_path / "copy").read_bytes() == (tmp_path / kind).read_bytes()


def test_the_writer_insists_on_order_shape_and_completeness(tmp_path):
    specs = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    for words, call in (
        ("b must be written", lambda writer: writer.write("b", torch.zeros(2))),
        ("a must be written", lambda writer: writer.write("a", torch.zeros(3))),
        ("b must be written", lambda writer: writer.copy("b", InMemory(torch.zeros(2)))),
        ("lacks 1 tensors", lambda writer: writer.write("a", torch.zeros(2))),
    ):
        with pytest.raises(ValueError, match=words), SafetensorsWriter(tmp_path / "f", specs, {}) as writer:
            call(writer)
    with pytest.raises(CheckpointError, match="complex128"):
        SafetensorsWriter(tmp_path / "f", {"a": (torch.complex128, (2,))}, {})


def header(entry: object) -> bytes:
    text = json.dumps(entry).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 64,
        (100).to_bytes(8, "little") + b"{}",
        header([1, 2]),
        header({"a": 1}),
        header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}) + bytes(8),
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}) + bytes(8),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}) + bytes(8),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + bytes(7),
    ],
)
def test_malformed_files_are_named(tmp_path, content):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors is not a complete safetensors file"):
        SafetensorsReader(tmp_path / "bad.safetensors")


def test_a_system_that_takes_part_of_what_it_is_given(tmp_path):
    class Reluctant(OutputFile):
        def write(self, data):
            return super().write(data[:7])

    file = Reluctant(tmp_path / "file")
    file.append(content := random.Random(0).randbytes(1000))
    file.close()
    assert (tmp_path / "file").read_bytes() == content


def test_errors_are_the_systems():
    file = OutputFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        file.append(b"1")
    file.close()
