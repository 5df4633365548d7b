"""Checkpoints of training in half precision: the fp32 weights, the loss scale, and resuming bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import autopar
from tests.checkpoint.hybrid import OF_TWO, Mesh, Run, assert_same, same
from tests.pool import pooled
from tests.small import gpt2


def check_resume(folder: Path, name: str, mesh: Mesh, precision: str) -> None:
    run = Run(name, mesh, precision)
    run.steps(0, 2)
    run.save(folder)
    kept = run.whole()
    expected = run.steps(2, 5)
    ended, scale = run.whole(), run.optimizer.loss_scale
    assert scale == {"fp16": 2048.0}.get(precision, 1.0)  # it grew in the third step
    run.close()
    resumed = Run(name, mesh, precision, other=True)
    resumed.steps(7, 8)
    resumed.load(folder)
    assert resumed.optimizer.loss_scale == (1024.0 if precision == "fp16" else 1.0)
    assert_same(resumed.whole(), kept, mesh)
    assert resumed.steps(2, 5) == expected
    assert_same(resumed.whole(), ended, mesh)
    assert resumed.optimizer.loss_scale == scale
    resumed.close()
    if mesh.zero != 3:
        differ = [n for n in kept if "::" not in n and not torch.equal(kept[n].float(), kept[f"{n}::stepped"])]
        assert len(differ) > len(kept) / 10  # the fp32 weights say more than the half ones


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pooled(world_size=2)
def test_resumed_on_the_same_mesh_of_two_it_is_the_same_run_bit_for_bit(tmp_path, precision):
    for mesh in OF_TWO:
        check_resume(tmp_path / "-".join(map(str, mesh)), "gpt2", mesh, precision)


@pooled(world_size=2)
def test_a_model_that_is_stepped_in_half_precision_and_fp32_weights_into_each_other(tmp_path):
    """Moments have the dtype of what is stepped, as torch's own loading makes them."""
    kinds = [("fp32", torch.bfloat16), ("bf16", torch.float32)]  # without and with fp32 weights; both models are bf16
    for source, target in (kinds, kinds[::-1]):
        run = Run("gpt2", Mesh(1, 2), source[0], dtype=source[1])
        run.steps(0, 2)
        run.save(tmp_path / source[0])
        due = run.whole()
        run.close()
        other = Run("gpt2", Mesh(2, 1), target[0], dtype=target[1], other=True)
        with pytest.raises(UserWarning, match="weights go on from bf") if target[0] == "fp32" else nullcontext():
            other.load(tmp_path / source[0])
        whole = other.whole()
        dtype = torch.bfloat16 if target[0] == "fp32" else torch.float32
        moments = [name for name in whole if "::exp_avg" in name]
        assert len(moments) == 2 * sum("::" not in name for name in whole)
        assert_same({n: whole[n] for n in moments}, {n: due[n].to(dtype) for n in moments}, target)
        assert_same({n: whole[n] for n in due if "::" not in n}, {n: due[n] for n in due if "::" not in n}, target)
        other.steps(2, 3)
        other.close()


@pooled(world_size=2)
def test_half_precision_without_the_optimizer_is_rounded_and_says_so(tmp_path):
    run = Run("gpt2", Mesh(1, 2), "bf16")
    run.steps(0, 2)
    run.save(tmp_path / "ckpt")
    half = {name: tensor.float() for name, tensor in run.whole().items() if "::" not in name}
    run.close()
    plain = Run("gpt2", Mesh(2, 1), other=True)
    with pytest.warns(UserWarning, match="converted on loading"):
        plain.model.from_parallelized(tmp_path / "ckpt")
    assert_same({name: t for name, t in plain.whole().items() if "::" not in name}, half, "rounded")
    plain.close()


@pooled(world_size=4)
def test_resumed_on_the_same_mesh_of_four_it_is_the_same_run_bit_for_bit(tmp_path):
    for name, mesh in (("gpt2", Mesh(1, 2, 1)), ("llama", Mesh(2, 1, 3))):
        check_resume(tmp_path / f"{name}-{mesh.zero}-{mesh.pp}", name, mesh, "bf16")


@pytest.mark.tier("sweep")
@pooled(world_size=4)
def test_any_precision_into_any_other_keeps_the_weights_that_are_stepped(tmp_path):
    kinds = [("bf16", Mesh(1, 2, 1)), ("fp32", Mesh(2, 1, 1)), ("fp16", Mesh(2, 2)), ("bf16", Mesh(2, 1, 3))]
    for number, (precision, mesh) in enumerate(kinds):
        source = Run("gpt2", mesh, precision)
        source.steps(0, 2)
        source.save(tmp_path / str(number))
        due = {name: tensor for name, tensor in source.whole().items() if "::" in name}
        assert {t.dtype for t in due.values()} == {torch.float32}
        scale = source.optimizer.loss_scale
        source.close()
        for other, target in kinds:
            run = Run("gpt2", target, other, other=True)
            run.load(tmp_path / str(number))
            whole = run.whole()
            assert_same({name: t for name, t in whole.items() if "::" in name}, due, f"{precision} to {other}")
            for name, tensor in whole.items():
                if "::" not in name:
                    assert same(tensor, whole[f"{name}::stepped"].to(tensor.dtype)), name
            if other == "fp16":
                assert run.optimizer.loss_scale == (scale if precision == "fp16" else 256.0)
            run.steps(2, 3)
            run.close()


IDS = torch.arange(32).view(4, 8)


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model: Any, optimizer: Any, overflow: bool = False) -> list[torch.Tensor]:
    for number in range(3):
        optimizer.scale_loss(model(IDS, labels=IDS).loss).backward()
        if overflow and number == 1:
            model.transformer.h[0].mlp.c_fc.weight.grad.fill_(torch.inf)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_resumed_without_its_precision_a_run_goes_on_from_the_fp32_weights(tmp_path):
    config: dict[str, Any] = {"model_parallelism": {"tensor_parallel_size": 2}}
    plain = gpt2()
    model, optimizer = autopar.initialize(plain, {**config, "precision": {"dtype": "fp16"}}, optimizer=adamw(plain))
    steps(model, optimizer, overflow=True)
    assert optimizer.skipped_steps == 1
    model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    expected = gpt2(seed=3)
    expected, expected_optimizer = autopar.initialize(expected, config, optimizer=adamw(expected))
    expected.from_parallelized(tmp_path / "ckpt", optimizer=expected_optimizer)
    model, optimizer = autopar.from_pretrained(GPT2LMHeadModel, tmp_path / "ckpt", config, optimizer=adamw)
    model.train().from_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    assert model.dtype == torch.float32
    assert all(map(torch.equal, steps(model, optimizer), steps(expected.train(), expected_optimizer)))
    assert autopar.from_pretrained(GPT2LMHeadModel, tmp_path / "ckpt", config).dtype == torch.float16
    model, optimizer = autopar.from_pretrained(
        GPT2LMHeadModel, tmp_path / "ckpt", config, optimizer=adamw, dtype=torch.float16
    )
    with pytest.warns(UserWarning, match="28 weights go on from float16, transformer.wte.weight first: the run that"):
        model.from_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    config["precision"] = {"dtype": "fp16"}  # as documented
    model, optimizer = autopar.from_pretrained(GPT2LMHeadModel, tmp_path / "ckpt", config, optimizer=adamw)
    model.from_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    assert model.dtype == torch.float16 and optimizer.skipped_steps == 1
