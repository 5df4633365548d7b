"""What a parallelized model does on an accelerator, as the simulated device shows it; the plain one is on the CPU."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

import autopar
from autopar.distributed.rng import seeded
from autopar.errors import ConfigError
from autopar.features.megatron.random import manual_seed
from autopar.tools.compat.operators import in_parts
from tests.exchange import by_rank_0, everyones
from tests.gpu import simulated, test_one_rank
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.gpu.host_waits import waits
from tests.parity import close, whole
from tests.scripts import printed
from tests.small import gpt2, llama, parallel

pytestmark = needs_compiler

IDS = torch.randint(0, 131, (4, 9), generator=torch.Generator().manual_seed(3))
DEVICE = {simulated.NAME}


def places(model: Any) -> set[str]:
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


@on_device(world_size=1)
def test_what_makes_the_host_wait_is_noted_with_its_place() -> None:
    x = torch.ones(3, 4, device=simulated.start(), requires_grad=True)
    mask = x.detach() > 0
    with waits() as found:
        y = (x * 2).masked_fill(mask, 0.5).sum()
        y.backward()
        torch.tensor([1, 2]).to(x.device, non_blocking=True)
    assert not found
    for wait in (
        y.item,
        x.tolist,
        x.cpu,
        mask.nonzero,
        functools.partial(bool, y > 0),
        functools.partial(x.__getitem__, mask),
        functools.partial(torch.tensor, [1, 2], device=x.device),
        functools.partial(torch.equal, x, x),
    ):
        with waits() as found:
            wait()
        assert found and found[0].function == "test_simulated.py test_what_makes_the_host_wait_is_noted_with_its_place"


@on_device(world_size=2)
def test_dropout_is_alike_outside_of_sharded_regions_and_recomputed_alike() -> None:
    plain = gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3).train()
    model = parallel(copy.deepcopy(plain), 2).train()
    section = {"enable": True, "cpu_checkpointing": True}
    again = parallel(copy.deepcopy(plain), 2, activation_checkpointing=section).train()
    ids = IDS.to(model.mpu.device)
    for each in (model, again):
        torch.manual_seed(5)
        each(ids, labels=ids).loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        close(other.grad, parameter.grad, name)
    logits = model(ids).logits.detach()
    assert torch.equal(*everyones(logits.cpu(), model.mpu.tp.group))
    assert not torch.equal(model(ids).logits, logits)


@on_device(world_size=2)
def test_ranks_have_streams_of_their_own_on_the_device() -> None:
    mpu = autopar.MPU(tensor_parallel_size=2)
    tracker = manual_seed(1234, mpu)
    alike = torch.rand(3, device=mpu.device)
    with tracker.fork():
        apart = torch.rand(3, device=mpu.device)
    with seeded(7 + mpu.rank):
        seeded_apart = torch.rand(3, device=mpu.device)
    later = torch.rand(3, device=mpu.device)
    same = [torch.equal(*everyones(drawn.cpu())) for drawn in (alike, apart, seeded_apart, later)]
    assert same == [True, False, False, True]


@on_device(world_size=2)
def test_generation_is_the_plain_models() -> None:
    for build in (gpt2, llama):
        plain = build().eval()
        model = parallel(copy.deepcopy(plain), 2).eval()
        ids = IDS.to(model.mpu.device)
        for more in ({}, {"num_beams": 2}):
            settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **more}
            assert torch.equal(model.generate(ids, **settings).cpu(), plain.generate(IDS, **settings))
        sampled = model.generate(ids, max_new_tokens=6, do_sample=True, eos_token_id=None)
        assert torch.equal(*everyones(sampled.cpu(), model.mpu.tp.group))


class _Live(TorchDispatchMode):
    """The most bytes of the device that were live when an operation had run."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_parts(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, torch.ops.sim.memory()[0])
        return result


@pytest.mark.parametrize("lazily", [True, False])
@on_device(world_size=2)
def test_zero_3_never_has_all_weights_on_the_device(lazily: bool, tmp_path: Any) -> None:
    plain = llama(num_hidden_layers=8)
    by_rank_0(plain.save_pretrained)(tmp_path)
    before, config = torch.ops.sim.memory()[0], {"zero": {"stage": 3}}
    with _Live() as live:
        if lazily:
            model = autopar.from_pretrained(LlamaForCausalLM, tmp_path, config)
        else:
            model = autopar.initialize(copy.deepcopy(plain), config)
    assert places(model) == DEVICE
    share = sum(parameter.to_local().nbytes for parameter in model.parameters())
    total, block = (sum(x.nbytes for x in each.parameters()) for each in (plain, plain.model.layers[0]))
    outside = total - 8 * block + sum(buffer.nbytes for buffer in plain.buffers())  # one group, too
    assert share < 0.6 * total
    assert live.most - before <= share + (outside if lazily else max(block, outside)) + 4096
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor().cpu(), plain.get_parameter(name).data), name
    close(model(IDS.to(model.mpu.device)).logits.cpu(), plain(IDS).logits, "logits")


@pytest.mark.parametrize("tp", [1, 2])
@on_device(world_size=2)
def test_a_checkpoint_comes_back_on_the_device(tp: int, tmp_path: Any) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = autopar.initialize(model, {"tp": tp, "zero": {"stage": 2 - tp}}, optimizer=optimizer)
    ids = IDS.to(model.mpu.device)
    model(ids, labels=ids).loss.backward()
    if tp == 1:
        autopar.average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    held = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors = [*model.state_dict().values(), *held]
    before = [(tensor.device, tensor.clone()) for tensor in tensors]
    model.save_parallelized(tmp_path / "own", timeout=60, optimizer=optimizer)
    model.save_parallelized(tmp_path / "merged", timeout=60, merge_checkpoints=True)
    drawn = torch.rand(3, device=model.mpu.device)
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
    model.from_parallelized(tmp_path / "own", timeout=60, optimizer=optimizer)
    held = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    for tensor, (device, value) in zip([*model.state_dict().values(), *held], before, strict=True):
        assert tensor.device == device and torch.equal(tensor, value)
    assert {value.device.type for value in held if value.dim()} == DEVICE
    assert torch.equal(torch.rand(3, device=model.mpu.device), drawn)
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in whole(model, lambda parameter: parameter.data).items():
        assert torch.equal(value, merged[name]), name
    plain = autopar.deparallelize(model)
    assert places(plain) == DEVICE
    for name, value in plain.state_dict().items():
        assert torch.equal(value.cpu(), merged[name]), name


@on_device(world_size=2)
def test_ids_and_targets_that_are_too_large_are_errors() -> None:
    model = parallel(llama(), 2)
    ids = IDS.to(model.mpu.device)
    with pytest.raises((IndexError, RuntimeError), match="index out of range in an embedding of 131 rows"):
        model(ids + 131)
    with pytest.raises((ConfigError, RuntimeError), match="a target is outside the vocabulary of 131"):
        model(ids, labels=ids + 131)


@pytest.mark.tier("all")
def test_the_tests_for_a_gpu_pass_on_the_device() -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", test_one_rank.__file__)
    said = printed(*command, AUTOPAR_SIMULATED="1")
    assert " passed" in said and "[cpu" not in said
