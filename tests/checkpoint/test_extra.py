"""The user's own data beside the model: named as its tensors, shards come back on any mesh; the rest is one value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar.checkpoint import ShardedDict
from autopar.checkpoint.offline import reshard_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.errors import CheckpointError
from autopar.features.user_code.reads import ShardedTensor
from tests.checkpoint.hybrid import OF_FOUR, OF_TWO, Mesh
from tests.checkpoint.refusals import refusals
from tests.checkpoint.tiny import rewrite_manifest
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.small import gpt2, parallel


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
        ("a tensor", {"w": torch.arange(6.0) + rank}, ("extra.w is a tensor [6] of float32 on rank 0 and another on",)),
        ("a key", {"x": 1} if rank else {"y": [1], "x": 1}, ("extra.y is [1] on rank 0 and missing on rank 1",)),
        ("text", {"t": "same" * 99 + str(rank)}, (r"extra.t is ", "and another on rank 1")),
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


@pooled(world_size=1)
def test_what_is_damaged_in_the_manifest_is_refused(tmp_path):
    model = parallel(gpt2(), 1)
    before = [p.detach().clone() for p in model.parameters()]
    for number, change in enumerate(
        (lambda tensors, name: tensors[name].update(shape=[3], layout=None), lambda tensors, name: tensors.pop(name))
    ):
        folder = tmp_path / str(number)
        model.save_parallelized(folder, extra=averages(model))

        def edit(data: Any, change: Any = change) -> Any:
            change(data["parts"]["extra"]["tensors"], "transformer.ln_f.weight::extra.ema")
            return data

        rewrite_manifest(folder, edit)
        with raises_everywhere(CheckpointError, "damaged"):
            model.from_parallelized(folder, extra={})
    assert all(map(torch.equal, before, model.parameters()))
