"""Checkpoints of training on any (tp, pp, dp, zero) and in any precision, loaded on any other."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

import autopar
from autopar.checkpoint import Manifest
from autopar.checkpoint.state import check_fsdp_shard
from autopar.cli import app
from autopar.cli.checkpoints import _summary
from autopar.errors import CheckpointError
from tests.checkpoint.hybrid import OF_FOUR, OF_TWO, Mesh, Run, adamw, assert_same, batch_of, groups_of, warm_up
from tests.exchange import raises_everywhere
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled
from tests.parity import close
from tests.pipeline_parallel.deep import deep
from tests.pipeline_parallel.oracle import take_step
from tests.small import gpt2

NAMES = mainly("gpt2", "llama", "bert", "t5", later="sweep")


def check_chain(folder: Path, name: str, meshes: list[Mesh]) -> None:
    plain = deep(name, 2).train()
    reference = adamw(groups_of(plain))
    scheduler = warm_up(reference)
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
            take_step(reference)
            scheduler.step()
            (loss,) = run.steps(step, step + 1)
            assert abs(loss - expected.item()) < 1e-5 * (1 + loss), f"{name} on {mesh}: step {step}"
        run.save(folder / str(number))
        saved = run.whole()
        for key, parameter in plain.named_parameters():
            close(saved[key], parameter.data, f"{key} on {mesh}", 2e-5)
            moments = reference.state[parameter]
            close(saved[f"{key}::exp_avg"], moments["exp_avg"], f"{key}::exp_avg on {mesh}", 2e-5)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = model.execute_pipeline(batch_of(number), broadcast_loss=True).loss
    take_step(optimizer)
    return loss.item()


def run_cli(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


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
    resumed, optimizer = start(other=True)
    resumed.from_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    assert step(resumed, optimizer, 1) == expected
    known = Run("gpt2", Mesh(2, 1), other=True)
    known.model.from_parallelized(tmp_path / "ckpt", optimizer=known.optimizer)


@pooled(world_size=2)
def test_stages_that_lie_on_ranks_in_another_order(tmp_path):

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
        model, optimizer = start(1, **kind)
        model.from_parallelized(tmp_path / str(number), optimizer=optimizer)
        assert abs(step(model, optimizer, 2 * number + 1) - expected) < 1e-5


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


@pooled(world_size=2)
def test_states_that_cannot_be_saved_are_refused_by_name(tmp_path):
    for mesh, precision, key, said in (
        (Mesh(1, 1, 3), "fp32", "row_var", ("AdamW keeps state 'row_var' of transformer.", "as a DTensor")),
        (Mesh(1, 2), "bf16", "master", ("AdamW has two states that would be called transformer.",)),
    ):
        run = Run("gpt2", mesh, precision)
        run.steps(0, 1)
        for entries in run.optimizer.state.values():
            value = entries["exp_avg"].clone()
            if isinstance(value, DTensor):
                value = DTensor.from_local(value.to_local()[:1], value.device_mesh, value.placements)
            entries[key] = value
        with raises_everywhere(CheckpointError, *said):
            run.save(tmp_path / "ckpt")
        assert not (tmp_path / "ckpt").exists()


@pooled(world_size=2)
def test_dtensors_of_other_kinds_are_refused() -> None:
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


@pytest.mark.tier("test", only=("meshes0",))
@pytest.mark.parametrize(
    "meshes", [[Mesh(1, 1, 1, cp=2), Mesh(2, 1, 1)], [Mesh(2, 1, 1, cp=2), Mesh(1, 1, 3, cp=4), Mesh(2, 1, cp=2)]]
)
@pooled(world_size=4)
def test_training_goes_on_with_context_parallelism(tmp_path, meshes):
    """Its ranks are replicas: each shard is written once."""
    check_chain(tmp_path, "gpt2", meshes)
    for number, mesh in enumerate(meshes):
        manifest = Manifest.read(tmp_path / str(number))
        assert (manifest.sizes, manifest.cp) == ((mesh.tp, 1, 4 // mesh.tp, 1), mesh.cp)
        assert _summary(manifest, [])["mesh"].get("context_parallel_size", 1) == mesh.cp
        for part, whole in (("model", mesh.zero < 3), ("optimizer", mesh.zero == 0)):  # or each rank has its own rows
            files = sorted(path.name for path in (tmp_path / str(number)).glob(f"{part}-*"))
            assert len(files) == (mesh.tp if whole else 4), (mesh, files)


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
        resumed = Run("gpt2", Mesh(2, 2), precision, other=True)
        resumed.load(reshared)
        now = resumed.whole()
        assert_same({n: t for n, t in now.items() if "::" in n}, {n: t for n, t in whole.items() if "::" in n}, mesh)


def check_resume(folder: Path, name: str, mesh: Mesh, precision: str) -> None:
    run = Run(name, mesh, precision, dropout=0.1)
    run.steps(0, 2)
    run.save(folder)
    kept = run.whole()
    expected = run.steps(2, 5)
    ended, scale = run.whole(), run.optimizer.loss_scale
    assert scale == {"fp16": 2048.0}.get(precision, 1.0)  # it grew in the third step
    resumed = Run(name, mesh, precision, other=True, dropout=0.1)
    resumed.steps(7, 8)
    resumed.load(folder)
    assert resumed.optimizer.loss_scale == (1024.0 if precision == "fp16" else 1.0)
    assert_same(resumed.whole(), kept, mesh)
    assert resumed.steps(2, 5) == expected
    assert resumed.scheduler.state_dict() == run.scheduler.state_dict()
    assert_same(resumed.whole(), ended, mesh)
    assert resumed.optimizer.loss_scale == scale
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
    kinds = [("fp32", torch.bfloat16), ("bf16", torch.float32)]  # without and with fp32 weights; both models are bf16
    for source, target in (kinds, kinds[::-1]):
        run = Run("gpt2", Mesh(1, 2), source[0], dtype=source[1])
        run.steps(0, 2)
        run.save(tmp_path / source[0])
        due = run.whole()
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
        take_step(optimizer)
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
