"""Conversions of tensors in a file: views stay byte ranges, other operations are computed; values are torch's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import CheckpointError
from autopar.storage.files import RangeFile
from autopar.storage.hugging_face import Computed, Sketch
from autopar.storage.lazy_tensor import Stored

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda x: x[1:3, :, 2:],
    "select": lambda x: x[:, 1],
    "last": lambda x: x[..., -1],
    "negative": lambda x: x[-3:-1],
    "past the end": lambda x: x[2:99],
    "empty": lambda x: x[2:2],
    "narrow": lambda x: x.narrow(2, 1, 3),
    "chunk": lambda x: x.chunk(3, dim=2),
    "split": lambda x: x.split([1, 4, 1], dim=2),
    "unbind": lambda x: x.unbind(1),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, -1)[2],
    "t": lambda x: x[0].t(),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "squeeze": lambda x: x[:, :1].squeeze(),
    "folded": lambda x: x.view(12, 6),
    "split rows": lambda x: x.view(2, 2, 3, 6)[1, 0, 1:],
    "flat": lambda x: x.reshape(-1)[5:17],
    "half": lambda x: x.to(torch.bfloat16)[1],
    "half, folded": lambda x: x.to(torch.bfloat16).view(12, 6)[3:5],
    "cat": lambda x: torch.cat([x[:1], x[3:]], 0),
    "stack": lambda x: torch.stack([x[0], x[2]], 1),
    "folded after a transposition": lambda x: x.transpose(0, 1).reshape(-1, 6)[1:4],
    "heads that were interleaved": lambda x: x.view(2, 2, 3, 6).transpose(1, 2).reshape(1, 12, 2, 3)[:, 2:9, 1:, :2],
    "expert by expert": lambda x: torch.stack([x[0].t(), x[1].t()]).transpose(1, 2),
}
OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x + x,
    "step": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:, :1].expand(4, 3, 6),
    "another dtype's bits": lambda x: x.view(torch.int32),
    "roll": lambda x: x.roll(1, 0),
}


def lazily(folder: Path) -> tuple[torch.Tensor, Sketch]:
    full = torch.arange(72, dtype=torch.float32).reshape(4, 3, 6)
    (folder / "file").write_bytes(b"head" + full.numpy().tobytes())
    return full, Sketch(Stored(RangeFile(folder / "file"), 4, full.dtype, full.shape))


def computed(lazy: Any) -> bool:
    """Whether any part of it is computed."""
    return isinstance(lazy, Computed) or any(map(computed, lazy.bases))


@pytest.mark.parametrize("name", [*VIEWS, *OTHERS])
def test_values_and_what_is_read(tmp_path, name):
    full, sketch = lazily(tmp_path)
    operation = (VIEWS | OTHERS)[name]
    due, got = operation(full), operation(sketch)
    assert isinstance(got, tuple | list) == isinstance(due, tuple | list)
    for one, other in zip(
        *(value if isinstance(value, tuple | list) else [value] for value in (due, got)), strict=True
    ):
        assert torch.equal(other.lazy.read(), one) and other.dtype == one.dtype and other.shape == one.shape
        assert computed(other.lazy) == (name in OTHERS)


@pytest.mark.parametrize("box", [((0, 8), (0, 12)), ((2, 5), (0, 12)), ((3, 8), (5, 7)), ((4, 4), (0, 12))])
def test_of_a_weight_with_scales_of_blocks_only_the_blocks_of_a_shard_are_read(tmp_path, monkeypatch, box):
    """As transformers makes plain weights of FP8: 8 x 12 of them, blocks of 2 x 3."""
    packed = (torch.arange(96) % 13 - 6.0).view(8, 12).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 17.0).view(4, 4)
    (tmp_path / "file").write_bytes(bytes(packed.view(torch.uint8).flatten().tolist()) + scales.numpy().tobytes())
    file, read = RangeFile(tmp_path / "file"), []
    original = RangeFile.read_runs

    def read_runs(self: RangeFile, target: memoryview, places: Any, length: int) -> None:
        places = list(places)
        read.extend(there + at for _, there in places for at in range(length) if there < 96)
        original(self, target, places, length)

    monkeypatch.setattr(RangeFile, "read_runs", read_runs)

    def plain(weight: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        blocks = weight.to(torch.float32).reshape(-1, 4, 2, 4, 3)
        made = blocks * by.to(torch.float32).reshape(-1, 4, 4).unsqueeze(-1).unsqueeze(2)
        return made.to(torch.bfloat16).reshape(8, 12)

    sketches = [Sketch(Stored(file, at, t.dtype, t.shape)) for at, t in ((0, packed), (96, scales))]
    lazy = plain(*sketches).lazy  # type: ignore[attr-defined]
    (top, bottom), (left, right) = box
    assert torch.equal(lazy.read(box), plain(packed, scales)[top:bottom, left:right])
    rows, columns = (range(low // n * n, -(-high // n) * n) for (low, high), n in zip(box, (2, 3), strict=True))
    assert sorted(read) == ([12 * row + column for row in rows for column in columns] if top < bottom else [])


def test_what_cannot_be_followed(tmp_path):
    _, sketch = lazily(tmp_path)
    with pytest.raises(CheckpointError, match="writes into a tensor of the checkpoint"):
        sketch.mul_(2)
    assert sketch[1, 1, 1].item() == 25.0
    with pytest.raises(IndexError):
        sketch[:, 7]
