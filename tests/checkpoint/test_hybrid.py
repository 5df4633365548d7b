"""Checkpoints of training on any (tp, pp, dp, zero) and in any precision, loaded on any other."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

import autopar
from autopar.checkpoint import Manifest
from autopar.checkpoint.state import check_fsdp_shard
from autopar.cli import app
from autopar.errors import CheckpointError
from tests.checkpoint.hybrid import OF_FOUR, OF_TWO, Mesh, Run, adamw, assert_same, batch_of, groups_of, same
from tests.exchange import raises_everywhere
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled
from tests.parity import close
from tests.pipeline_parallel.deep import deep
from tests.small import gpt2

NAMES = mainly("gpt2", "llama", "bert", "t5", later="sweep")


def check_chain(folder: Path, name: str, meshes: list[Mesh]) -> None:
    """One training that changes its mesh after every second step is the plain model's."""
    plain = deep(name, 2).train()
    reference = adamw(groups_of(plain))
    saved: dict[str, torch.Tensor] = {}
    for number, mesh in enumerate(meshes):
        run = Run(name, mesh, other=number > 0)
        if number:
            run.steps(50, 51)  # it has a state, which is to be replaced
            run.load(folder / str(number - 1))
            assert_same(run.whole(), saved, f"{name} from {meshes[number - 1]} to {mesh}")
        for step in (2 * number, 2 * number + 1):
            expected = plain(**batch_of(step)).loss
            expected.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            reference.step()
            reference.zero_grad()
            (loss,) = run.steps(step, step + 1)
            assert abs(loss - expected.item()) < 1e-5 * (1 + loss), f"{name} on {mesh}: step {step}"
        run.save(folder / str(number))
        saved = run.whole()
        for key, parameter in plain.named_parameters():
            close(saved[key], parameter.data, f"{key} on {mesh}", 2e-5)
            moments = reference.state[parameter]
            close(saved[f"{key}::exp_avg"], moments["exp_avg"], f"{key}::exp_avg on {mesh}", 2e-5)
        run.close()


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = model.execute_pipeline(batch_of(number), broadcast_loss=True).loss
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def run_cli(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("name", NAMES)
@pooled(world_size=2)
def test_training_goes_on_on_any_mesh_of_two(tmp_path, name):
    check_chain(tmp_path, name, [*OF_TWO, OF_TWO[1], OF_TWO[0]])


@pooled(world_size=2)
def test_an_optimizer_that_initialize_does_not_know_lists_what_other_stages_hold(tmp_path):
    def start(other: bool) -> tuple[Any, torch.optim.Optimizer]:
        model = gpt2(seed=int(other))
        optimizer = adamw(groups_of(model))  # made before, and not given
        return autopar.initialize(model, {"pp": 2, "pipeline": {"microbatch_size": 2}}), optimizer

    model, optimizer = start(other=False)
    assert sum(len(group["params"]) for group in optimizer.param_groups) > len(list(model.parameters()))
    step(model, optimizer, 0)
    model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    expected = step(model, optimizer, 1)
    model.mpu.destroy()
    resumed, optimizer = start(other=True)
    resumed.from_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    assert step(resumed, optimizer, 1) == expected
    resumed.mpu.destroy()
    known = Run("gpt2", Mesh(2, 1), other=True)
    known.load(tmp_path / "ckpt")
    known.close()


@pooled(world_size=2)
def test_stages_that_lie_on_ranks_in_another_order(tmp_path):
    """Two stages on each rank; folded, the first and the last one on the same."""

    def start(seed: int, **pipeline: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = gpt2(seed=seed, n_layer=4)
        config = {"pp": 2, "pipeline": {"microbatch_size": 1, **pipeline}}
        return autopar.initialize(model, config, optimizer=adamw(groups_of(model)))

    kinds = [{"schedule": "interleaved", "chunks": 2}, {"schedule": "zbv"}, {}, {"schedule": "dualpipev"}]
    model, optimizer = start(0, **kinds[0])
    for number, kind in enumerate((*kinds[1:], kinds[0])):
        step(model, optimizer, 2 * number)
        model.save_parallelized(tmp_path / str(number), optimizer=optimizer)
        expected = step(model, optimizer, 2 * number + 1)
        model.mpu.destroy()
        model, optimizer = start(1, **kind)
        model.from_parallelized(tmp_path / str(number), optimizer=optimizer)
        assert abs(step(model, optimizer, 2 * number + 1) - expected) < 1e-5
    model.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_saved_in_the_background_and_after_an_evaluation(tmp_path):
    """The weights are those of the call. An evaluation leaves FSDP's outermost weights full; saving does not mind."""
    for mesh in (Mesh(1, 1, 3), Mesh(1, 1, 1), Mesh(1, 2)):
        run = Run("gpt2", mesh, "bf16")
        run.steps(0, 1)
        with torch.no_grad():
            run.model.eval()(input_ids=batch_of(0)["input_ids"])
        run.model.train()
        due = run.whole()
        run.save(tmp_path / "ckpt", async_save=True)
        run.steps(1, 2)
        with torch.no_grad():
            run.model.eval()(input_ids=batch_of(0)["input_ids"])
        run.model.train()
        run.load(tmp_path / "ckpt")  # waits
        assert_same(run.whole(), due, mesh)
        run.close()


@pooled(world_size=2)
def test_statistics_that_replicas_share_out_are_refused_by_name(tmp_path):
    run = Run("gpt2", Mesh(1, 1, 3))
    run.steps(0, 1)
    for entries in run.optimizer.state.values():
        moment = entries["exp_avg"]
        entries["row_var"] = DTensor.from_local(moment.to_local().clone()[:1], moment.device_mesh, moment.placements)
    with raises_everywhere(CheckpointError, "AdamW keeps state 'row_var' of transformer.", "as a DTensor"):
        run.save(tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()
    run.model.save_parallelized(tmp_path / "ckpt")
    run.close()


@pooled(world_size=2)
def test_a_state_that_is_called_as_the_fp32_weights_are(tmp_path):
    run = Run("gpt2", Mesh(1, 2), "bf16")
    run.steps(0, 1)
    for entries in run.optimizer.state.values():
        entries["master"] = torch.zeros_like(entries["exp_avg"])
    with raises_everywhere(CheckpointError, "AdamW has two states that would be called transformer."):
        run.save(tmp_path / "ckpt")
    run.close()


@pooled(world_size=2)
def test_dtensors_of_other_kinds_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Shard(1)):
        with pytest.raises(CheckpointError, match="w is a DTensor with placements"):
            check_fsdp_shard("w", distribute_tensor(torch.zeros(4, 4), mesh, [placement]), 2)
    fine = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])
    check_fsdp_shard("w", fine, 2)
    with pytest.raises(CheckpointError, match="over 4 data-parallel replicas"):
        check_fsdp_shard("w", fine, 4)


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", NAMES)
@pooled(world_size=4)
def test_training_goes_on_on_any_mesh_of_four(tmp_path, name):
    check_chain(tmp_path, name, OF_FOUR if name in ("gpt2", "llama") else OF_FOUR[:4])


@pytest.mark.tier("sweep")
@pooled(world_size=4)
def test_from_every_mesh_to_every_mesh_bit_for_bit(tmp_path):
    saved = {}
    for number, mesh in enumerate(OF_FOUR):
        run = Run("gpt2", mesh)
        run.steps(0, 2)
        run.save(tmp_path / str(number))
        saved[number] = run.whole()
        run.close()
    # Sums in another order: it can fail.
    assert not same(*(saved[n]["transformer.ln_f.weight::exp_avg"] for n in (0, 1)))
    for target in OF_FOUR:
        run = Run("gpt2", target, other=True)
        for number, source in enumerate(OF_FOUR):
            run.load(tmp_path / str(number))
            assert_same(run.whole(), saved[number], f"from {source} to {target}")
        run.close()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pooled(world_size=4)
def test_merge_check_and_reshard(tmp_path, precision):
    for mesh in (Mesh(2, 2), Mesh(1, 2, 1), Mesh(2, 1, 3)):
        run = Run("gpt2", mesh, precision)
        run.steps(0, 2)
        folder, merged, reshared = (tmp_path / f"{part}-{mesh.zero}" for part in ("ckpt", "merged", "reshared"))
        run.save(folder)
        run.model.save_parallelized(tmp_path / f"direct-{mesh.zero}", merge_checkpoints=True)
        whole = run.whole()
        if dist.get_rank() == 0:
            run_cli("check", folder)
            run_cli("merge", folder, merged)
            run_cli("reshard", folder, reshared, "--tp", 3, "--pp", 2)
            run_cli("check", reshared)
            files = [folder.with_name(f"{name}-{mesh.zero}") / "model.safetensors" for name in ("merged", "direct")]
            assert files[0].read_bytes() == files[1].read_bytes()
            assert_same(load_file(files[0]), {n: t for n, t in whole.items() if "::" not in n}, mesh)
            assert GPT2LMHeadModel.from_pretrained(merged).dtype == run.model.dtype
        dist.barrier()
        run.close()
        resumed = Run("gpt2", Mesh(2, 2), precision, other=True)
        resumed.load(reshared)
        now = resumed.whole()
        assert_same({n: t for n, t in now.items() if "::" in n}, {n: t for n, t in whole.items() if "::" in n}, mesh)
        resumed.close()


@pooled(world_size=4)
def test_every_tensor_is_written_once_by_one_who_has_it(tmp_path):
    run = Run("gpt2", Mesh(1, 2, 1), "bf16")
    run.steps(0, 1)
    run.save(tmp_path / "ckpt")
    run.close()
    files = Manifest.read(tmp_path / "ckpt").files
    due = {"model-tp0-pp0", "model-tp0-pp1"} | {f"optimizer-tp0-pp{p}{dp}" for p in (0, 1) for dp in ("", "-dp1")}
    assert {name.removesuffix(".safetensors") for name in files} == due
    tensors = [name for record in files.values() for name in record.checksums]
    assert len(set(tensors)) == len(tensors)
    assert tensors.count("transformer.wte.weight") == tensors.count("transformer.wte.weight::master") == 1
    assert not any(name.startswith("lm_head") for name in tensors)
    owned = [record.bytes for name, record in files.items() if name.startswith("optimizer") and record.pp == 0]
    assert len(owned) == 2
    assert min(owned) > 0.8 * max(owned)


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
        with pytest.raises(UserWarning, match="continue in bf") if target[0] == "fp32" else nullcontext():
            other.load(tmp_path / source[0])
        whole = other.whole()
        dtype = torch.bfloat16 if target[0] == "fp32" else torch.float32
        moments = [name for name in whole if "::exp_avg" in name]
        assert len(moments) == 2 * sum("::" not in name for name in whole)
        assert_same({n: whole[n] for n in moments}, {n: due[n].to(dtype) for n in moments}, target)
        assert_same({n: whole[n] for n in due if "::" not in n}, {n: due[n] for n in due if "::" not in n}, target)
        other.steps(2, 3)
        other.close()


@pooled(world_size=4)
def test_resumed_on_the_same_mesh_of_four_it_is_the_same_run_bit_for_bit(tmp_path):
    for name, mesh in (("gpt2", Mesh(1, 2, 1)), ("llama", Mesh(2, 1, 3))):
        check_resume(tmp_path / f"{name}-{mesh.zero}-{mesh.pp}", name, mesh, "bf16")


IDS = torch.arange(32).view(4, 8)


def adamw_of(model: Any) -> torch.optim.AdamW:
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
    model, optimizer = autopar.initialize(plain, {**config, "precision": {"dtype": "fp16"}}, optimizer=adamw_of(plain))
    steps(model, optimizer, overflow=True)
    assert optimizer.skipped_steps == 1
    model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    expected = gpt2(seed=3)
    expected, expected_optimizer = autopar.initialize(expected, config, optimizer=adamw_of(expected))
    expected.from_parallelized(tmp_path / "ckpt", optimizer=expected_optimizer)
    model, optimizer = autopar.from_pretrained(GPT2LMHeadModel, tmp_path / "ckpt", config, optimizer=adamw_of)
    model.train().from_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    assert model.dtype == torch.float32
    assert all(map(torch.equal, steps(model, optimizer), steps(expected.train(), expected_optimizer)))
    assert autopar.from_pretrained(GPT2LMHeadModel, tmp_path / "ckpt", config).dtype == torch.float16
    model, optimizer = autopar.from_pretrained(
        GPT2LMHeadModel, tmp_path / "ckpt", config, optimizer=adamw_of, dtype=torch.float16
    )
    with pytest.warns(UserWarning, match="28 weights .first transformer.wte.weight. continue in float16"):
        model.from_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    config["precision"] = {"dtype": "fp16"}  # as documented
    model, optimizer = autopar.from_pretrained(GPT2LMHeadModel, tmp_path / "ckpt", config, optimizer=adamw_of)
    model.from_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    assert model.dtype == torch.float16 and optimizer.skipped_steps == 1
