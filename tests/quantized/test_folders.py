"""Folders that are quantized already: each rank reads its part of the packed bytes, as if the whole had been cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import autopar
from tests.pool import pooled
from tests.quantized.models import FAMILIES, FORMS, quantized
from tests.quantized.test_loading import MESHES, same


def saved(folder: Path, form: str, family: str = "llama") -> Path:
    if dist.get_rank() == 0:
        quantized(form, family).save_pretrained(folder)
    dist.barrier()
    return folder


@pooled(world_size=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_are_those_of_the_whole(form: str, family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, form, family)
    kind = FAMILIES[family][0]
    for config in MESHES:
        due = autopar.initialize(kind.from_pretrained(folder), config)
        model: Any = autopar.from_pretrained(AutoModelForCausalLM, folder, config)
        same(model, due)
