"""Memory for weights: asked for in huge pages where the system has them, and any tensor all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.storage.huge_pages import empty

CPU = torch.device("cpu")


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


def test_a_large_weight_asks_for_huge_pages_and_a_small_one_does_not():
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir() or not Path("/proc/self/smaps").is_file():
        pytest.skip("this system has no transparent huge pages")
    large = empty((1 << 15, 1 << 10), torch.float32, CPU)  # 128 MiB: a mapping of its own
    assert "hg" in flags_of(large.data_ptr() + (1 << 26))
    ordinary = torch.empty(1 << 25)
    assert "hg" not in flags_of(ordinary.data_ptr() + (1 << 26))


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1031, 1033), (2, 1 << 20)])
def test_it_is_a_tensor_like_any_other(shape):
    made = empty(shape, torch.bfloat16, CPU)
    assert made.shape == shape and made.dtype == torch.bfloat16 and made.is_contiguous()
    assert made.fill_(3).eq(3).all()
    made.untyped_storage().resize_(0)  # as sharded data parallelism frees it


def test_on_the_meta_device_nothing_is_asked_for():
    assert empty((1 << 12, 1 << 12), torch.float32, torch.device("meta")).is_meta
