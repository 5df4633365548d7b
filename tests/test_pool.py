"""Ranks of the pool: no body sees what another one left, no failure reaches the next; remembered dry runs."""

import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import autopar.dry_run.plan_model
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from tests.exchange import by_rank_0, raises_everywhere
from tests.harness import worlds
from tests.harness.worlds import pooled
from tests.rehearsals import _of_plan, _once
from tests.small import gpt2


@pooled(world_size=2)
def _leave_everything_behind() -> None:
    MPU(tensor_parallel_size=2)
    dist.new_group([0, 1])
    if dist.get_rank() == 1:  # one rank numbers its groups otherwise: since torch 2.14 it could not make this one after
        dist.new_group([1], use_local_synchronization=True)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(17)
    random.seed(17)
    os.environ["AUTOPAR_LEFT"] = "behind"
    os.chdir("/")
    sys.excepthook = print
    warnings.simplefilter("error")
    logging.getLogger("autopar").addHandler(logging.NullHandler())
    logging.getLogger("autopar").setLevel(logging.DEBUG)
    autopar.dry_run.plan_model.check_plan = lambda *_: True
    MPU.destroy = lambda _: None  # type: ignore[method-assign]


@pooled(world_size=2)
def _find_nothing() -> None:
    assert list(dist.distributed_c10d._world.pg_map) == [dist.group.WORLD]
    assert (torch.get_default_dtype(), torch.zeros(1).device.type) == (torch.float32, "cpu")
    assert torch.is_grad_enabled() and torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert "AUTOPAR_LEFT" not in os.environ and os.getcwd() != "/"
    assert sys.excepthook is not print and ("error", None, Warning, None, 0) not in warnings.filters
    assert logging.getLogger("autopar").level != logging.DEBUG
    assert not any(type(each) is logging.NullHandler for each in logging.getLogger("autopar").handlers)
    assert autopar.dry_run.plan_model.check_plan.__module__.startswith("autopar") and MPU.destroy.__module__.startswith(
        "autopar"
    )
    torch.manual_seed(17)
    seeded = torch.rand(3)
    mpu = MPU()  # new groups connect, whatever each rank made before
    group = dist.new_group([0, 1])
    dist.all_reduce(seeded, group=group)
    mpu.destroy()


@pooled(world_size=2)
def _draw() -> None:
    drawn = [torch.rand(1).item(), random.random(), float(numpy.random.random())]
    assert _drawn.setdefault("first", drawn) == drawn


_drawn: dict[str, list[float]] = {}


@pooled(world_size=2)
def _fail_on_one_rank() -> None:
    torch.set_default_dtype(torch.float64)
    raise ValueError("on purpose") if dist.get_rank() else KeyError("on purpose")


@pooled(world_size=2)
def _die() -> None:
    os._exit(3)


@pooled(world_size=2)
def _destroy_the_world() -> None:
    dist.destroy_process_group()


@pytest.mark.tier("test")
def test_what_a_body_leaves_behind_is_put_back() -> None:
    _leave_everything_behind()
    _find_nothing()


@pytest.mark.tier("test")
def test_every_body_begins_with_the_same_random_numbers() -> None:
    _draw()
    _draw()


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_fail_on_one_rank, "on purpose"),
        (_die, "the process died with code 3"),
        (_destroy_the_world, "it cannot share its ranks, use @distributed"),
    ],
    ids=["fails", "dies", "destroys"],
)
def test_a_world_that_a_body_has_broken_is_replaced(body: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        body()  # type: ignore[operator]
    _find_nothing()


@pooled(world_size=2)
def test_a_step_of_one_rank_is_that_of_all() -> None:
    def refuse() -> None:
        raise ConfigError(f"refused on rank {dist.get_rank()}")

    assert by_rank_0(dist.get_rank)() == 0
    with raises_everywhere(ConfigError, "refused on rank 0"):
        by_rank_0(refuse)()


@pytest.mark.tier("test")
def test_ranks_are_refused_to_a_test_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "without_ranks", True)
    for start in (test_a_step_of_one_rank_is_that_of_all, lambda: worlds.spawn("os", "getpid", 2)):
        with pytest.raises(AssertionError, match=r'starts ranks is in make check: mark it, @pytest.mark.tier\("all"\)'):
            start()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "wider": lambda m: setattr(m.config, "n_inner", 38),
    "in half": lambda m: m.half(),
    "with a forward": lambda m: setattr(m.transformer, "forward", lambda *args, **kwargs: None),
    "with a hook": lambda m: m.transformer.register_forward_hook(lambda *_: None),
    "with a scale": lambda m: setattr(m.transformer.h[1].attn, "scaling", 0.25),
    "untied": lambda m: setattr(m.lm_head, "weight", torch.nn.Parameter(m.lm_head.weight.detach().clone())),
    "frozen": lambda m: m.transformer.wpe.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_has_a_dry_run_of_its_own(change: str) -> None:
    made = []
    run = _once(lambda *args: made.append(args), _of_plan)
    for _ in range(2):
        model = gpt2()
        run(model, "", make_plan(model, find_policy(model), 2))
    assert len(made) == 1
    run(model, "", make_plan(model, find_policy(model), 3))
    assert len(made) == 2
    model = gpt2()
    plan = make_plan(model, find_policy(model), 2)
    CHANGES[change](model)
    run(model, "", plan)
    assert len(made) == 3
