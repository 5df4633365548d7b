"""Initialize: what it attaches and refuses, gives back, and how it is launched."""

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import ConfigError, ConsistencyError, UnsupportedModelError
from tests.harness.worlds import pooled
from tests.parity import close, language_batches, whole
from tests.scripts import printed
from tests.small import gpt2, parallel


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_everything_is_attached_and_the_module_is_what_it_was():
    model = gpt2()
    classes = {name: type(module) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    returned = parallel(model, 2)
    assert returned is model
    assert model.mpu.get_tensor_parallel_world_size() == 2
    for name, module in model.named_modules():
        assert isinstance(module, classes[name])
    assert list(model.state_dict()) == keys
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.transformer.h[0].attn.c_attn.weight.shape == (36, 3 * 4 * (5 if model.mpu.tp.rank == 0 else 4))
    with pytest.raises(ConfigError, match="resize_token_embeddings is not supported on a parallelized GPT2Model"):
        model.transformer.resize_token_embeddings(140)
    with pytest.raises(IndexError, match="embedding of 131 rows: got ids from 0 to 131"):
        model(torch.tensor([[0, 131]]))


@pytest.mark.tier("test")
def test_one_process_without_torchrun_in_a_fresh_interpreter_without_models():
    code = (
        "import sys, autopar\n"
        "print([m for m in sys.modules if m.startswith('transformers.models.') and 'modeling' in m])\n"
        "import torch\n"
        "from tests.small import gpt2\n"
        "plain = gpt2(); ids = torch.arange(6)[None]\n"
        "expected = plain(ids).logits\n"
        "model = autopar.initialize(plain, {'model_parallelism': {'enable': True}})\n"
        "assert torch.equal(model(ids).logits, expected)\n"
        "assert model.mpu.get_data_parallel_world_size() == 1\n"
        "assert callable(model.save_parallelized) and callable(model.from_parallelized)\n"
        "torch.nn.parallel.DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())\n"
        "print('fine')\n"
    )
    assert printed("-c", code) == "[]\nfine\n"


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_deparallelize_gives_back_the_plain_model_and_initialize_works_again():
    plain = gpt2(add_cross_attention=True)
    model = copy.deepcopy(plain)
    before = {
        path: (type(m), {k: v for k, v in vars(m).items() if type(v) is int}) for path, m in model.named_modules()
    }
    identities = [id(p) for p in model.parameters()]
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        parallel(model, 2)
        model(torch.arange(6)[None]).logits.sum().backward()
        autopar.deparallelize(model)
        for path, module in model.named_modules():
            assert type(module) is before[path][0], path
            assert {k: v for k, v in vars(module).items() if type(v) is int} == before[path][1], path
    assert identities == [id(p) for p in model.parameters()]
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
        assert parameter.grad is None or parameter.grad.shape == parameter.shape
    assert not hasattr(model, "mpu") and not hasattr(model, "_autopar")
    assert "save_pretrained" not in vars(model)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    with pytest.raises(ConfigError, match="is not parallelized"):
        autopar.deparallelize(model)


@pooled(world_size=2)
def test_a_second_initialize_is_refused_also_from_outside():
    model = parallel(gpt2(), 2)
    with pytest.raises(ConfigError, match="is parallelized already: tensor_parallel_size=2"):
        parallel(model, 2)
    with pytest.raises(ConfigError, match="at 0 is parallelized already"):
        parallel(nn.Sequential(model), 2)
    with pytest.raises(ConfigError, match=r"at wte is part of a model that is parallelized already"):
        parallel(model.transformer, 2)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_ranks_that_call_differently_all_get_an_error():
    rank = dist.get_rank()
    for config, policy, meta in [
        ({"model_parallelism": {"tensor_parallel_size": 2 - rank}}, None, False),
        ({"model_parallelism": {"tensor_parallel_size": 2}, "consistency_check": {"enable": bool(rank)}}, None, False),
        ({"model_parallelism": {"tensor_parallel_size": 2, **({"x": 1} if rank else {})}}, None, False),
        ({"model_parallelism": {"tensor_parallel_size": 2}}, 3 if rank else None, False),
        ({"model_parallelism": {"tensor_parallel_size": 2}}, None, True),
    ]:
        model = gpt2().to("meta") if meta and rank else gpt2()
        with pytest.raises(Exception) as info:
            autopar.initialize(model, config, policy=policy)
        if rank == 0:
            assert isinstance(info.value, ConsistencyError)
        assert not hasattr(model, "mpu")
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"in torch.inference_mode"):
        parallel(gpt2(), 2)


@pooled(world_size=2)
def test_other_weights_and_buffers_of_odd_kinds_become_those_of_rank_0():
    rank = dist.get_rank()
    model = gpt2(seed=rank)
    model.register_buffer("complex", torch.full((3,), 1 + 2j * rank, dtype=torch.complex128))
    model.register_buffer("bits", torch.tensor([True, rank == 0]))
    model.register_buffer("halves", torch.full((2, 3), float(rank), dtype=torch.bfloat16).t())
    model.register_buffer("scalar", torch.tensor(rank))
    model.register_buffer("wide", torch.tensor([float(rank)]).expand(4), persistent=False)
    model.register_buffer("empty", torch.zeros(0))
    parallel(model, 2)
    assert model.complex.tolist() == [1 + 0j] * 3
    assert model.bits.tolist() == [True, True]
    assert model.halves.sum() == 0 and model.scalar.item() == 0 and model.wide.tolist() == [0.0] * 4
    weights = whole(model, lambda parameter: parameter.data)
    assert all(torch.equal(weights[name], parameter) for name, parameter in gpt2().named_parameters())


@pooled(world_size=2)
def test_a_deep_copy_is_a_working_parallel_model_of_its_own():
    model = parallel(gpt2(), 2)
    twin = copy.deepcopy(model)
    ids = torch.arange(6)[None]
    assert torch.equal(twin(ids).logits, model(ids).logits)
    with torch.no_grad():
        twin.transformer.wpe.weight.zero_()
    assert not torch.equal(twin(ids).logits, model(ids).logits)
    assert twin.generate.__self__ is twin
    hooks = [h for h in twin._forward_pre_hooks.values() if hasattr(h, "region")]
    assert hooks[0].region is twin.transformer.h[0].attn.c_attn.region
    assert hooks[0].region is not model.transformer.h[0].attn.c_attn.region


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_two_models_with_two_meshes_live_side_by_side():
    two, four, ids = parallel(gpt2(), 2), parallel(gpt2(), 4), torch.arange(6)[None]
    expected = gpt2()(ids).logits
    close(two(ids).logits, expected, "tp 2")
    close(four(ids).logits, expected, "tp 4")
    assert (two.mpu.dp.size, four.mpu.dp.size) == (2, 1)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_failure_leaves_the_model_as_it_was_and_reaches_every_rank():
    model = gpt2(n_head=1) if dist.get_rank() else gpt2()  # rank 1 holds another model
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ConfigError, ConsistencyError)) as info:
        parallel(model, 2)
    expected = "1 heads cannot be sharded over 2 ranks"
    assert expected in str(info.value)
    if dist.get_rank() == 0:
        assert str(info.value).startswith("rank 1 cannot initialize its model, so no rank does:")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not hasattr(model, "mpu")
    other = gpt2(n_inner=40) if dist.get_rank() else gpt2()
    with pytest.raises(ConsistencyError, match=r"ranks \[1\] call autopar.initialize with other arguments than rank 0"):
        parallel(other, 2)


def test_an_unsupported_model_names_the_closest():
    with pytest.raises(UnsupportedModelError, match="Linear must be or contain a Hugging Face model"):
        autopar.initialize(nn.Linear(2, 2))
    pair = nn.ModuleList([gpt2(), gpt2()])
    with pytest.raises(
        UnsupportedModelError, match=r"must contain one Hugging Face model, got 2: 0 .GPT2LMHeadModel., 1"
    ):
        autopar.initialize(pair)

    class GPT5Config(GPT2Config):
        model_type = "gpt2o"

    model = GPT2LMHeadModel(GPT5Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0))
    with pytest.raises(UnsupportedModelError, match=r"no policy lists model_type 'gpt2o'(.|\n)* Did you mean 'gpt2'\?"):
        autopar.initialize(model)


@pytest.mark.parametrize("mesh", ["pp", "dp", "zero 3"])
@pooled(world_size=2)
def test_models_that_are_dropped_leave_no_threads_and_files(mesh: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"pp": 2 if mesh == "pp" else 1}
    config["zero"] = {"stage": 3 if mesh == "zero 3" else 0}
    batch = language_batches(131, count=1)[0]
    counts = []
    for number in range(12):
        model = gpt2()
        model, optimizer = autopar.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
        model.execute_pipeline(batch, optimizer=optimizer)
        optimizer.step()
        if mesh == "zero 3":  # torch keeps results of operations of DTensors for equal meshes
            assert (2 * model.lm_head.weight).full_tensor().shape == (131, 36)
        else:
            model.save_parallelized(tmp_path / str(number), async_save=True)
            model.wait_for_save()
        del model, optimizer
        if mesh == "zero 3":
            gc.collect()  # FSDP2's states refer to each other
        counts.append([len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")])
    first, last = (map(max, zip(*half, strict=True)) for half in (counts[:6], counts[6:]))
    assert all(after - before < 3 for before, after in zip(first, last, strict=True)), counts


@pooled(world_size=2)
def test_gradients_that_are_there_already_are_cut_too():
    plain = gpt2()
    plain(torch.arange(6)[None]).logits.sum().backward()
    model = copy.deepcopy(plain)
    for parameter, original in zip(model.parameters(), plain.parameters(), strict=True):
        parameter.grad = original.grad.clone()
    gradients = whole(parallel(model, 2), lambda parameter: parameter.grad)
    for name, parameter in plain.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


@pooled(world_size=2)
def test_initialize_on_the_meta_device():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2))
    parallel(model, 2)
    assert model.model.layers[0].mlp.down_proj.weight.shape == (64, 64)
    assert model.model.layers[0].mlp.down_proj.weight.is_meta


LAUNCHED = """
import torch
import torch.distributed as dist
import autopar
from tests.parity import language_batches
from tests.small import gpt2

torch.set_num_threads(1)
plain = gpt2().train()
model = autopar.initialize(gpt2().train(), {"model_parallelism": {"tensor_parallel_size": 2}})
for one in (plain, model):
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for batch in language_batches(131):
        loss = one(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    one.loss_value = loss.item()
assert abs(model.loss_value - plain.loss_value) < 1e-5
print(f"rank {model.mpu.rank} of {model.mpu.world_size} is right", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.tier("all")
def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(LAUNCHED)
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    said = printed(*launch, "--mixed_precision", "no", "--main_process_port", "0", tmp_path / "train.py")
    assert all(f"rank {rank} of 2 is right" in said for rank in range(2)), said
