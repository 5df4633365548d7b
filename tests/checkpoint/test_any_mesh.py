"""A checkpoint of any mesh loads on any other, weights and optimizer moments bit for bit; each rank reads its share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import autopar
from autopar.checkpoint import Manifest, merge_checkpoint
from autopar.checkpoint.offline import reshard_checkpoint
from autopar.checkpoint.random_states import choose
from tests.checkpoint.loading import counted_bytes
from tests.checkpoint.tiny import assert_same_files, moment, stored_is, with_moments
from tests.exchange import everyones
from tests.harness.worlds import pooled
from tests.pipeline_parallel.deep import deep
from tests.random_models import build as build_type, cases
from tests.small import gpt2, llama, parallel

MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 1)]


def generating() -> Any:
    model = gpt2()
    model.generation_config.update(do_sample=True, temperature=0.7)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "generating": generating,
    "llama_two_kv_heads": lambda: llama(num_key_value_heads=2),  # at tp 3 and 4 several ranks hold the same KV head
    "llama_nine_heads": lambda: llama(hidden_size=36, num_attention_heads=9, num_key_value_heads=3),  # uneven at tp 2
    "phi3": lambda: build_type(cases("phi3")[0], 6, 2),  # q | k | v of unequal widths in one weight, and gate | up
    "bert": lambda: deep("bert", 2),
    "mixtral": lambda: deep("mixtral", 2),  # stacked experts, which save_pretrained writes one by one
    "half": lambda: llama().to(torch.bfloat16),
    "nomic_bert": lambda: build_type(cases("nomic_bert")[0], 6, 3),  # save_pretrained joins query, key and value
}
CONVERTED = ["mixtral", "nomic_bert"]  # whose files, if there are several, need not hold the same tensors each


def check(folder: Path, name: str, tps: tuple[int, ...]) -> None:
    """Save in ``tps[0]``, write all meshes, load each in all of ``tps``; the plain model is the oracle.

    Merged folders, made by the ranks and made offline, are byte for byte what ``save_pretrained`` writes.
    """
    build = MODELS[name]
    weights = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    source = parallel(build(), tps[0])
    config = dict(vars(source.config))
    source.save_parallelized(folder / "ckpt", optimizer=with_moments(source))
    source.save_parallelized(folder / "merged", merge_checkpoints=True)
    source.save_parallelized(folder / "merged split", merge_checkpoints=True, max_shard_size=6000)
    assert dict(vars(source.config)) == config, "saving must not touch the user's config"
    if dist.get_rank() == 0:
        for tp, pp in MESHES:
            reshard_checkpoint(folder / "ckpt", folder / f"{tp}-{pp}", tp=tp, pp=pp)
        build().save_pretrained(folder / "plain")
        build().save_pretrained(folder / "split", max_shard_size=6000)
        assert_same_files(folder / "merged", folder / "plain")
        if name not in CONVERTED:
            assert_same_files(folder / "merged split", folder / "split")
    dist.barrier()
    cut = 0
    for tp in tps:
        model = parallel(build(), tp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        for saved in ["ckpt", *(f"{tp}-{pp}" for tp, pp in MESHES)]:
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.zero_()
            optimizer.state.clear()
            assert model.from_parallelized(folder / saved, optimizer=optimizer) is model
            cut += compare(model, optimizer, weights, f"{saved} at tp {tp}")
        model.save_parallelized(folder / f"again-{tp}", optimizer=optimizer)
        if dist.get_rank() == 0:
            stored_is(folder / f"again-{tp}", weights)
            merge_checkpoint(folder / f"again-{tp}", folder / "offline", force=True)
            assert_same_files(folder / "offline", folder / "plain")
        dist.barrier()
    assert cut > 0 or tps == (1,)


def compare(model: Any, optimizer: Any, weights: dict[str, torch.Tensor], where: str) -> int:
    """Returns how many parameters are cut."""
    plan, tp, cut = model._autopar.plan, model.mpu.tp.rank, 0
    for name, tensor in model.state_dict().items():
        layout = plan.tensors[plan.canonical(name)].layout
        due = weights[name] if layout is None else layout.shard(weights[name], tp)
        assert torch.equal(tensor, due), f"{name}, {where}"
    for name, parameter in model.named_parameters():
        due, state = plan.tensors[plan.canonical(name)], optimizer.state[parameter]
        cut += due.layout is not None and due.layout.axis_size > 1
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"] and state["step"] == 3.0
        for key in ("exp_avg", "exp_avg_sq"):
            whole = moment(due.name, key, 0, due)
            whole = whole if due.layout is None else due.layout.shard(whole, tp)
            assert torch.equal(state[key], whole), f"{key} of {name}, {where}"
    assert optimizer.param_groups[0]["lr"] == 0.25
    return cut


@pytest.mark.tier("test", only=("phi3",))
@pytest.mark.parametrize("name", MODELS)
@pooled(world_size=4)
def test_every_mesh_to_tp_1_2_and_4(tmp_path, name):
    check(tmp_path, name, (1, 2, 4))


def headers(folder: Path) -> int:
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))


@pooled(world_size=4)
def test_a_rank_reads_its_share_and_verification_reads_everything_once(tmp_path):
    sizes = {"num_hidden_layers": 1, "hidden_size": 768, "intermediate_size": 512, "num_key_value_heads": 2}
    source = parallel(llama(**sizes), 2)
    source.save_parallelized(tmp_path / "2-1", optimizer=with_moments(source))
    if dist.get_rank() == 0:
        for tp, pp in ((1, 1), (4, 1), (3, 2)):
            reshard_checkpoint(tmp_path / "2-1", tmp_path / f"{tp}-{pp}", tp=tp, pp=pp)
    dist.barrier()
    for tp in (1, 2, 4):
        model = parallel(llama(**sizes), tp)
        optimizer = torch.optim.AdamW(model.parameters())
        bytes_of = {p: p.numel() * 4 for p in model.parameters()}
        counters = 4 * len(bytes_of)
        assert tp == 1 or sum(bytes_of.values()) < 0.75 * Manifest.read(tmp_path / "2-1").total_parameters() * 4
        for name in ("1-1", "2-1", "4-1", "3-2"):
            for chosen, due in ((None, sum(bytes_of.values())), (optimizer, 3 * sum(bytes_of.values()) + counters)):
                with counted_bytes() as counts:
                    model.from_parallelized(tmp_path / name, optimizer=chosen, verify=False)
                assert due <= sum(counts.values()) <= 1.02 * due + headers(tmp_path / name), f"{name} at tp {tp}"
                if chosen is None:
                    assert not any(file.startswith("optimizer") for file in counts)
            with counted_bytes() as counts:
                model.from_parallelized(tmp_path / name)
            more = everyones(sum(counts.values()) - sum(bytes_of.values()))
            stored = sum(path.stat().st_size for path in (tmp_path / name).glob("model-*")) - headers(tmp_path / name)
            assert stored * 0.99 <= sum(more) <= stored * 1.02 + 5 * headers(tmp_path / name)


@pytest.mark.tier("test", only=("llama_nine_heads",))
@pytest.mark.parametrize("name", [*MODELS][::-1])
@pooled(world_size=3)
def test_every_mesh_to_tp_3(tmp_path, name):
    check(tmp_path, name, (3,))


def test_random_states_of_context_ranks() -> None:
    def entry(dp: int, state: str, **more: int) -> dict[str, object]:
        return {"tp": 0, "pp": 0, "dp": dp, "cp": 0, "state": state, **more}

    new = [entry(0, "a", cp=0), entry(0, "a1", cp=1), entry(1, "b", cp=0), entry(1, "b1", cp=1)]
    assert [choose(new, 0, 0, dp, cp) for dp in (0, 1) for cp in (0, 1, 2)] == ["a", "a1", "a", "b", "b1", "b"]
    assert choose(new[:2], 0, 0, 1) == "a"  # one replica was there: another one draws like it


@pytest.mark.tier("test")
@pytest.mark.filterwarnings("error")
@pooled(world_size=4)
def test_train_save_merge_and_read_with_plain_transformers(tmp_path):
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model = parallel(model, 2)
    engine = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    ids = torch.randint(131, (2, 8), generator=torch.Generator().manual_seed(model.mpu.dp.rank))
    for _ in range(2):
        engine(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.module.save_parallelized(tmp_path / "ckpt")
    for name, options in {"safe": {}, "split": {"max_shard_size": "9KB"}, "bin": {"format": "bin"},
                          "bins": {"format": "bin", "max_shard_size": "9KB"}}.items():  # fmt: skip
        model.save_parallelized(tmp_path / name, merge_checkpoints=True, **options)
        assert all("module." not in key for key in model.state_dict())
        plain, report = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        ids = ids % 100
        with torch.no_grad():
            expected, actual = model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits
        assert (expected - actual).abs().max() < 1e-5
        assert (actual - gpt2().eval()(input_ids=ids).logits).abs().max() > 0.1, "training must have changed something"
    assert "pytorch_model.bin" in os.listdir(tmp_path / "bin")
    assert "pytorch_model.bin.index.json" in os.listdir(tmp_path / "bins")
    resumed = parallel(gpt2(), 2).from_parallelized(tmp_path / "ckpt").eval()
    with torch.no_grad():
        assert torch.equal(resumed(input_ids=ids).logits, expected)
    dist.barrier()
    whole = autopar.deparallelize(resumed)
    assert all(torch.equal(*two) for two in zip(whole.parameters(), plain.parameters(), strict=True))
    assert not hasattr(whole, "save_parallelized")


class Scored(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language = gpt2()
        self.score = torch.nn.Linear(131, 5)


@pooled(world_size=2)
def test_a_module_around_the_model_merges_into_a_folder_that_from_pretrained_reads(tmp_path):
    plain = Scored()
    model = parallel(Scored(), 2)
    with torch.no_grad():
        model.score.weight.copy_(plain.score.weight)
    model.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, tensor in plain.language.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    outside = load_file(tmp_path / "merged" / "wrapper.safetensors")
    assert sorted(outside) == ["score.bias", "score.weight"]
    assert torch.equal(outside["score.weight"], plain.score.weight)
    model.save_parallelized(tmp_path / "shards")
    with torch.no_grad():
        model.score.weight.zero_()
    model.from_parallelized(tmp_path / "shards")
    assert torch.equal(model.score.weight, plain.score.weight)
