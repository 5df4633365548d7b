"""A run that is saved, ended and resumed is the run that was never interrupted."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel, get_linear_schedule_with_warmup

import autopar
from autopar.errors import CheckpointError, ConfigError
from tests.checkpoint.test_plain_data import same
from tests.exchange import everyones, raises_everywhere
from tests.harness.worlds import pooled
from tests.small import gpt2, parallel

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}


class Run:
    """A model in training: AdamW with two groups, linear warm-up, data parallelism, one global batch a step."""

    def __init__(self, tp: int, build: Callable[[], Any], seed: int, make: Any = None, vocab: int = 131) -> None:
        torch.manual_seed(seed)
        self.model = parallel(build(), tp)
        self.vocab = vocab
        mpu = self.model.mpu
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.1}]
        self.optimizer = (make or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(groups)
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, 5, 20)
        self.engine = self.model
        if mpu.dp.size > 1:
            self.engine = DistributedDataParallel(self.model, process_group=mpu.get_data_parallel_group())

    def step(self, number: int) -> float:
        """One optimizer step on the part of global batch ``number`` that this replica has; the mean loss."""
        dp = self.model.mpu.dp
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(self.vocab, (4, 8), generator=generator).chunk(dp.size)[dp.rank]
        loss = self.engine(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        losses = everyones(loss.item())
        return sum(losses) / len(losses)

    def save(self, folder: Path, **more: Any) -> None:
        self.model.save_parallelized(folder, optimizer=self.optimizer, lr_scheduler=self.scheduler, **more)

    def load(self, folder: Path, **more: Any) -> None:
        self.model.from_parallelized(folder, optimizer=self.optimizer, lr_scheduler=self.scheduler, **more)

    def state(self) -> list[torch.Tensor]:
        moments = [self.optimizer.state[p] for group in self.optimizer.param_groups for p in group["params"]]
        values = [value for state in moments for value in state.values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *values)]


def bit_exact(folder: Path, tp: int, build: Callable[[], Any]) -> None:
    run = Run(tp, build, seed=1)
    for number in range(10):
        run.step(number)
    run.save(folder)
    kept = run.state()
    expected = [run.step(number) for number in range(10, 20)]
    assert not all(torch.equal(*pair) for pair in zip(kept, run.state(), strict=True))
    resumed = Run(tp, lambda: build(seed=3), seed=99)  # other weights, other random numbers
    resumed.step(0)
    resumed.load(folder)
    assert all(torch.equal(*pair) for pair in zip(kept, resumed.state(), strict=True))
    assert [resumed.step(number) for number in range(10, 20)] == expected
    assert all(torch.equal(*pair) for pair in zip(run.state(), resumed.state(), strict=True))
    assert resumed.scheduler.state_dict() == run.scheduler.state_dict()
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in r.optimizer.param_groups] for r in (run, resumed)]
    assert groups[0] == groups[1]
    assert len(set(expected)) == 10


@pooled(world_size=4)
def test_resumed_on_the_same_mesh_it_is_bit_for_bit_the_same_run_with_dropout(tmp_path):
    bit_exact(tmp_path / "2x2", 2, lambda **more: gpt2(**{**DROPOUT, **more}))


def extra_of_the_user() -> dict[str, Any]:
    return {
        "epoch": 3,
        "best": (0.5, "val", None),
        "ema": {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
        "nested": [[torch.tensor(7)], {"deep": ({"x": torch.zeros(0, 2)},)}],
        "odd": OrderedDict([(1, {"set", "of"}), ("two", float("inf"))]),
        "array": np.arange(4, dtype=np.int16),
        "strided": torch.arange(6.0).view(2, 3).t(),
    }


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_the_users_own_data(tmp_path):
    run = Run(2, gpt2, seed=1)
    run.model.save_parallelized(tmp_path / "ckpt", extra=extra_of_the_user())
    found: dict[str, Any] = {"kept": 1, "epoch": 0}
    run.model.from_parallelized(tmp_path / "ckpt", extra=found)
    assert found.pop("kept") == 1
    assert same(found, {"epoch": 3, **extra_of_the_user()})
    run.save(tmp_path / "empty", extra={})
    found = {}
    run.load(tmp_path / "empty", extra=found)
    assert found == {}
    with raises_everywhere(CheckpointError, "extra.model", "which a checkpoint does not support"):
        run.model.save_parallelized(tmp_path / "bad", extra={"model": run.model})
    with raises_everywhere(CheckpointError, "must be a dict"):
        run.model.save_parallelized(tmp_path / "bad", extra=[1])
    assert not (tmp_path / "bad").exists()


@pooled(world_size=2)
def test_what_was_not_saved_cannot_be_loaded_and_nothing_changes(tmp_path):
    run = Run(2, gpt2, seed=1)
    run.step(0)
    run.model.save_parallelized(tmp_path / "model")
    run.model.save_parallelized(tmp_path / "some", lr_scheduler=run.scheduler)
    run.step(1)
    before = run.state()
    for name, what, has in (
        ("model", {"optimizer": run.optimizer}, "without optimizer=; its training state contains nothing"),
        ("model", {"extra": {}}, "without extra="),
        ("some", {"optimizer": run.optimizer}, "without optimizer=; its training state contains lr_scheduler"),
    ):
        with raises_everywhere(CheckpointError, has):
            run.model.from_parallelized(tmp_path / name, **what)
    for what, message in (
        ({"optimizer": 3}, "optimizer=3 must be a torch.optim.Optimizer"),
        ({"lr_scheduler": 3}, "lr_scheduler=3 must have a load_state_dict method"),
        ({"extra": 3}, "extra=3 must be a dict"),
        ({"optimizer": run.optimizer if run.model.mpu.rank else None}, "without optimizer="),
    ):
        with raises_everywhere(CheckpointError, message):
            run.model.from_parallelized(tmp_path / "some", **what)
    with raises_everywhere(CheckpointError, "optimizer= is not supported with merge_checkpoints=True"):
        run.save(tmp_path / "merged", merge_checkpoints=True)
    with raises_everywhere(CheckpointError, "ranks made different calls: saved with"):
        run.model.save_parallelized(tmp_path / "x", optimizer=run.optimizer if run.model.mpu.rank else None)
    run.save(tmp_path / "all")
    other = torch.optim.SGD(run.model.parameters(), lr=0.1)
    with raises_everywhere(CheckpointError, "holds the state of torch.optim.adamw.AdamW; got a"):
        run.model.from_parallelized(tmp_path / "all", optimizer=other)
    assert all(torch.equal(*pair) for pair in zip(before, run.state(), strict=True))
    assert not (tmp_path / "merged").exists() and not (tmp_path / "x").exists()


class Watching(torch.optim.AdamW):
    """AdamW that keeps the means of rows of gradients: statistics of the shard that a rank holds.

    It draws a number, so its trial step says nothing, and it may be made after ``initialize``.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch.rand(())
        result = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None and p.ndim == 2):
            self.state[p]["rows"] = p.grad.mean(1)
        return result


@pooled(world_size=2)
def test_statistics_of_shards_are_refused_by_name(tmp_path):
    run = Run(2, gpt2, seed=1, make=lambda groups: Watching(groups, lr=0.01))
    run.step(0)
    with raises_everywhere(
        CheckpointError, "Watching has state 'rows' of transformer.", "Pass the optimizer to autopar"
    ):
        run.save(tmp_path / "ckpt")
    run.model.save_parallelized(tmp_path / "ckpt")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_an_optimizer_that_makes_its_state_when_it_is_built_from_a_model_without_values(tmp_path):
    config = {"model_parallelism": {"tensor_parallel_size": 2}, "zero": {"stage": 1}}

    def adagrad(model: Any) -> torch.optim.Adagrad:
        return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.5)

    def step(model: Any, optimizer: Any) -> list[torch.Tensor]:
        ids = torch.arange(16).view(2, 8)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = gpt2()
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
    dist.barrier()
    model, optimizer = autopar.initialize(plain, config, optimizer=adagrad(plain))
    lazy, its = autopar.from_pretrained(GPT2LMHeadModel, tmp_path / "plain", config, optimizer=adagrad)
    assert all(map(torch.equal, step(model, optimizer), step(lazy, its)))
    model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    with autopar.lazy_init():
        resumed = GPT2LMHeadModel(model.config)
    resumed, its = autopar.initialize(resumed, config, optimizer=adagrad(resumed))
    resumed.from_parallelized(tmp_path / "ckpt", optimizer=its)
    assert all(map(torch.equal, step(model, optimizer), step(resumed, its)))

    class Eager(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["first"] = parameter.detach().clone()

    with raises_everywhere(ConfigError, "Eager made 'first' of transformer.wte.weight from a model without values"):
        autopar.from_pretrained(GPT2LMHeadModel, tmp_path / "plain", config, optimizer=lambda m: Eager(m.parameters()))
