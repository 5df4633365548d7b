"""Wrappers over the wrong ranks are refused where they are made, before they send anything."""

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import ConfigError
from autopar.guards import step as process_hooks
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2, parallel


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@contextlib.contextmanager
def _refused(what: str, ranks: str, mpu: Any, remedy: str) -> Iterator[None]:
    with pytest.raises(ConfigError) as info:
        yield
    assert str(info.value) == (
        f"{what} over ranks {ranks} would mix different shards of the model: with "
        f"tensor_parallel_size={mpu.sizes.tp} and\n  pipeline_parallel_size={mpu.sizes.pp} the shard of rank "
        f"{mpu.rank} is on ranks {list(mpu.dp.ranks)}. Pass {remedy}."
    )


GROUP = "process_group=model.mpu.dp.group"


@pytest.mark.tier("test", only=("9",))
@pytest.mark.parametrize("heads", [9, 4])  # uneven shards, even ones
@pooled(world_size=2)
def test_ddp_over_all_ranks_is_refused_and_no_shard_is_copied(heads: int) -> None:
    model = parallel(gpt2(n_head=heads), 2)
    before = copy.deepcopy(model.state_dict())
    for wrap in (
        lambda: DistributedDataParallel(model),
        lambda: DistributedDataParallel(Wrapped(model)),
        lambda: DistributedDataParallel(model.transformer),
        lambda: DistributedDataParallel(copy.deepcopy(model), process_group=dist.group.WORLD),
    ):
        with _refused("DistributedDataParallel", "[0, 1]", model.mpu, GROUP):
            wrap()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    DistributedDataParallel(nn.Linear(2, 2))  # what is not the model's may be averaged over all


@pooled(world_size=4)
def test_an_optimizer_that_deals_out_parameters_over_all_ranks_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit

    model = parallel(gpt2(n_head=4), 2)
    (batch,) = language_batches(131, count=1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(**batch).loss.backward()
    everywhere = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with _refused("ZeroRedundancyOptimizer", "[0, 1, 2, 3]", model.mpu, GROUP):
        everywhere.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    own = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=model.mpu.get_data_parallel_group(), lr=0.1
    )
    own.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] - 0.1 * parameter.grad)


@pytest.mark.parametrize("blocks", [True, False])
@pooled(world_size=2)
def test_fully_shard_over_all_ranks_is_refused(blocks: bool) -> None:
    model = parallel(gpt2(n_head=4), 2, consistency_check={"enable": False})
    for block in model.transformer.h if blocks else ():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = language_batches(131, count=1)
    for call in (optimizer.step, lambda: model(**batch)):
        with _refused("fully_shard", "[0, 1]", model.mpu, 'mesh=model.mpu.mesh["dp"]'):
            call()


@pooled(world_size=2)
def test_fully_sharded_data_parallel_and_batch_norms_over_all_ranks_are_refused() -> None:
    model = parallel(gpt2(n_head=4), 2)
    with _refused("SyncBatchNorm", "[0, 1]", model.mpu, GROUP):
        model.transformer.normed = nn.SyncBatchNorm(3)
    # Its constructor needs a GPU; this is what it does last.
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.process_group = dist.group.WORLD
    hint = ";\n  with accelerate leave out fsdp_plugin: zero: {stage: 3} in the config is torch's FSDP2"
    with _refused("FullyShardedDataParallel", "[0, 1]", model.mpu, f"{GROUP}{hint}"):
        wrapper._fsdp_wrapped_module = model
    wrapper.process_group = model.mpu.dp.group
    wrapper._fsdp_wrapped_module = model
    model.transformer.ln_f.weight._fsdp_flattened = True  # as it marks what it has flattened
    for clip in (wrapper.clip_grad_norm_, lambda limit: autopar.clip_grad_norm_(model, limit)):
        words = r"is not supported with FullyShardedDataParallel(.|\n)*fully_shard\(model, mesh=model\.mpu\.mesh"
        with pytest.raises(ConfigError, match=words):
            clip(1.0)


def _listening() -> int:
    return sum(listener() is not None for listener in process_hooks._listeners)


@pooled(world_size=2)
def test_the_checks_go_with_the_model() -> None:
    gc.collect()
    before = _listening()
    model = parallel(gpt2(), 2)
    assert _listening() == before + 3
    plain = autopar.deparallelize(model)
    assert _listening() == before
    DistributedDataParallel(plain)
    model = parallel(gpt2(), 2)
    model.mpu.destroy()
    del model
    gc.collect()
    assert _listening() == before
