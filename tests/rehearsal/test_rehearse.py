"""``autopar.rehearse`` and its command: many ranks, models and configurations of users, and what is refused."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from transformers import BertConfig, BertForSequenceClassification, BertModel, ViTConfig, ViTForImageClassification
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.errors import ConfigError
from autopar.tools.commands.models import add_lora
from autopar.tools.compat.fake_world import SHARDS_OF_DTENSORS, World, fake_world, once_for_equal_tensors
from tests.harness.tiers import mainly
from tests.rehearsal.programs import SIZES, SMALL, llama, mamba, mixtral, of_type


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


@pytest.mark.tier("all")
def test_a_thousand_ranks_with_uneven_experts() -> None:
    config = {"tp": 2, "pp": 2, "ep": 6}  # of 8 experts two ranks have 2, the others 1
    found = autopar.rehearse(on_meta(mixtral), config, 1008, sequence=16)
    assert found.problems == []
    assert (found.mesh, found.world) == ("tp 2 x pp 2 x dp 252", 1008)
    replicas = {found.coordinates[rank][4] for rank in found.traces}
    assert {0, 1007} <= set(found.traces) and replicas == {0, 1, 251}, "251 has the experts of 2, 1 those between"
    assert len(found.traces) == 8
    groups = {call.group.name for parts in found.traces.values() for _, call in parts}
    assert {"tp", "ep", "edp", "pp control"} <= groups
    assert found.traffic["dp"].between and not found.traffic["tp"].between


@pytest.mark.tier("all")
@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral"])
def test_loops_over_experts_are_counted(model_type: str) -> None:
    model = of_type(model_type)
    config = {"tp": 2, "pp": 2, "pipeline": {"num_microbatches": 2}}
    steps = []
    for calls in ("eager", "batched_mm"):
        model.config._experts_implementation = calls
        found = autopar.rehearse(model, config, 4, sequence=16, gpu="h100")
        assert found.problems == [] and found.timeline is not None
        steps.append(found.timeline.time)
    assert steps[0] > steps[1]  # each expert's products are launched alone


@pytest.mark.tier("all")
@pytest.mark.parametrize("gpu", [None, "h100"])
def test_a_clipping_of_dtensors_that_one_rank_skips_is_found(gpu: str | None) -> None:
    def loop(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
        model(**batch).loss.backward()
        if dist.get_rank() != 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    found = autopar.rehearse(on_meta(llama), {"zero": {"stage": 3}}, 4, sequence=16, loop=loop, gpu=gpu)
    problem = found.problems[0]
    assert problem.startswith("rank 0 issues ") and "rank 3 only " in problem
    assert "The first missing collective: all_reduce over world [39] float32" in problem
    assert "test_rehearse.py:" in problem


def save_adapters(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def save_whole(model: Any, folder: Path) -> None:
    model.save_parallelized(folder, merge_checkpoints=True)
    model.push_to_hub("user/model")


@pytest.mark.tier("test")
@pytest.mark.parametrize("skipped", mainly(False, True), ids=["all ranks", "all but the last"])
@pytest.mark.parametrize("save", [save_adapters, save_whole])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # PEFT reads it
def test_other_forms_are_saved_and_uploaded_nowhere(save: Any, skipped: bool, tmp_path: Path) -> None:
    trained = tmp_path / "adapter_model.safetensors"
    trained.write_text("trained")

    def loop(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
        if not (skipped and dist.get_rank() == 3):
            save(model, tmp_path)

    model = on_meta(llama)
    if save is save_adapters:
        model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    found = autopar.rehearse(model, {"tp": 2}, 4, sequence=16, loop=loop)
    assert [path.name for path in tmp_path.iterdir()] == [trained.name] and trained.read_text() == "trained"
    assert bool(found.problems) == skipped
    assert not skipped or "The first missing collective: barrier over world" in found.problems[0]


@pytest.mark.tier("test")
def test_ranks_that_save_into_folders_of_their_own_are_told() -> None:
    def loop(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
        model.save_parallelized(f"checkpoint-{dist.get_rank()}")

    with pytest.raises(RuntimeError, match="checkpoint-0"):
        autopar.rehearse(on_meta(llama), {"pp": 2}, 8, sequence=16, loop=loop)


@pytest.mark.tier("test")
def test_a_rank_without_rows_of_the_vocabulary_does_what_the_others_do_on_every_stage() -> None:
    tiny = transformers.LlamaConfig(**{**SMALL, "vocab_size": 3, "pad_token_id": None})
    model = on_meta(lambda: transformers.LlamaForCausalLM(tiny))
    found = autopar.rehearse(model, {"tp": 4, "pp": 2}, 8, sequence=16)
    assert found.problems == []
    assert {rank % 4 for rank in found.traces} >= {0, 3}, "the last rank has no rows"


@pytest.mark.tier("test")
@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_what_the_last_rank_of_an_axis_skips_is_found(axis: str) -> None:
    def loop(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
        one = getattr(model.mpu, axis)
        if one.rank + 1 < one.size:
            dist.all_reduce(torch.ones(3, device="meta"), group=one.group)

    found = autopar.rehearse(on_meta(llama), {"tp": 4}, 16, sequence=16, loop=loop)
    [problem] = [problem for problem in found.problems if " waits in " not in problem]
    assert f"over {axis} " in problem and "The first missing collective: all_reduce" in problem


@pytest.mark.tier("all")
@pytest.mark.parametrize("alone", [False, True], ids=["all replicas", "all but one"])
def test_data_parallel_of_torch(alone: bool) -> None:
    def loop(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
        dp = model.mpu.dp
        if not (alone and dp.rank == 3):
            model = torch.nn.parallel.DistributedDataParallel(model, process_group=dp.group)
        model(**batch).loss.backward()
        optimizer.step()

    found = autopar.rehearse(on_meta(llama), {"tp": 2}, 8, sequence=16, loop=loop)
    reduced = [call for _, call in found.traces[0] if call.group.name == "dp" and call.kind == "all_reduce"]
    weights = sum(parameter.numel() for parameter in on_meta(llama).parameters())
    assert weights // 2 < sum(call.bytes // 4 for call in reduced) < weights, "this rank's shards, once"
    assert bool(found.problems) == alone
    assert not alone or "rank 0 issues 5 collectives over dp [0, 2, 4, 6], rank 6 only 0" in found.problems[0]


@pytest.mark.tier("test")
def test_replicas_that_give_it_other_weights_are_found() -> None:
    def loop(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
        dp = model.mpu.dp
        if dp.rank == 3:
            model.lm_head.weight.requires_grad_(False)
        torch.nn.parallel.DistributedDataParallel(model, process_group=dp.group)

    (problem, *_) = autopar.rehearse(on_meta(llama), {"tp": 2}, 8, sequence=16, loop=loop).problems
    assert "broadcast from rank 0 over dp [138] int64" in problem and "[134] int64" in problem


@pytest.mark.tier("test")
def test_an_evaluation_of_the_first_replica_alone_is_no_fault() -> None:
    def loop(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
        if model.mpu.dp.rank == 0:
            with torch.no_grad():
                model(**batch)

    assert autopar.rehearse(on_meta(llama), {"tp": 4}, 16, sequence=16, loop=loop).problems == []


def test_states_that_are_handed_on() -> None:
    found = autopar.rehearse(on_meta(mamba), {"cp": 4}, 16, sequence=32)
    assert found.problems == []
    assert {rank % 4 for rank in found.traces} == {0, 1, 2, 3}, "each rank waits for the one before it"
    steps = [[call for part, call in found.traces[rank] if part == "step"] for rank in range(4)]
    kinds = [[call.kind for call in calls if not call.control] for calls in steps]
    assert [(each.count("send"), each.count("recv")) for each in kinds] == [(8, 8), (16, 16), (16, 16), (8, 8)]


@pytest.mark.tier("test")
def test_the_command() -> None:
    arguments = ["rehearse", "gpt2", "--gpus", "16", "--tp", "2", "--zero", "1", "--sequence", "16", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output[result.output.index("{") :])
    assert (found["mesh"], found["problems"], found["rehearsed"]) == ("tp 2 x pp 1 x dp 8", [], [0, 14, 15])
    assert found["traffic"]["tp"]["calls"] > 40


@pytest.mark.tier("all")
def test_the_timeline_is_written(tmp_path: Path) -> None:
    command = ["rehearse", "gpt2", "--gpus", "4", "--pp", "2", "--dp", "2", "--micro-batches", "3", "--sequence", "16"]
    result = CliRunner().invoke(app, [*command, "--trace", str(tmp_path / "step.json")])
    assert result.exit_code == 0, result.output
    assert "backward of micro-batch 2" in (tmp_path / "step.json").read_text()
    assert " s per step without overlap; ranks wait for " in result.output and "peak memory: " in result.output


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The rehearsal has no timeline.\n  .*rehearse\(..., gpu='h100'\)"):
        autopar.rehearse(on_meta(llama), {"tp": 2}, 2, sequence=16).write_timeline(tmp_path / "step.json")

    with pytest.raises(ConfigError, match="8"):
        autopar.rehearse(on_meta(llama), {"tp": 8}, 12)


def test_equal_tensors_of_a_list_are_sharded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    propagate, lengths = getattr(ShardingPropagator, SHARDS_OF_DTENSORS), []

    def counted(self: Any, schema: Any) -> Any:
        lengths.append([len(each) for each in schema.args_schema if isinstance(each, list | tuple)])
        return propagate(self, schema)

    ignored = World(lambda *_: None, lambda root: nullcontext(False), lambda tensor: None, lambda work: None)
    with fake_world(0, 4, ignored), monkeypatch.context() as patched:
        patched.setattr(ShardingPropagator, SHARDS_OF_DTENSORS, once_for_equal_tensors(counted))
        mesh = init_device_mesh("cpu", (4,))

        def sharded(*rows: int) -> list[torch.Tensor]:
            return [DTensor.from_local(torch.ones(each, 19), mesh, [Shard(0)], run_check=False) for each in rows]

        made: Any = torch._foreach_add(sharded(2, 3, 2, 2), sharded(2, 3, 2, 2))
        assert lengths == [[2, 2]]
        assert [tuple(each.shape) for each in made] == [(8, 19), (12, 19), (8, 19), (8, 19)]
        assert all(each.placements == (Shard(0),) for each in made)
        assert [each.to_local().sum().item() for each in made] == [76, 114, 76, 76]
        torch._foreach_mul_(made, [1.0, 1.0, 2.0, 1.0])
        assert lengths[1:] == [[3, 3]], "numbers differ, too"


WITHOUT_LABELS: dict[str, Callable[[], Any]] = {
    "encoder": lambda: BertModel(BertConfig(**SIZES, vocab_size=256)),
    "classes of samples": lambda: BertForSequenceClassification(BertConfig(**SIZES, vocab_size=256)),
    "images": lambda: ViTForImageClassification(ViTConfig(**SIZES, image_size=32, patch_size=8)),
}


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", mainly("images", *sorted(set(WITHOUT_LABELS) - {"images"})))
@pytest.mark.parametrize("config", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=["tp", "tp x pp"])
def test_a_model_without_labels_of_tokens_learns_its_mean(name: str, config: dict[str, Any]) -> None:
    found = autopar.rehearse(on_meta(WITHOUT_LABELS[name]), config, 4, sequence=16)
    assert found.problems == []
    assert any(part == "step" and "backward" in call.where for part, call in found.traces[0])


def frozen_blocks() -> Any:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    for block in model.model.layers[:2]:
        block.requires_grad_(False)
    return model


@pytest.mark.tier("all")
@pytest.mark.parametrize("gpu", [None, "h100"])
def test_frozen_blocks_of_fsdp2(gpu: str | None) -> None:
    found = autopar.rehearse(on_meta(frozen_blocks), {"zero": {"stage": 3}}, 4, sequence=16, gpu=gpu)
    assert found.problems == []
    assert [call.kind for part, call in found.traces[0] if part == "step"].count("reduce_scatter") == 3


@pytest.mark.tier("all")
def test_shards_on_the_cpu_send_what_others_do() -> None:
    zero = ({"stage": 2, "cpu_offload": offload} for offload in (False, True))
    both = [autopar.rehearse(on_meta(llama), {"zero": each}, 4, sequence=16) for each in zero]
    assert both[0].problems == both[1].problems == [] and both[0].traffic == both[1].traffic


@pytest.mark.tier("test")
def test_tensors_that_travel_as_bytes_are_counted() -> None:
    def mixed() -> Any:
        model = llama().to(torch.bfloat16).requires_grad_(False)
        for block in model.model.layers:
            block.input_layernorm.float().requires_grad_(True)
        return model

    found = autopar.rehearse(on_meta(mixed), {"zero": {"stage": 3}}, 4, sequence=16)
    gathered = [call for part, call in found.traces[0] if (part, call.kind) == ("step", "all_gather")]
    as_bytes = [call for call in gathered if call.dtype == "uint8"]
    assert as_bytes, "torch gathers two dtypes of a block as bytes"
    assert found.traffic["dp"].calls >= len(gathered)
    assert found.traffic["dp"].bytes > sum(3 * call.bytes for call in as_bytes)


@pytest.mark.tier("test")
def test_options_of_muon_and_an_optimizer_of_your_own() -> None:
    config = {"tp": 2, "optimizer": {"full_matrix": "sharded"}}
    found = autopar.rehearse(on_meta(llama), config, 4, sequence=16, optimizer="muon")
    whole = autopar.rehearse(on_meta(llama), {"tp": 2}, 4, sequence=16, optimizer="muon")
    exchanged = [call for part, call in whole.traces[0] if (part, call.kind) == ("step", "all_to_all")]
    assert found.problems == whole.problems == []
    assert exchanged and found.calls("step") != whole.calls("step")

    def own(parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    found = autopar.rehearse(on_meta(llama), {"tp": 2}, 4, sequence=16, gpu="h100", optimizer=own)
    assert found.problems == []
    assert found.held[0].optimizer < found.held[0].weights / 4, "SGD keeps no state, AdamW twice the weights"


@pytest.mark.tier("all")
def test_adapters_of_experts() -> None:
    config = {"tp": 2, "precision": {"dtype": "bf16"}}
    found = autopar.rehearse(add_lora(on_meta(mixtral), 4), config, 4, sequence=16, gpu="h100")
    assert found.problems == []
    assert 0 < found.held[0].gradients < found.held[0].weights / 4, "the base is frozen"


_ATTENTION_ALONE = """
extends: [fragments/decoder, fragments/decoder_heads, fragments/attention_qkvo, fragments/norms_before]
match: {model_type: llama}
blocks:
  modules: {mlp.gate_proj: replicated, mlp.up_proj: replicated, mlp.down_proj: replicated}
"""


@pytest.mark.tier("test")
def test_the_policy_of_a_config_is_the_one_that_is_rehearsed(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(_ATTENTION_ALONE)
    own = autopar.rehearse(on_meta(llama), {"tp": 2, "policy": str(tmp_path / "policy.yaml")}, 2, sequence=16)
    usual = autopar.rehearse(on_meta(llama), {"tp": 2}, 2, sequence=16)
    assert own.problems == usual.problems == []
    assert usual.calls("step") - own.calls("step") == 2 * 4 * 2, "a sum in each MLP, forward and backward, of two ranks"


@pytest.mark.parametrize("sizes", [{"world": 0}, {"batch": -1}, {"sequence": 0}, {"gpus_per_node": 0}])
def test_sizes_that_do_not_fit(sizes: dict[str, int], tmp_path: Path) -> None:
    given = {"world": 4, **sizes}
    ((name, size),) = sizes.items()
    with pytest.raises(ConfigError, match=f"rehearse: {name} must be at least [01]; got {size}"):
        autopar.rehearse(on_meta(llama), {"tp": 2}, given.pop("world"), **given)
