"""Gradients that are averaged inside of a backward are those that are averaged after it."""

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.data_parallel import grad_sync
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2, llama

GLOO = {"model_parallelism": {"cpu_transport": "gloo"}}  # over shared memory, no bucket starts in a backward
IDS = torch.randint(0, 131, (12, 9), generator=torch.Generator().manual_seed(5))


def _batch(model: Any, step: int) -> dict[str, torch.Tensor]:
    ids = IDS[4 * step % 12 :][:4][model.mpu.dp.rank :: model.mpu.dp.size]
    return {"input_ids": ids, "labels": ids}


def _same_gradients(model: Any, early: Any) -> None:
    for (name, p), q in zip(model.named_parameters(), early.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert p.grad.dtype == q.grad.dtype and torch.equal(p.grad, q.grad), name


class _Log:
    """Counts the buckets that start inside of a backward, and others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside = self.outside = 0
        start = grad_sync.Bucket.start

        def counted(bucket: Any) -> Any:
            inside = torch._C._current_graph_task_id() != -1
            self.inside, self.outside = self.inside + inside, self.outside + (not inside)
            return start(bucket)

        monkeypatch.setattr(grad_sync.Bucket, "start", counted)
        monkeypatch.setattr(grad_sync, "_BUCKET", 4096)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_buckets_start_in_the_second_backward() -> None:
    with pytest.MonkeyPatch.context() as patch:
        model, early = (autopar.initialize(llama(), GLOO) for _ in range(2))
        for step in range(4):
            model(**_batch(model, step)).loss.backward()
            autopar.average_gradients(model)
            loss = early(**_batch(early, step)).loss
            log = _Log(patch)
            with autopar.average_in_backward(early):
                loss.backward()
            patch.undo()
            assert (log.inside > 5, log.outside > 5) == (step > 0, step == 0)
            _same_gradients(model, early)
            if step != 2:  # then the next gradients are added to averaged ones
                model.zero_grad()
                early.zero_grad(set_to_none=step == 1)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_other_parameters_in_each_step() -> None:
    """Unused ones, on one replica or on all; frozen ones; ones that thaw; gradients that arrive twice."""
    plain, rank = nn.ModuleDict({name: nn.Linear(5, 5) for name in "abcd"}), dist.get_rank()
    found = []
    for early in (False, True):
        model = copy.deepcopy(plain)
        model._autopar = autopar.initialize(gpt2(), GLOO)._autopar  # which does not know its parameters
        for step, used in enumerate(["abcd", "abcd" if rank else "ab", "acd", "ac", "bd", "b", "abcd", "a", "abcd"]):
            model["b"].requires_grad_(step not in (2, 3))
            again = {4: "d", 6: "d" * rank}.get(step, "")  # a second backward, of one replica in step 6
            with autopar.average_in_backward(model) if early else nullcontext():
                for names in filter(None, (used, again)):
                    sum(model[name](torch.linspace(rank, 1.0, 5)).square().sum() for name in names).backward()
            if not early:
                autopar.average_gradients(model)
            found.append({f"{step} {n}": None if p.grad is None else p.grad for n, p in model.named_parameters()})
            model.zero_grad()
    for after, inside in zip(found[:9], found[9:], strict=True):
        for name in after:
            assert (after[name] is None) == (inside[name] is None), name
            if after[name] is not None:
                close(inside[name], after[name], name, 1e-6)


@pytest.mark.tier("test")
@pooled(world_size=2)
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_large_gradient_is_summed_in_its_memory_unless_another_shares_it(transport: str) -> None:
    model = nn.ParameterDict({name: torch.ones(40, 40) for name in "abc"})
    model._autopar = autopar.initialize(gpt2(), {"model_parallelism": {"cpu_transport": transport}})._autopar
    with mock.patch.multiple(grad_sync, _BUCKET=4096, _PART=1024):
        _sum_shared(model)


def _sum_shared(model: Any) -> None:
    scale = torch.arange(1600.0) * (1 + dist.get_rank())
    for early in (False, True, True):
        with autopar.average_in_backward(model) if early else nullcontext():
            both = model["a"].view(-1) + model["b"].mT.mT.reshape(-1)  # their gradients are one tensor
            ((both + 2 * model["c"].reshape(-1)) * scale).sum().backward()
        if not early:
            assert model["a"].grad.data_ptr() == model["b"].grad.data_ptr()
            before = model["c"].grad.data_ptr()
            autopar.average_gradients(model)
            assert model["c"].grad.data_ptr() == before
            assert model["a"].grad.data_ptr() != model["b"].grad.data_ptr()  # two sums in one memory would race
        for name, factor in {"a": 1.5, "b": 1.5, "c": 3.0}.items():
            assert torch.equal(model[name].grad.view(-1), torch.arange(1600.0) * factor), (name, early)
        model.zero_grad()


@pytest.mark.tier("test")
@pooled(world_size=2)
@pytest.mark.parametrize("reduce", ["same", "fp32"])
def test_sums_in_shared_memory_have_the_bits_of_gloo(reduce: str) -> None:
    kinds = {"b16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "c64": torch.complex64}
    rank, found = dist.get_rank(), []
    for transport in ("gloo", "auto"):
        parallel = {"cpu_transport": transport, "reduce_dtype": reduce}
        model = nn.ParameterDict({kind: torch.ones(31, 40, dtype=dtype) for kind, dtype in kinds.items()})
        model.update({"small": torch.ones(3), "one replica": torch.ones(50, 9), "unused": torch.ones(2)})
        model._autopar = autopar.initialize(gpt2(), {"model_parallelism": parallel})._autopar
        torch.manual_seed(rank)
        for name, p in model.items():
            p.grad = None if name in ("unused", "one replica"[: 20 * rank]) else torch.randn_like(p)
        model["f32"].grad = torch.randn(40, 31).t()  # not contiguous
        with mock.patch.object(grad_sync, "_PART", 100):
            autopar.average_gradients(model)
        axis, weights = model._autopar.mpu.dp, [torch.randn(7, 5).t(), torch.randn(300, 4)]
        grad_sync.broadcast([(weight, source) for source, weight in enumerate(weights)], axis)
        assert (axis.transport is None) == (transport == "gloo")
        found.append([*(p.grad for p in model.values()), *weights])
    assert all(one is other or torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_weights_frozen_on_one_replica_raise_on_both() -> None:
    model = autopar.initialize(gpt2(), GLOO)
    for step in range(2):
        model.transformer.ln_f.weight.requires_grad_(step == 0 or model.mpu.dp.rank == 0)
        loss = model(**_batch(model, step)).loss
        refused = pytest.raises(autopar.ConsistencyError, match=r"is frozen .* on only some of the ranks")
        with refused if step else nullcontext(), autopar.average_in_backward(model):
            loss.backward()


@pooled(world_size=4)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "interleaved", "zbv"])
def test_stages_start_buckets_in_their_last_backward(schedule: str) -> None:
    config = {
        "model_parallelism": {"pipeline_parallel_size": 2},
        "pipeline": {"microbatch_size": 1, "schedule": schedule},
    }
    plain = llama(num_hidden_layers=4, tie_word_embeddings=schedule == "1f1b")
    model = autopar.initialize(copy.deepcopy(plain), config)
    with pytest.MonkeyPatch.context() as patch:
        for step in range(3):
            batch = IDS[:8] if step else IDS[4:]
            mine = batch[model.mpu.dp.rank :: 2]
            log = _Log(patch)
            model.execute_pipeline({"input_ids": mine, "labels": mine})
            patch.undo()
            assert (log.inside > 2) == (step > 0), (schedule, step, log.inside)
            plain(batch, labels=batch).loss.backward()
            for name, p in model.named_parameters():
                close(p.grad, plain.get_parameter(model._autopar.plan.canonical(name)).grad, name, 2e-6)
            if step:
                plain.zero_grad()
                model.zero_grad()


@pooled(world_size=2)
def test_replicas_that_all_skip_a_failed_step_continue() -> None:
    """They fail at different places of the backward, with other buckets on the way."""
    model, early = (autopar.initialize(llama(), GLOO) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_sync, "_BUCKET", 4096)
        for step in range(4):
            loss = early(**_batch(early, step)).loss
            if step == 2:
                weight = early.get_parameter(f"model.layers.{early.mpu.dp.rank}.mlp.up_proj.weight")
                handle = weight.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError), autopar.average_in_backward(early):
                    loss.backward()
                handle.remove()
            else:
                with autopar.average_in_backward(early):
                    loss.backward()
                model(**_batch(model, step)).loss.backward()
                autopar.average_gradients(model)
                _same_gradients(model, early)
            model.zero_grad()
            early.zero_grad()


@pooled(world_size=2)
def test_groups_that_a_backward_uses_start_no_bucket_inside() -> None:
    with pytest.MonkeyPatch.context() as patch:
        model = autopar.initialize(
            llama(), {"model_parallelism": {"context_parallel_size": 2, "cpu_transport": "gloo"}}
        )
        batch = {"input_ids": IDS[:2, :8], "labels": IDS[:2, :8]}
        for _ in range(2):
            log = _Log(patch)
            with autopar.average_in_backward(model):
                model(**batch).loss.backward()
            patch.undo()
            assert log.inside == 0 and log.outside > 5
            model.zero_grad()
