"""Weights for a serving engine that runs in another process."""

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import CheckpointError
from autopar.integrations.weight_transfer import HttpEngine, WeightTransfer
from tests.harness.worlds import pooled
from tests.small import gpt2, llama


class Running:
    """A fake engine beside rank 0; its address on every rank."""

    def __init__(self, folder: Path, fails_at: int = -1) -> None:
        address: list[Any] = [None]
        self.folder = folder
        if dist.get_rank() == 0:
            command = [sys.executable, str(Path(__file__).with_name("fake_engine.py")), str(folder), str(fails_at)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self.process.stdout is not None
            address = [f"http://127.0.0.1:{int(self.process.stdout.readline())}/weights"]
        dist.broadcast_object_list(address)
        self.address = address[0]

    def held(self) -> dict[str, torch.Tensor]:
        kept = pickle.loads((self.folder / "held.pickle").read_bytes())
        return {
            name: torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)
            for name, (dtype, shape, data) in kept.items()
        }

    def log(self) -> list[Any]:
        return [tuple(one) for one in json.loads((self.folder / "log.json").read_text())]

    def close(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            self.process.kill()
            self.process.wait()
        dist.barrier()


def equal(held: dict[str, torch.Tensor], plain: Any) -> None:
    assert held.keys() <= plain.keys() and held
    assert all(torch.equal(held[name], tensor) for name, tensor in plain.items() if name in held)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_weights_arrive_in_buckets(tmp_path: Path) -> None:
    for number, (make, sizes) in enumerate([(llama, {"tp": 2}), (gpt2, {"pp": 2})]):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        running, model = Running(folder), autopar.initialize(make().bfloat16(), sizes)
        transfer = WeightTransfer(HttpEngine(running.address), bucket_size=8000)
        plain = dict(autopar.hf_weights(model))
        assert transfer.send(model) == len(plain)
        if dist.get_rank() == 0:
            assert running.held().keys() == plain.keys()
            equal(running.held(), plain)
            (first, *_), *updates, last = running.log()
            assert (first, last[0]) == ("start", "finish") and {name for name, *_ in updates} == {"update"}
            assert len(updates) > 3 and all(size < 8000 + 1500 or count == 1 for _, count, size in updates)
        assert transfer.send(model, only_changed=True) == 0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in ("model.norm.weight", "transformer.ln_f.weight"):
                    parameter.mul_(2)
        assert transfer.send(model, only_changed=True) == 1
        plain = dict(autopar.hf_weights(model))
        if dist.get_rank() == 0:
            equal(running.held(), plain)
        running.close()


@pooled(world_size=2)
def test_adapters_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    whole = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    running, model = Running(tmp_path), autopar.initialize(whole, {"tp": 2})
    sent = WeightTransfer(HttpEngine(running.address)).send(model, adapters_only=True)
    plain = {name: tensor for name, tensor in whole.named_parameters() if "lora_" in name}
    plain = {name: autopar.full_tensor(tensor) for name, tensor in model.named_parameters() if name in plain}
    assert sent == len(plain) == 8
    if dist.get_rank() == 0:
        assert len(running.held()) == 8 and all("lora_" in name for name in running.held())
        equal(running.held(), plain)
    running.close()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_an_engine_that_fails_raises_on_all_ranks(tmp_path: Path) -> None:
    running, model = Running(tmp_path, fails_at=2), autopar.initialize(llama(), {"tp": 2})
    transfer = WeightTransfer(HttpEngine(running.address, timeout=5), bucket_size=8000)
    with pytest.raises(CheckpointError, match=rf"(?s)engine at {running.address} rejected 'update': it answered 507"):
        transfer.send(model)
    if dist.get_rank() == 0:
        assert running.log()[-1][0] == "abandon"
    assert transfer.send(model, only_changed=True) == len(dict(autopar.hf_weights(model))), "nothing is known of it now"
    running.close()
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"engine at {running.address} rejected 'start': ConnectionRefused"):
        transfer.send(model)
    assert time.monotonic() - begun < 10
