"""``to_dtensor_state_dict`` with ``torch.distributed.checkpoint``: any mesh to any mesh, bit for bit."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.checkpoint.dtensor import _RangesShard, disjoint_ranges, is_even_shard, to_dtensor_state_dict
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.layout import Block, Layout, aligned_shards, even_shards, replicated_shards
from tests.checkpoint.tiny import TinyConfig, TinyModel, make_plan, tiny
from tests.harness.worlds import pooled
from tests.small import gpt2, llama, parallel

MODELS = {
    "fused": gpt2,  # 9 heads, fused q | k | v stored as Conv1D, vocabulary 131
    "grouped": lambda seed: llama(seed, num_attention_heads=4, num_key_value_heads=2, hidden_size=32),
    "uneven": lambda seed: llama(seed, num_attention_heads=9, num_key_value_heads=3, hidden_size=36),
}


def plain_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By canonical name: what is tied is there once."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def assert_holds(model: torch.nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """The parallelized model holds exactly this rank's shards of ``whole``."""
    state = model._autopar_checkpoint
    local = model.state_dict()
    assert set(state.plan.tensors) == set(whole)
    for name, tensor in state.plan.tensors.items():
        due = whole[name] if tensor.layout is None else tensor.layout.shard(whole[name], state.mpu.tp.rank)
        for alias in (name, *tensor.aliases):
            assert torch.equal(local[alias], due), alias


def save(folder: str, tp: int) -> None:
    """In the form of torch.distributed.checkpoint, a body for :func:`pooled` like :func:`load`."""
    for kind, build in MODELS.items():
        dcp.save(to_dtensor_state_dict(parallel(build(0), tp)), checkpoint_id=f"{folder}/{kind}")


def load(folder: str, *sizes: int) -> None:
    for tp, kind in itertools.product(sizes, MODELS):
        model = parallel(MODELS[kind](1), tp)
        objects = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
        dcp.load(to_dtensor_state_dict(model), checkpoint_id=f"{folder}/{kind}")
        assert_holds(model, plain_state(MODELS[kind](0)))
        assert objects == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
        assert all(p.requires_grad and not isinstance(p, DTensor) for p in model.parameters())


def assert_merges(folder) -> None:
    for kind, build in MODELS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(folder / kind, folder / f"{kind}.pt")
        merged = torch.load(folder / f"{kind}.pt")
        assert_same(dict(sorted(merged.items())), dict(sorted(plain_state(build(0)).items())))


@pytest.mark.tier("all")
def test_two_ranks_to_any_number(tmp_path):
    pooled(2)(save)(str(tmp_path), 2)
    assert_merges(tmp_path)
    pooled(1)(load)(str(tmp_path), 1)
    pooled(3)(load)(str(tmp_path), 3)  # grouped: 2 KV heads on 3 ranks
    pooled(4)(load)(str(tmp_path), 4, 2)  # grouped and uneven: KV heads on several ranks; two replicas


@pytest.mark.tier("all")
def test_four_ranks_write_everything_once_and_two_read_it(tmp_path):
    pooled(4)(save)(str(tmp_path), 4)  # some ranks hold the same heads
    assert_merges(tmp_path)
    for kind in MODELS:
        for name, stored in dcp.FileSystemReader(tmp_path / kind).read_metadata().state_dict_metadata.items():
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == stored.size.numel(), name
    pooled(2)(load)(str(tmp_path), 2)


@pooled(world_size=2)
def test_what_is_cut_as_torch_cuts_is_an_ordinary_dtensor(tmp_path):
    whole = plain_state(MODELS["uneven"](0))
    state = to_dtensor_state_dict(parallel(MODELS["uneven"](0), 2))
    assert list(state) == list(whole)
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor) and tensor.shape == whole[name].shape, name
        assert tensor.stride() == whole[name].stride() and tensor.dtype == whole[name].dtype
        assert tensor.device_mesh.mesh_dim_names == ("tp",) and not tensor.requires_grad
        assert isinstance(tensor._local_tensor, _RangesShard) == any(
            x in name for x in ("q_proj", "k_proj", "v_proj", "o_")
        )
        if not isinstance(tensor._local_tensor, _RangesShard):
            assert torch.equal(tensor.full_tensor(), whole[name]), name
    assert state["model.norm.weight"].placements == (Replicate(),)
    assert state["model.embed_tokens.weight"].placements == (Shard(0),)
    assert state["model.layers.0.mlp.down_proj.weight"].placements == (Shard(1),)


@pooled(world_size=2)
def test_computing_with_another_cut_is_an_error_and_no_wrong_result(tmp_path):
    state = to_dtensor_state_dict(parallel(gpt2(), 2))
    fused = state["transformer.h.0.attn.c_attn.weight"]
    for compute in (fused.full_tensor, lambda: fused + 1, lambda: fused.redistribute(placements=[Replicate()])):
        with pytest.raises(CheckpointError, match=r"only saves and loads with torch\.distributed\.checkpoint"):
            compute()
    assert fused.dtype == torch.float32
    half = to_dtensor_state_dict(parallel(gpt2().to(torch.bfloat16), 2))
    assert half["transformer.h.0.attn.c_attn.weight"].dtype == torch.bfloat16


@pooled(world_size=2)
def test_names_of_tied_tensors(tmp_path):
    model = parallel(gpt2(), 2)
    state, named = to_dtensor_state_dict(model), to_dtensor_state_dict(model, aliases=True)
    assert "lm_head.weight" not in state and set(named) == set(model.state_dict())
    assert named["lm_head.weight"] is named["transformer.wte.weight"]
    dcp.save(named, checkpoint_id=tmp_path / "both")
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(tmp_path / "both", tmp_path / "both.pt")
        plain = gpt2(seed=1)
        plain.load_state_dict(torch.load(tmp_path / "both.pt"))
        assert_same(plain_state(plain), plain_state(gpt2()))


@pytest.mark.tier("test")
@pooled(world_size=3)
def test_every_kind_of_tensor(tmp_path):
    mpu = MPU(tensor_parallel_size=3)  # heads on two ranks, KV heads on several, half precision, booleans, 0-d
    dcp.save(to_dtensor_state_dict(tiny(mpu)), checkpoint_id=tmp_path / "tiny")
    other = tiny(mpu, seed=1)
    dcp.load(to_dtensor_state_dict(other), checkpoint_id=tmp_path / "tiny")
    assert_holds(other, {n: t for n, t in TinyModel(TinyConfig()).state_dict().items() if n != "head.weight"})


@pooled(world_size=2)
def test_what_does_not_fit_is_refused_by_torch(tmp_path):
    dcp.save(to_dtensor_state_dict(parallel(gpt2(), 2)), checkpoint_id=tmp_path / "a")
    model = parallel(gpt2(n_layer=3), 2)
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: transformer\.h\.2"):
        dcp.load(to_dtensor_state_dict(model), checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointError, match="not parallelized"):
        to_dtensor_state_dict(gpt2())
    del model.transformer.wpe
    with pytest.raises(CheckpointError, match=r"gone: transformer\.wpe\.weight"):
        to_dtensor_state_dict(model)


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
