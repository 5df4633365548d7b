"""Model and optimizer through ``torch.distributed.checkpoint``: training goes on on any mesh."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import autopar
from autopar.checkpoint import load_dtensor_state_dict, to_dtensor_training_state
from autopar.errors import CheckpointError, ConfigError
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2, llama

MODELS = {  # in float64; transformers computes the loss in float32
    "fused": gpt2,  # 9 heads, fused q | k | v, tied embeddings
    "grouped": lambda seed: llama(seed, num_attention_heads=4, num_key_value_heads=2, hidden_size=32),
}
BEFORE, AFTER = 3, 2


def batch(step: int) -> torch.Tensor:
    return torch.randint(1, 131, (4, 8), generator=torch.Generator().manual_seed(step))


def make_optimizer(model: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=lr, eps=1e-4)


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


def uninterrupted(kind: str) -> dict[str, torch.Tensor]:
    plain = MODELS[kind](0).double().train()
    train(plain, make_optimizer(plain), range(BEFORE + AFTER))
    return plain.state_dict()


@pooled(world_size=4)
def save(folder: Path, **sections: Any) -> None:
    for kind in MODELS:
        model, optimizer = made(kind, 2, **sections)
        train(model, optimizer, range(BEFORE))
        dcp.save(to_dtensor_training_state(model, optimizer), checkpoint_id=folder / kind)


def load(folder: Path, kinds: tuple[str, ...], tp: int, pp: int = 1, **sections: Any) -> None:
    for kind in kinds:
        model, optimizer = made(kind, tp, pp, seed=1, lr=0.5, **sections)
        dcp.load(to_dtensor_training_state(model, optimizer), checkpoint_id=folder / kind)
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
        train(model, optimizer, range(BEFORE, BEFORE + AFTER), pp)
        whole, expected = autopar.deparallelize(model).state_dict(), uninterrupted(kind)
        for name, tensor in expected.items():
            close(whole[name], tensor, f"{kind}: {name}", 1e-6)


@pooled(world_size=4)
def load_on_four(folder: Path) -> None:
    load(folder, ("fused", "grouped"), 4)  # uneven heads; KV heads on two ranks each
    load(folder, ("grouped",), 2, zero={"stage": 1})
    load(folder, ("fused",), 2, 2)  # tied embeddings on two stages


@pytest.mark.tier("all")
def test_training_goes_on_on_any_mesh(tmp_path: Path) -> None:
    save(tmp_path)
    load_on_four(tmp_path)
    pooled(1)(load)(tmp_path, ("fused",), 1)


@pooled(world_size=2)
def test_torchs_own_reader_of_optimizers_warns(tmp_path: Path) -> None:
    """It hands out bare shards, which ``dcp.save`` would take for the same on all ranks."""
    model, optimizer = made("fused", 2)
    train(model, optimizer, range(1))
    with pytest.warns(autopar.ShardWarning, match=r"get_optimizer_state_dict(?s:.*)to_dtensor_training_state"):
        mine = get_optimizer_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_optimizer_state_dict(model, optimizer)  # once a model
        set_optimizer_state_dict(model, optimizer, mine)  # this rank's own


@pytest.mark.parametrize("stages", [1, 2], ids=["tp", "pp"])
@pooled(world_size=2)
def test_full_state_dicts_of_torch_are_refused(stages: int) -> None:
    """Torch would take one rank's shards, or its stage, for all of them."""
    model = autopar.initialize(llama(), {"tp": 2 // stages, "pp": stages})
    optimizer = torch.optim.AdamW(model.parameters())
    for option in ({"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}):
        options = StateDictOptions(**option)
        for call in (
            lambda options=options: get_model_state_dict(model, options=options),
            lambda options=options: get_model_state_dict(model.model, options=options),
            lambda options=options: get_optimizer_state_dict(model, optimizer, options=options),
            lambda options=options: get_state_dict(model, optimizer, options=options),
            lambda options=options: set_optimizer_state_dict(model, optimizer, {}, options=options),
            lambda options=options: set_state_dict(
                model, optimizer, model_state_dict={}, optim_state_dict={}, options=options
            ),
        ):
            axis = "pipeline" if stages == 2 else "tensor-parallel"
            with pytest.raises(ConfigError, match=rf"full_state_dict=True(?s:.*){axis} rank [01] of 2"):
                call()
        values = llama(seed=5).state_dict() if model.mpu.rank == 0 or len(option) == 1 else {}
        set_model_state_dict(model, values, options=options)  # each rank takes its own
        expected = autopar.initialize(llama(seed=5), {"tp": 2 // stages, "pp": stages})
        assert all(torch.equal(*two) for two in zip(model.parameters(), expected.parameters(), strict=True))
        expected.mpu.destroy()


@pooled(world_size=2)
def test_what_the_entries_are(tmp_path: Path) -> None:
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
    def adafactor(model: Any) -> Any:
        return torch.optim.Adafactor(model.parameters())

    def refused(text: str, model: Any, optimizer: Any) -> None:
        with pytest.raises(CheckpointError, match=text):
            to_dtensor_training_state(model, optimizer)

    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2}})
    refused("has state 'row_var' of transformer(?s:.*)Statistics of a shard", model, adafactor(model))
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
    assert dist.get_world_size() == 2
