"""Pipeline stages of models that are built without memory: equal to the plain model's, and nothing of the others'."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import autopar
import autopar.integrations
from autopar.deferred_init import materialize
from tests.checkpoint.hybrid import batch_of, same
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled
from tests.parity import close
from tests.pipeline_parallel.deep import deep
from tests.small import lazily, llama

NAMES = mainly("gpt2", "llama", "bert", "t5", later="sweep")


def stages(pp: int, tp: int = 1) -> dict[str, Any]:
    return {"model_parallelism": {"pipeline_parallel_size": pp, "tensor_parallel_size": tp}}


def assert_holds(model: Any, whole: dict[str, torch.Tensor]) -> None:
    """What this rank has is its share of the plain state dict, and not more."""
    plan, held = model._autopar.plan, model._autopar.stages
    found = set()
    for name, tensor in model.state_dict().items():
        layout = plan.tensors[plan.canonical(name)].layout
        due = whole[name] if layout is None else layout.shard(whole[name], model.mpu.tp.rank)
        assert same(tensor, due), name
        found.add(name)
    assert found == {name for name in whole if model.mpu.pp.rank in held.holders(name)}


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", NAMES)
@pooled(world_size=4)
def test_stages_of_a_lazy_model_are_those_of_the_plain_one(tmp_path, name):
    plain = deep(name, 4)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
    dist.barrier()
    weights = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    folders = [str(tmp_path / "plain")]
    for tp, pp in ((2, 2), (1, 4), (1, 2)) if name == "gpt2" else ((2, 2),):
        source = autopar.initialize(copy.deepcopy(plain), stages(pp, tp))
        source.save_parallelized(tmp_path / f"{tp}-{pp}")
        source.mpu.destroy()
        folders.append(str(tmp_path / f"{tp}-{pp}"))
    for (tp, pp), folder in itertools.product(((2, 2), (1, 4)), folders):
        lazy = autopar.from_pretrained(type(plain), folder, stages(pp, tp))
        assert_holds(lazy, weights)
        if folder == folders[0]:
            lazy.train()
            out = lazy.execute_pipeline(batch_of(0), broadcast_loss=True)
            close(out.loss, plain.train()(**batch_of(0)).loss.detach(), f"loss on {tp, pp}")
        lazy.mpu.destroy()
    drawn: dict[str, torch.Tensor] = {}
    for tp, pp in ((1, 1), (2, 2), (1, 4)):
        torch.manual_seed(5)
        lazy = autopar.initialize(lazily(plain), stages(pp, tp))
        drawn = drawn or lazy.state_dict()  # those of one stage
        assert_holds(lazy, drawn)
        lazy.mpu.destroy()
    assert not any(torch.equal(drawn[key], weights[key]) for key in drawn if weights[key].ndim > 1)


@pooled(world_size=4)
def test_a_stage_never_has_memory_for_the_others(tmp_path):
    plain = llama(num_hidden_layers=8, vocab_size=40)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
    dist.barrier()
    total = sum(parameter.numel() for parameter in plain.parameters())
    block = sum(parameter.numel() for parameter in plain.model.layers[0].parameters())
    held: list[int] = []
    real = materialize.replace_storage
    watched: list[Any] = []

    def counting(parameter: torch.nn.Parameter, data: torch.Tensor) -> None:
        if not any(parameter is other for other in watched):
            watched.append(parameter)
        real(parameter, data)
        held.append(sum(p.numel() for p in watched if not p.is_meta))

    materialize.replace_storage = counting  # type: ignore[assignment]
    try:
        for make in (
            lambda: autopar.from_pretrained(AutoModelForCausalLM, str(tmp_path / "plain"), stages(4)),
            lambda: autopar.initialize(lazily(plain), stages(4)),
        ):
            held.clear(), watched.clear()
            model = make()
            share = sum(parameter.numel() for parameter in model.parameters())
            assert share < 0.4 * total
            assert max(held) <= share + block
            assert not any(parameter.is_meta for parameter in model.parameters())
            model.mpu.destroy()
    finally:
        materialize.replace_storage = real


@pytest.mark.parametrize(("name", "tp"), [("gpt2", 1), ("t5", 2)])
@pooled(world_size=4)
def test_a_model_that_was_loaded_straight_into_stages_becomes_whole(tmp_path, name, tp):
    """As deparallelize gives it back, which adapters after initialize use: parameters, buffers, gradients."""
    plain = deep(name, 4)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
    dist.barrier()
    for start in ("files", "drawn"):
        if start == "files":
            model = autopar.from_pretrained(type(plain), tmp_path / "plain", stages(2, tp))
            expected = plain
        else:
            torch.manual_seed(5)
            model = autopar.initialize(lazily(plain), stages(2, tp))
            torch.manual_seed(5)
            expected = autopar.initialize(lazily(plain), {})
        identities = {name: id(parameter) for name, parameter in model.named_parameters()}
        model = autopar.deparallelize(model)
        found = model.state_dict()
        assert found.keys() == expected.state_dict().keys()
        for key, tensor in expected.state_dict().items():
            assert same(found[key], tensor), (start, key)
        assert {key: id(dict(model.named_parameters())[key]) for key in identities} == identities
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        again = autopar.initialize(model, stages(2, tp)).train()
        out = again.execute_pipeline(batch_of(0), broadcast_loss=True)
        close(out.loss, expected.train()(**batch_of(0)).loss.detach(), f"loss of {start}")
        again.mpu.destroy()
