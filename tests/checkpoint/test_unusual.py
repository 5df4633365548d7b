"""What users do that nobody thought of: each was once wrong without a word."""

from __future__ import annotations

import json
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from tests.checkpoint.tiny import local, same, tiny
from tests.pool import pooled
from tests.small import gpt2, parallel
from tests.worlds import raises_everywhere


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pooled(world_size=1)
def test_an_optimizer_around_another_one_is_refused(tmp_path):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups[0]["params"], {})

    model = tiny(MPU())
    inner = torch.optim.AdamW(model.parameters())
    one_step(model, inner)
    for call in (model.save_parallelized, model.from_parallelized):
        model.save_parallelized(tmp_path / "ckpt", optimizer=inner)
        with pytest.raises(CheckpointError, match=r"Wrapper wraps a AdamW \(its attribute 'inner'\)"):
            call(tmp_path / "ckpt", optimizer=Wrapper(inner))


@pooled(world_size=1)
def test_views_that_are_read_another_way_keep_their_values(tmp_path):
    model = tiny(MPU())
    value = torch.tensor([1 + 2j]).conj()
    model.save_parallelized(tmp_path / "ckpt", extra={"conj": value, "neg": value.imag})
    found: dict[str, torch.Tensor] = {}
    model.from_parallelized(tmp_path / "ckpt", extra=found)
    assert found["conj"].tolist() == [1 - 2j] and found["neg"].tolist() == [-2]


@pooled(world_size=1)
def test_another_scheduler_changes_nothing(tmp_path):
    model = tiny(MPU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.save_parallelized(tmp_path / "ckpt", lr_scheduler=LambdaLR(optimizer, lambda step: 1.0))
    with torch.no_grad():
        model.embed.weight.add_(1)
    before = local(model)
    other = CosineAnnealingLR(optimizer, 5)
    for scheduler in (other, SequentialLR(optimizer, [other, other], [3])):
        with pytest.raises(CheckpointError, match="holds the state of a LambdaLR, lr_scheduler= is a"):
            model.from_parallelized(tmp_path / "ckpt", lr_scheduler=scheduler)
        assert same(local(model), before)


@pooled(world_size=2)
def test_replicas_whose_optimizers_differ_are_refused_when_saving(tmp_path):
    """What could not be loaded is not saved: the only optimizer that has stepped is not the one that writes."""
    mpu = MPU()
    model = tiny(mpu)
    optimizer = torch.optim.AdamW(model.parameters())
    if mpu.rank == 1:
        one_step(model, optimizer)
    with raises_everywhere(CheckpointError):
        model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    assert not (tmp_path / "ckpt").exists()


@pooled(world_size=1)
def test_state_follows_a_parameter_into_another_dtype(tmp_path):
    model = parallel(gpt2().bfloat16(), 1)
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    wide = parallel(gpt2(), 1)
    again = torch.optim.AdamW(wide.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide.from_parallelized(tmp_path / "ckpt", optimizer=again)
    assert {t.dtype for state in again.state.values() for t in state.values()} == {torch.float32}
    one_step(wide, again)


@pooled(world_size=1)
def test_a_file_beside_an_asynchronous_save(tmp_path):
    """The tokenizer is saved into the folder before the background has got that far."""
    model = tiny(MPU())
    go = threading.Event()
    state = model._autopar_checkpoint
    start = state.background.start

    def later(mpu, copy, work):
        def waiting(peers, mine):
            go.wait(30)
            work(peers, mine)

        start(mpu, copy, waiting)

    state.background.start = later
    model.save_parallelized(tmp_path / "ckpt", async_save=True)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "tokenizer.json").write_text("{}")
    go.set()
    model.wait_for_save()
    assert {"autopar.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "ckpt").iterdir()}


@pooled(world_size=1)
def test_a_generation_config_that_transformers_refuses_does_not_stop_a_save(tmp_path):
    model = parallel(gpt2(), 1)
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.3
    with pytest.warns(UserWarning, match="generation_config.json is not saved"):
        model.save_parallelized(tmp_path / "ckpt")
    assert not (tmp_path / "ckpt" / "generation_config.json").exists()
    assert json.loads((tmp_path / "ckpt" / "config.json").read_text())["model_type"] == "gpt2"


@pooled(world_size=1)
def test_inside_inference_mode(tmp_path):
    model = tiny(MPU())
    model.save_parallelized(tmp_path / "ckpt")
    with torch.inference_mode(), pytest.raises(CheckpointError, match=r"inside torch.inference_mode"):
        model.from_parallelized(tmp_path / "ckpt")
