"""The code of docs/peft.md, on two ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.docs.pages import DOCS, codes
from tests.pool import pooled
from tests.small import llama


@pooled(world_size=2)
def test_its_code_runs(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from tests.adapters.adapted import batch

    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path / "model")
    dist.barrier()
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        names = {"folder": tmp_path / "model", "batches": [batch(0), batch(1)]}
        blocks = codes((DOCS / "peft.md").read_text(), "python")
        assert len(blocks) == 3
        exec(blocks[0].text, names)
        trained = names["model"]
        assert {path.name for path in Path("adapters").iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        exec(blocks[1].text, names)
        assert list(names["model"].peft_config) == ["default", "second"]
        exec(blocks[2].text, names)
        assert type(names["model"]) is type(trained) is peft.PeftModelForCausalLM
        assert names["model"].mpu.tp.size == 2
    finally:
        os.chdir(here)
