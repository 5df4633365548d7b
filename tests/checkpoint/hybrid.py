"""Training on any (tp, pp, dp, zero) and in any precision: what the tests of its checkpoints share."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar.layout import Layout
from tests.exchange import everyones
from tests.parity import language_batches
from tests.pipeline_parallel.deep import deep


class Mesh(NamedTuple):
    """The data-parallel size is what remains of the world."""

    tp: int
    pp: int
    zero: int = 0
    cp: int = 1


OF_TWO = [Mesh(2, 1), Mesh(1, 2), Mesh(1, 1, 1), Mesh(1, 1, 3)]
OF_FOUR = [Mesh(2, 2), Mesh(1, 2, 1), Mesh(2, 1, 1), Mesh(2, 1, 3), Mesh(1, 2), Mesh(4, 1), Mesh(1, 1, 3)]


def batch_of(step: int) -> dict[str, torch.Tensor]:
    (batch,) = language_batches(131, count=1, batch=4, seed=step + 1)
    return {**batch, "labels": batch["input_ids"].clone()}  # replicas have equally many labels


def groups_of(model: Any) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LinearLR:
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)


class Run:
    def __init__(
        self,
        name: str,
        mesh: Mesh,
        precision: str = "fp32",
        *,
        other: bool = False,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
    ) -> None:
        model = deep(name, 2).to(dtype)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        if other:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1)
        settings: dict[str, Any] = {"dtype": precision}
        if precision == "fp16":
            settings |= {"initial_scale": 256.0 if other else 1024.0, "growth_interval": 3}
        config = {
            "tp": mesh.tp,
            "pp": mesh.pp,
            "cp": mesh.cp,
            "pipeline": {"microbatch_size": 1},
            "zero": {"stage": mesh.zero},
            "precision": settings,
            "gradient_clipping": 1.0,
        }
        optimizer = adamw(groups_of(model))
        self.scheduler = warm_up(optimizer)
        self.model, self.optimizer = autopar.initialize(model, config, optimizer=optimizer, lr_scheduler=self.scheduler)

    def steps(self, start: int, stop: int) -> list[float]:
        """The losses of global batches, of which each replica has its part."""
        dp, losses = self.model.mpu.dp, []
        for step in range(start, stop):
            mine = {key: value.chunk(dp.size)[dp.rank] for key, value in batch_of(step).items()}
            loss = self.model.execute_pipeline(mine, optimizer=self.optimizer, broadcast_loss=True).loss
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            dist.all_reduce(loss, group=dp.group)
            losses.append(loss.item() / dp.size)
        return losses

    def save(self, folder: Path, **more: Any) -> None:
        self.model.save_parallelized(folder, optimizer=self.optimizer, lr_scheduler=self.scheduler, **more)

    def load(self, folder: Path, **more: Any) -> None:
        """Objects stay, and what could lose bits warns."""
        before = [id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.model.from_parallelized(folder, optimizer=self.optimizer, lr_scheduler=self.scheduler, **more)
        assert before == [id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]
        assert set(before) == {id(parameter) for parameter in self.model.parameters()}

    def whole(self) -> dict[str, torch.Tensor]:
        """On every rank: whole weights, ``name::key`` of the optimizer, ``name::stepped`` (the fp32 weight, if any).

        Asserts that whoever holds the same has the same bits.
        """
        plan, mpu, step = self.model._autopar.plan, self.model.mpu, self.optimizer._autopar
        mine: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            full = plan.canonical(name)
            mine[full] = parameter.detach()
            if step.owns(parameter):
                weight = step.master(parameter)
                mine[f"{full}::stepped"] = parameter.detach() if weight is None else weight
                mine |= {f"{full}::{key}": value for key, value in self.optimizer.state[parameter].items()}
        everyone = everyones((mpu.tp.rank, whole_shards(mine, mpu.dp_cp)))
        result = {}
        for name in sorted({name for _, tensors in everyone for name in tensors}):
            held: dict[int, torch.Tensor] = {}
            for rank, tensors in everyone:
                if name in tensors:
                    assert same(held.setdefault(rank, tensors[name]), tensors[name]), f"{name}: copies differ"
            assert sorted(held) == list(range(mpu.tp.size)), f"{name} is on tp ranks {sorted(held)}"
            layout: Layout | None = plan.tensors[name.partition("::")[0]].layout
            cut = layout is not None and held[0].ndim
            result[name] = layout.unshard([held[rank] for rank in sorted(held)]) if layout and cut else held[0]
        return result


def whole_shards(tensors: dict[str, torch.Tensor], replicas: Any) -> dict[str, torch.Tensor]:
    """What the replicas share out, put together; ``full_tensor`` may take the groups of an earlier mesh."""
    shards = {name: tensor.to_local() for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    parts = everyones(shards, replicas.group) if shards else []
    return tensors | {name: torch.cat([part[name] for part in parts]) for name in shards}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], where: Any) -> None:
    assert one.keys() == other.keys(), where
    for name, tensor in one.items():
        assert same(tensor, other[name]), f"{name}, {where}"
