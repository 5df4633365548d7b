"""A checkpoint of any mesh loads on any other, weights and optimizer moments bit for bit; each rank reads its share."""

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from autopar.checkpoint import Manifest, merge_checkpoint
from autopar.checkpoint.offline import reshard_checkpoint
from autopar.checkpoint.shards import ShardReader
from autopar.storage.files import RangeFile
from tests.checkpoint.tiny import moment, with_moments
from tests.exchange import everyones
from tests.harness.worlds import pooled
from tests.parity import randomise
from tests.small import gpt2, llama, parallel

MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 1)]
SMALL: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 37,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


def llama_two_kv_heads() -> Any:
    """At tp 3 and 4 several ranks hold the same KV head."""
    return llama(num_key_value_heads=2)


def llama_nine_heads() -> Any:
    """As SmolLM2-135M: 9 heads on 3 KV heads, uneven at tp 2."""
    return llama(hidden_size=36, num_attention_heads=9, num_key_value_heads=3)


def phi3() -> Any:
    """``q | k | v`` of unequal widths in one weight, and ``gate | up``."""
    torch.manual_seed(0)
    return randomise(Phi3ForCausalLM(Phi3Config(**SMALL)))


def bert() -> Any:
    torch.manual_seed(0)
    settings = {**SMALL, "num_attention_heads": 4}
    del settings["num_key_value_heads"]
    return randomise(BertForMaskedLM(BertConfig(**settings)))


def mixtral() -> Any:
    """Stacked experts, which ``save_pretrained`` writes one by one."""
    torch.manual_seed(0)
    return randomise(MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)))


MODELS = [gpt2, llama_two_kv_heads, llama_nine_heads, phi3, bert, mixtral]


def check(folder: Path, build: Callable[[], Any], tps: tuple[int, ...]) -> None:
    """Save in ``tps[0]``, write all meshes, load each in all of ``tps``; the plain model is the oracle."""
    weights = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    source = parallel(build(), tps[0])
    source.save_parallelized(folder / "ckpt", optimizer=with_moments(source))
    if dist.get_rank() == 0:
        for tp, pp in MESHES:
            reshard_checkpoint(folder / "ckpt", folder / f"{tp}-{pp}", tp=tp, pp=pp)
        build().save_pretrained(folder / "plain")
    dist.barrier()
    cut = 0
    for tp in tps:
        model = parallel(build(), tp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        for name in ["ckpt", *(f"{tp}-{pp}" for tp, pp in MESHES)]:
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.zero_()
            optimizer.state.clear()
            assert model.from_parallelized(folder / name, optimizer=optimizer) is model
            cut += compare(model, optimizer, weights, f"{name} at tp {tp}")
        model.save_parallelized(folder / f"again-{tp}", optimizer=optimizer)
        if dist.get_rank() == 0:
            compare_files(folder / f"again-{tp}", weights)
            merge_checkpoint(folder / f"again-{tp}", folder / "merged", force=True)
            one, two = (folder / name / "model.safetensors" for name in ("merged", "plain"))
            assert one.read_bytes() == two.read_bytes()
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


def compare_files(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    with ShardReader(folder, ("model", "optimizer")) as shards:
        for name, entry in shards.manifest.tensors.items():
            assert torch.equal(shards.lazy(name).read(), weights[name]), name
            if name in shards.manifest.parameters:
                for key in ("exp_avg", "exp_avg_sq"):
                    due = moment(name, key, 0, entry)
                    assert torch.equal(shards.lazy(f"{name}::{key}", "optimizer").read(), due), f"{key} of {name}"


@pytest.mark.tier("test", only=("phi3",))
@pytest.mark.parametrize("build", MODELS)
@pooled(world_size=4)
def test_every_mesh_to_tp_1_2_and_4(tmp_path, build):
    check(tmp_path, build, (1, 2, 4))


@contextmanager
def counted_bytes():
    """Counts what this process reads from the files of checkpoints."""
    counts: dict[str, int] = {}
    read_runs = RangeFile.read_runs

    def counting(self: RangeFile, target: memoryview, places: Iterable[tuple[int, int]], length: int) -> None:
        places = list(places)
        counts[self.path.name] = counts.get(self.path.name, 0) + len(places) * length
        read_runs(self, target, places, length)

    RangeFile.read_runs = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        RangeFile.read_runs = read_runs  # type: ignore[method-assign]


def headers(folder: Path) -> int:
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))


@pooled(world_size=4)
def test_a_rank_reads_its_share_and_verification_reads_everything_once(tmp_path):
    def build() -> Any:
        return llama(
            num_hidden_layers=1, hidden_size=768, num_attention_heads=6, num_key_value_heads=2, intermediate_size=512
        )

    source = parallel(build(), 2)
    source.save_parallelized(tmp_path / "2-1", optimizer=with_moments(source))
    if dist.get_rank() == 0:
        for tp, pp in ((1, 1), (4, 1), (3, 2)):
            reshard_checkpoint(tmp_path / "2-1", tmp_path / f"{tp}-{pp}", tp=tp, pp=pp)
    dist.barrier()
    for tp in (1, 2, 4):
        model = parallel(build(), tp)
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
@pytest.mark.parametrize("build", MODELS)
@pooled(world_size=3)
def test_every_mesh_to_tp_3(tmp_path, build):
    check(tmp_path, build, (3,))
