"""Model and optimizer through ``torch.distributed.checkpoint``: training goes on on any mesh."""

import functools
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

import autopar
from autopar.checkpoint import load_dtensor_state_dict, to_dtensor_training_state
from autopar.checkpoint.dtensor import _RangesShard, disjoint_ranges, is_even_shard, to_dtensor_state_dict
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError, ConfigError
from autopar.layout import Block, Layout, aligned_shards, even_shards, replicated_shards
from tests.checkpoint.hybrid import groups_of
from tests.checkpoint.tiny import local, make_plan, same, tiny
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2, llama, parallel

MODELS = {  # in float64; transformers computes the loss in float32
    "fused": gpt2,  # 9 heads, fused q | k | v, tied embeddings
    "grouped": lambda seed: llama(seed, num_attention_heads=4, num_key_value_heads=2, hidden_size=32),
    "uneven": lambda seed: llama(seed, num_attention_heads=9, num_key_value_heads=3, hidden_size=36),
}
BEFORE, AFTER = 3, 2


def batch(step: int) -> torch.Tensor:
    return torch.randint(1, 131, (4, 8), generator=torch.Generator().manual_seed(step))


def make_optimizer(model: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=lr, eps=1e-4)


def made(kind: str, tp: int, pp: int = 1, seed: int = 0, lr: float = 0.01, **sections: Any) -> tuple[Any, Any]:
    model = MODELS[kind](seed).double().train()
    return autopar.initialize(model, {"tp": tp, "pp": pp, **sections}, optimizer=make_optimizer(model, lr))


def train(model: Any, optimizer: Any, steps: range, pp: int = 1) -> None:
    for step in steps:
        ids = batch(step)
        if hasattr(model, "mpu"):
            ids = ids.chunk(model.mpu.dp.size)[model.mpu.dp.rank]
        if pp > 1:
            model.execute_pipeline({"input_ids": ids, "labels": ids})
        else:
            model(input_ids=ids, labels=ids).loss.backward()
        if hasattr(model, "mpu"):
            autopar.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def uninterrupted(kind: str) -> dict[str, torch.Tensor]:
    plain = MODELS[kind](0).double().train()
    train(plain, make_optimizer(plain), range(BEFORE + AFTER))
    return plain.state_dict()


def save(folder: Path, tp: int) -> None:
    for kind in MODELS:
        model, optimizer = made(kind, tp)
        train(model, optimizer, range(BEFORE))
        dcp.save(to_dtensor_training_state(model, optimizer), checkpoint_id=folder / kind)
        whole = autopar.deparallelize(model).state_dict()
        if dist.get_rank() == 0:
            torch.save(whole, folder / f"{kind}.whole")


def merged(folder: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, folder.with_suffix(".pt"))
    return torch.load(folder.with_suffix(".pt"))


def assert_merges(folder: Path) -> None:
    """And everything is written once."""
    for kind in MODELS:
        found, expected = merged(folder / kind)["model"], torch.load(folder / f"{kind}.whole")
        assert expected.keys() - found.keys() == ({"lm_head.weight"} if kind == "fused" else set())  # tied
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items()), kind
        for name, stored in dcp.FileSystemReader(folder / kind).read_metadata().state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                assert sum(chunk.sizes.numel() for chunk in stored.chunks) == stored.size.numel(), name


def assert_holds(model: Any, whole: dict[str, torch.Tensor]) -> None:
    """Exactly this rank's shards."""
    plan = model._autopar.plan
    for name, parameter in model.named_parameters():
        layout = plan.tensors[plan.canonical(name)].layout
        due = whole[name] if layout is None else layout.shard(whole[name], model.mpu.tp.rank)
        assert torch.equal(parameter, due), name


def load(folder: Path, kinds: tuple[str, ...], tp: int, pp: int = 1, **sections: Any) -> None:
    for kind in kinds:
        model, optimizer = made(kind, tp, pp, seed=1, lr=0.5, **sections)
        objects = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
        dcp.load(to_dtensor_training_state(model, optimizer), checkpoint_id=folder / kind)
        assert objects == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
        assert all(p.requires_grad and not isinstance(p, DTensor) for p in model.parameters())
        assert_holds(model, torch.load(folder / f"{kind}.whole"))
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
        if kind == "uneven":  # its gradients in float32, in another order, are too far away
            continue
        train(model, optimizer, range(BEFORE, BEFORE + AFTER), pp)
        whole, expected = autopar.deparallelize(model).state_dict(), uninterrupted(kind)
        for name, tensor in expected.items():
            close(whole[name], tensor, f"{kind}: {name}", 1e-6)


def load_on_four(folder: Path) -> None:
    load(folder, tuple(MODELS), 4)  # uneven heads; KV heads on two ranks each
    load(folder, ("grouped",), 2, zero={"stage": 1})
    load(folder, ("fused",), 2, 2)  # tied embeddings on two stages


@pytest.mark.tier("all")
def test_training_goes_on_on_any_mesh(tmp_path: Path) -> None:
    two, four = tmp_path / "two", tmp_path / "four"
    pooled(4)(save)(two, 2)
    assert_merges(two)
    pooled(4)(load_on_four)(two)
    pooled(1)(load)(two, ("fused",), 1)
    pooled(3)(load)(two, ("grouped", "uneven"), 3)  # 2 KV heads on 3 ranks
    pooled(4)(save)(four, 4)  # some ranks hold the same heads
    assert_merges(four)
    pooled(2)(load)(four, ("uneven",), 2)


@pytest.mark.parametrize("stages", [1, 2], ids=["tp", "pp"])
@pooled(world_size=2)
def test_full_state_dicts_of_torch_are_refused(stages: int) -> None:
    model = autopar.initialize(llama(), {"tp": 2 // stages, "pp": stages})
    optimizer = torch.optim.AdamW(model.parameters())
    for option in ({"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}):
        options = StateDictOptions(**option)
        for call, *given in (
            (get_model_state_dict, model),
            (get_model_state_dict, model.model),
            (get_optimizer_state_dict, model, optimizer),
            (get_state_dict, model, optimizer),
            (set_optimizer_state_dict, model, optimizer, {}),
            (functools.partial(set_state_dict, model_state_dict={}, optim_state_dict={}), model, optimizer),
        ):
            axis = "pipeline" if stages == 2 else "tensor-parallel"
            with pytest.raises(ConfigError, match=rf"full_state_dict=True(?s:.*){axis} rank [01] of 2"):
                call(*given, options=options)
        values = llama(seed=5).state_dict() if model.mpu.rank == 0 or len(option) == 1 else {}
        set_model_state_dict(model, values, options=options)  # each rank takes its own
        expected = autopar.initialize(llama(seed=5), {"tp": 2 // stages, "pp": stages})
        assert all(torch.equal(*two) for two in zip(model.parameters(), expected.parameters(), strict=True))


@pooled(world_size=2)
def test_what_the_entries_are_and_torchs_own_reader_warns(tmp_path: Path) -> None:
    model, optimizer = made("fused", 2)
    train(model, optimizer, range(1))
    with pytest.warns(autopar.ShardWarning, match=r"get_optimizer_state_dict(?s:.*)to_dtensor_training_state"):
        mine = get_optimizer_state_dict(model, optimizer)  # bare shards, which dcp.save would take for the same
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_optimizer_state_dict(model, optimizer)  # once a model
        set_optimizer_state_dict(model, optimizer, mine)  # this rank's own
    model, optimizer = made("grouped", 2)
    assert not optimizer.state
    entries = to_dtensor_training_state(model, optimizer)["optim"]
    name = "model.layers.0.mlp.down_proj.weight"
    moment = entries[f"state.{name}.exp_avg"]
    assert isinstance(moment, DTensor) and moment.shape == (32, 37) and not moment.to_local().any()
    assert entries[f"state.{name}.step"].item() == 0 and entries[f"param_groups.{name}.betas"] == (0.9, 0.999)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        assert set(entries) == set(get_optimizer_state_dict(model, optimizer, options=options))
    train(model, optimizer, range(1))
    fresh, stepped = made("grouped", 2)
    train(fresh, stepped, range(1))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), fresh.parameters(), strict=True))
    inside = {"run": to_dtensor_training_state(model, optimizer)}
    dcp.async_save(inside, checkpoint_id=tmp_path / "inside").result()
    for group in optimizer.param_groups:
        group["lr"] = 0.7
    inside = {"run": to_dtensor_training_state(model, optimizer)}
    dcp.load(inside, checkpoint_id=tmp_path / "inside")
    load_dtensor_state_dict(model, optimizer, inside["run"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]


@pooled(world_size=2)
def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    def refused(text: str, model: Any, optimizer: Any) -> None:
        with pytest.raises(CheckpointError, match=text):
            to_dtensor_training_state(model, optimizer)

    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2}})
    refused(
        "has state 'row_var' of transformer(?s:.*)Statistics of a shard",
        model,
        torch.optim.Adafactor(model.parameters()),
    )
    refused("is not a parameter of this", model, make_optimizer(gpt2()))
    refused("must be a torch.optim.Optimizer", model, None)
    half = autopar.initialize(
        other := gpt2(),
        {"model_parallelism": {"tensor_parallel_size": 2}, "precision": {"dtype": "bf16"}},
        optimizer=make_optimizer(other),
    )
    refused("precision.dtype bf16 or fp16(?s:.*)save_parallelized", *half)
    full = autopar.initialize(other := gpt2(), {"zero": {"stage": 3}}, optimizer=make_optimizer(other))
    refused("is a DTensor", *full)
    state = to_dtensor_training_state(model, optimizer := make_optimizer(model))
    state["optim"]["param_groups.transformer.wpe.weight.lr"] = 0.3
    with pytest.raises(CheckpointError, match=r"one group of this optimizer(?s:.*)lr is 0.01 and 0.3"):
        load_dtensor_state_dict(model, optimizer, state)


def plain_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By canonical name: what is tied is there once."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


@pooled(world_size=2)
def test_what_is_cut_as_torch_cuts_is_an_ordinary_dtensor_and_another_cut_does_not_compute():
    whole = plain_state(MODELS["uneven"](0))
    state = to_dtensor_state_dict(parallel(MODELS["uneven"](0), 2))
    assert list(state) == list(whole)
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor) and tensor.shape == whole[name].shape, name
        assert tensor.stride() == whole[name].stride() and tensor.dtype == whole[name].dtype
        assert tensor.device_mesh.mesh_dim_names == ("tp",) and not tensor.requires_grad
        ranges = any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_"))
        assert isinstance(tensor._local_tensor, _RangesShard) == ranges
        if not ranges:
            assert torch.equal(tensor.full_tensor(), whole[name]), name
    assert state["model.norm.weight"].placements == (Replicate(),)
    assert state["model.embed_tokens.weight"].placements == (Shard(0),)
    assert state["model.layers.0.mlp.down_proj.weight"].placements == (Shard(1),)
    for dtype in (torch.float32, torch.bfloat16):
        state = to_dtensor_state_dict(parallel(gpt2().to(dtype), 2))
        fused = state["transformer.h.0.attn.c_attn.weight"]
        assert fused.dtype == dtype
        for compute in (fused.full_tensor, lambda: fused + 1, lambda: fused.redistribute(placements=[Replicate()])):  # noqa: B023
            with pytest.raises(CheckpointError, match=r"only saves and loads with torch\.distributed\.checkpoint"):
                compute()


@pooled(world_size=2)
def test_names_of_tied_tensors_and_what_does_not_fit(tmp_path):
    model = parallel(gpt2(), 2)
    state, named = to_dtensor_state_dict(model), to_dtensor_state_dict(model, aliases=True)
    assert "lm_head.weight" not in state and set(named) == set(model.state_dict())
    assert named["lm_head.weight"] is named["transformer.wte.weight"]
    dcp.save(named, checkpoint_id=tmp_path / "both")
    if dist.get_rank() == 0:
        plain = gpt2(seed=1)
        plain.load_state_dict(merged(tmp_path / "both"))
        assert same(local(plain), local(gpt2()))
    other = parallel(gpt2(n_layer=3), 2)
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: transformer\.h\.2"):
        dcp.load(to_dtensor_state_dict(other), checkpoint_id=tmp_path / "both")
    with pytest.raises(CheckpointError, match="not parallelized"):
        to_dtensor_state_dict(gpt2())
    del model.transformer.wpe
    with pytest.raises(CheckpointError, match=r"gone: transformer\.wpe\.weight"):
        to_dtensor_state_dict(model)


@pytest.mark.tier("test")
@pooled(world_size=3)
def test_every_kind_of_tensor(tmp_path):
    mpu = MPU(tensor_parallel_size=3)  # heads on two ranks, KV heads on several, half precision, booleans, 0-d
    dcp.save(to_dtensor_state_dict(tiny(mpu)), checkpoint_id=tmp_path / "tiny")
    other = tiny(mpu, seed=1)
    dcp.load(to_dtensor_state_dict(other), checkpoint_id=tmp_path / "tiny")
    assert same(local(other), local(tiny(mpu)) | {"scratch": other.scratch})


def test_ranges_of_any_two_ranks_are_equal_or_disjoint():
    for kv, tp in [(1, 4), (2, 3), (2, 4), (3, 4), (2, 8)]:
        kv_shares = replicated_shards(kv, tp)
        heads = Block("heads", 2 * kv, 4, aligned_shards(2 * kv, kv, kv_shares))
        layout = Layout.of(0, [heads, *[Block("kv_heads", kv, 4, kv_shares)] * 2])
        pieces = [disjoint_ranges(layout, rank) for rank in range(tp)]
        every = {piece for held in pieces for piece in held}
        covered = sorted(every)
        assert covered[0][0] == 0 and covered[-1][1] == layout.size
        assert all(a[1] == b[0] for a, b in itertools.pairwise(covered)), (kv, tp)
        for rank in range(tp):  # nothing is lost or moved
            flat = [i for a, b in pieces[rank] for i in range(a, b)]
            assert flat == [i for a, b in layout.ranges(rank) for i in range(a, b)]


def test_when_the_cut_is_torchs_own():
    for count in (1, 2, 3, 7, 10, 131):
        for tp in (1, 2, 3, 4, 8):
            layout = Layout.of(0, [Block("vocab", count, 1, even_shards(count, tp))])
            chunks = [tuple(chunk.tolist()) for chunk in torch.arange(count).chunk(tp)]
            chunks += [()] * (tp - len(chunks))
            held = [tuple(i for a, b in layout.ranges(rank) for i in range(a, b)) for rank in range(tp)]
            assert is_even_shard(layout) == (chunks == held), (count, tp)
    assert not is_even_shard(make_plan(2).tensors["qkv.weight"].layout)
