"""A run that is saved, ended and resumed is the run that was never interrupted."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import GPT2LMHeadModel

import autopar
from autopar.checkpoint import ShardedDict
from autopar.checkpoint.offline import reshard_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.errors import ConfigError
from autopar.features.user_code.reads import ShardedTensor
from tests.checkpoint.hybrid import OF_FOUR, OF_TWO, Mesh, Run
from tests.checkpoint.loading import shared
from tests.checkpoint.refusals import refusals
from tests.checkpoint.test_plain_data import same
from tests.checkpoint.tiny import local as tensors_of, state_tensors
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.small import gpt2, parallel


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
    run = Run("gpt2", Mesh(2, 1))
    run.model.save_parallelized(tmp_path / "ckpt", extra=extra_of_the_user())
    found: dict[str, Any] = {"kept": 1, "epoch": 0}
    run.model.from_parallelized(tmp_path / "ckpt", extra=found)
    assert found.pop("kept") == 1
    assert same(found, {"epoch": 3, **extra_of_the_user()})
    run.save(tmp_path / "empty", extra={})
    found = {}
    run.load(tmp_path / "empty", extra=found)
    assert found == {}


@pooled(world_size=2)
def test_what_was_not_saved_cannot_be_loaded_and_nothing_changes(tmp_path):
    run = Run("gpt2", Mesh(2, 1))
    model, sgd = run.model, torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.steps(0, 1)
    model.save_parallelized(tmp_path / "model")
    model.save_parallelized(tmp_path / "some", lr_scheduler=run.scheduler)
    run.save(tmp_path / "all")
    run.steps(1, 2)

    def state() -> list[torch.Tensor]:
        return [*tensors_of(model).values(), *state_tensors(run.optimizer)]

    before, of_one_rank = state(), run.optimizer if model.mpu.rank else None

    def kept() -> bool:
        return all(map(torch.equal, before, state())) and not (tmp_path / "x").exists()

    with refusals(kept) as refuse:
        for name, what, said in (
            ("model", {"optimizer": run.optimizer}, "without optimizer=; its training state contains nothing"),
            ("model", {"extra": {}}, "without extra="),
            ("some", {"optimizer": run.optimizer}, "without optimizer=; its training state contains lr_scheduler"),
            ("some", {"optimizer": 3}, "optimizer=3 must be a torch.optim.Optimizer"),
            ("some", {"lr_scheduler": 3}, "lr_scheduler=3 must have a load_state_dict method"),
            ("some", {"extra": 3}, "extra=3 must be a dict"),
            ("some", {"optimizer": of_one_rank}, "without optimizer="),
            ("all", {"optimizer": sgd}, "holds the state of torch.optim.adamw.AdamW; got a"),
        ):
            refuse((name, what), said, model.from_parallelized, tmp_path / name, **what)
        for what, said in (
            ({"merge_checkpoints": True}, "optimizer= is not supported with merge_checkpoints=True"),
            ({"optimizer": of_one_rank}, "ranks made different calls: saved with"),
            ({"extra": {"model": model}}, ("extra.model", "which a checkpoint does not support")),
            ({"extra": [1]}, "must be a dict"),
        ):
            refuse(what, said, model.save_parallelized, tmp_path / "x", **{"optimizer": run.optimizer, **what})


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
    shared(tmp_path / "plain", plain)
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


def start(mesh: Mesh, seed: int = 0, **config: Any) -> Any:
    sizes = {"tensor_parallel_size": mesh.tp, "pipeline_parallel_size": mesh.pp}
    return autopar.initialize(gpt2(seed), {"model_parallelism": sizes, "zero": {"stage": mesh.zero // 3 * 3}, **config})


def averages(model: Any) -> dict[str, Any]:
    """An EMA of the parameters, as a user keeps it, one of the state dict, and a number."""
    shadow = {name: tensor.detach() * 2 for name, tensor in model.state_dict().items()}
    ema = {name: p.detach() / 2 for name, p in model.named_parameters()}
    return {"ema": ShardedDict(ema), "of 0.9": ShardedDict(shadow), "n": 3}


def local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor) or type(tensor) in (torch.Tensor, ShardedTensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(found: Mapping[str, Any], model: Any) -> None:
    due = averages(model)
    assert list(found) == ["ema", "of 0.9", "n"] and found["n"] == 3
    names = [*dict(model.named_parameters()), *(n for n, _ in model.named_buffers() if n in model.state_dict())]
    for key, count in (("ema", len([*model.parameters()])), ("of 0.9", len(names))):
        assert type(found[key]) is ShardedDict and len(found[key]) == count and set(found[key]) <= set(names)
        for name, tensor in found[key].items():
            assert isinstance(tensor, DTensor) == isinstance(due["of 0.9"][name], DTensor)
            assert torch.equal(local(tensor), local(due[key][name])), name


def over_meshes(folder: Path, meshes: list[Mesh]) -> None:
    sources = []
    for old in meshes:
        model, here = start(old), folder / "-".join(map(str, old))
        sources += [here, here / "again"]
        model.save_parallelized(here, extra=averages(model), async_save=old.pp > 1)
        model.wait_for_save()
        if dist.get_rank() == 0:
            assert check_checkpoint(here)["problems"] == []
            reshard_checkpoint(here, here / "again", tp=3, pp=2)
        dist.barrier()
    for new in meshes:
        model = start(new, seed=3)
        for source in sources:
            found: dict[str, Any] = {}
            model.from_parallelized(source, extra=found)
            check(found, model)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_an_average_of_this_ranks_shards_comes_back_on_any_mesh(tmp_path):
    over_meshes(tmp_path, OF_TWO[:2])


@pytest.mark.tier("sweep")
@pooled(world_size=4)
def test_an_average_of_shards_over_meshes_of_four(tmp_path):
    over_meshes(tmp_path, OF_FOUR[:4])  # with DTensors of ZeRO 3


def _differing(model: Any) -> list[tuple[str, Any, tuple[str, ...]]]:
    """What rank 1 gives otherwise than rank 0: name, ``extra=``, what is said."""
    rank, named = model.mpu.rank, dict(model.named_parameters())
    ema: dict[str, Any] = {name: p.detach().clone() for name, p in named.items()}
    norm, whole = "transformer.ln_f.weight", torch.zeros(131, 36)

    def sharded(given: dict[str, Any]) -> dict[str, Any]:
        return {"ema": ShardedDict(given)}

    return [
        ("a number", {"epoch": 3, "loss": 0.5 + rank},
         ("differs between ranks in 1 of 2 places: extra.loss is 0.5 on rank 0 and 1.5 on", "All places: extra.loss.")),
        ("a tensor", {"w": torch.arange(6.0) + rank}, ("extra.w is a tensor [6] of float32 with the sum",)),
        ("a key", {"x": 1} if rank else {"y": [1], "x": 1}, ("extra.y is [1] on rank 0 and missing on rank 1",)),
        ("text", {"t": "same" * 99 + str(rank)}, ("extra.t is \"same", "on rank 0 and \"same", "on rank 1")),
        ("a list of shards", {"ema": list(ema.values())}, ("in 13 of 29 places: extra.ema[0] is a tensor [66, 36]",)),
        ("other names", {"ema": {f"module.{name}": p for name, p in ema.items()}},
         ("places: extra.ema['module.transformer.wte.weight'] is a tensor [", "ShardedDict {name: tensor}")),
        ("names of another model", sharded({f"module.{n}": p for n, p in ema.items()}),
         ("extra.ema is a ShardedDict with 'module.transformer.wte.weight'", "no such tensor")),
        ("one that is whole", sharded({**ema, **({"lm_head.weight": whole} if rank else {})}),
         ("lm_head.weight in extra.ema must be a dense shard of shape [65, 36]; got [131, 36]",)),
        ("two of a tie", sharded({**ema, "lm_head.weight": ema["transformer.wte.weight"] + 1}),
         ("extra.ema holds two different tensors for",)),
        ("no tensor", sharded({**ema, norm: 3}), (f"{norm} in extra.ema must be a tensor; got int",)),
        ("deeper inside", {"of": {"0.9": ShardedDict(ema)}}, ("extra.of['0.9'] is a autopar.checkpoint.extra.Sh",)),
        ("a weight less", sharded({n: p for n, p in ema.items() if not rank or n != norm}),
         (f"extra.ema holds {norm} on rank 0 and not on rank 1, which also has this weight",)),
        ("a dtype", sharded({n: p.bfloat16() if rank and n == norm else p for n, p in ema.items()}),
         (f"extra.ema holds {norm} on rank 0 and as another dtype on rank 1",)),
        ("a replica that drifted", sharded({n: p + rank * (n == norm) for n, p in ema.items()}),
         (f"{norm} in extra.ema must be identical on rank 0 and rank 1, but differs (1 tensors",)),
    ]  # fmt: skip


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_differs_between_ranks_is_not_saved_as_rank_0_has_it(tmp_path):
    model = parallel(gpt2(), 2)
    with refusals(lambda: not any(tmp_path.iterdir())) as refuse:
        for name, extra, said in _differing(model):
            refuse(name, said, model.save_parallelized, tmp_path / "ckpt", extra=extra)
    free = parallel(gpt2(), 2, consistency_check={"enable": False})
    free.save_parallelized(tmp_path / "free", extra={"rank": dist.get_rank(), "ema": averages(free)["ema"]})
    found: dict[str, Any] = {}
    free.from_parallelized(tmp_path / "free", extra=found)
    assert found["rank"] == 0
    assert all(torch.equal(found["ema"][name] * 2, p) for name, p in free.named_parameters())
