"""Scripts with accelerate around a parallelized model, and the recipe without its loaders and DDP."""

import copy
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import autopar
from autopar.errors import ConfigError
from tests.compare import same_weights
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.integrations.runs import Sequences
from tests.parity import close
from tests.small import gpt2, grouped

PARALLEL = {"model_parallelism": {"tensor_parallel_size": 2}}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([Sequences()[index] for index in range(13)])


def steps_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train_and_count() -> None:
    """A script as accelerate's guide has it: nothing of autopar but ``initialize``."""
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    replicas = dist.get_world_size() // 2
    plain = grouped().train()
    model = autopar.initialize(copy.deepcopy(plain), PARALLEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = steps_of(optimizer)
    loader: Any = DataLoader(Sequences(), batch_size=2)
    loader, model, optimizer, scheduler = accelerator.prepare(loader, model, optimizer, scheduler)
    assert isinstance(model, DistributedDataParallel) == (replicas > 1)
    assert len(loader) == 8 // replicas
    norms, losses = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(accelerator.gather(loss.detach()))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    falling = steps_of(reference)
    batches = [*DataLoader(Sequences(), batch_size=2)]
    for step in range(4 // replicas):
        for number in (2 * step, 2 * step + 1):
            each = [plain(**batch).loss for batch in batches[replicas * number : replicas * (number + 1)]]
            (sum(each) / replicas / 2).backward()
            close(losses[number], torch.stack(each).detach(), f"losses of {number}")
        close(norms[step], torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1), f"norm {step}")
        reference.step()
        for _ in range(replicas):  # what accelerate does: a schedule counts batches of one process
            falling.step()
        reference.zero_grad()
    whole = accelerator.unwrap_model(model)
    same_weights(whole, plain, 1e-5, "after the epoch")
    assert scheduler.get_last_lr() == falling.get_last_lr()

    for data in (torch.utils.data.Subset(Sequences(), range(13)), Stream()):
        seen = accelerator.prepare(DataLoader(data, batch_size=2))
        found: list[Any] = []
        model.eval()
        with torch.no_grad():
            for batch in seen:
                guessed = model(**batch).logits.argmax(-1)
                pair = accelerator.gather_for_metrics((guessed, batch["labels"]))
                rows = accelerator.gather_for_metrics([*guessed.tolist()], use_gather_object=True)
                assert rows == pair[0].tolist()
                found.append(pair)
        ids = Sequences().ids[:13]
        assert torch.equal(torch.cat([labels for _, labels in found]), ids)
        assert torch.equal(torch.cat([guessed for guessed, _ in found]), plain.eval()(ids).logits.argmax(-1))
    whole.mpu.destroy()


@pooled(world_size=2)
def test_a_script_with_tensor_parallelism() -> None:
    train_and_count()


@pooled(world_size=4)
def test_a_script_with_replicas() -> None:
    train_and_count()


@pooled(world_size=4)
def test_what_counts_processes_counts_replicas() -> None:
    accelerator = accelerator_of()
    from accelerate import PartialState, utils

    model = autopar.initialize(gpt2(), PARALLEL)
    rank, replica = dist.get_rank(), model.mpu.dp.rank
    assert (accelerator.num_processes, accelerator.process_index) == (2, rank)
    assert (accelerator.is_main_process, accelerator.is_last_process) == (rank == 0, rank == 3)
    mine = torch.tensor([replica + 1.0])
    for gather in (accelerator.gather, utils.gather):
        assert gather({"a": mine, "b": [mine[0]]})["a"].tolist() == [1, 2]
    assert utils.gather_object([replica]) == [0, 1]
    for reduce in (accelerator.reduce, utils.reduce):
        assert [reduce(mine, kind).item() for kind in ("sum", "mean", "max")] == [3, 1.5, 2]
    padded = accelerator.pad_across_processes(torch.ones(replica + 1))
    assert padded.tolist() == [1, replica]
    for split in (accelerator.split_between_processes, PartialState().split_between_processes):
        with split([*"abc"], apply_padding=True) as part:
            assert part == ([*"ab"], [*"cc"])[replica]
    if rank == 3:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()

    fewer = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 4}})
    with raises_everywhere(ConfigError, "there are 2 parallelized models with 2 and 1 replicas"):
        utils.gather(mine)
    prepared = accelerator.prepare(fewer)
    assert prepared is fewer and accelerator.num_processes == 1
    assert accelerator.gather(mine).tolist() == mine.tolist()
    fewer.mpu.destroy()

    others = accelerator_of()  # of a model that is not parallelized
    others.prepare_model(torch.nn.Linear(1, 1))
    assert others.num_processes == 4
    assert others.gather(mine).tolist() == [1, 1, 2, 2]
    model.mpu.destroy()
    assert utils.gather(mine).tolist() == [1, 1, 2, 2]


@pooled(world_size=4)
def test_a_schedule_steps_with_the_optimizer_of_the_model() -> None:
    accelerator = accelerator_of()
    plain = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    early = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=2))
    lone, other = accelerator.prepare(steps_of(optimizer), steps_of(plain))
    other.optimizers = [plain]
    autopar.initialize(model, PARALLEL, optimizer=optimizer)
    for scheduler, expected in ((early, 2), (lone, 2), (other, 4)):
        for inner in scheduler.optimizers or ():
            inner.step_was_skipped = False
        scheduler.step()
        assert scheduler.scheduler.last_epoch == expected, (scheduler.scheduler, scheduler.scheduler.last_epoch)
    early.step()
    assert early.scheduler.last_epoch == 2  # not beyond its end
    lone.split_batches = True
    lone.step()
    assert lone.scheduler.last_epoch == 3


@pooled(world_size=4)
def test_a_model_that_shares_weights_only_within_its_replica() -> None:
    accelerator = accelerator_of()
    from accelerate.local_sgd import LocalSGD

    plain = gpt2().train()
    config = {**PARALLEL, "consistency_check": {"enable": False}}
    model = autopar.initialize(copy.deepcopy(plain), config)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    ids = Sequences().ids[:4].chunk(2)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for _ in range(2):
            part = ids[model.mpu.dp.rank]
            accelerator.backward(model(input_ids=part, labels=part).loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    both = [copy.deepcopy(plain), plain]
    for one, part in zip(both, ids, strict=True):
        reference = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            reference.zero_grad()
            one(input_ids=part, labels=part).loss.backward()
            reference.step()
    with torch.no_grad():
        for first, second in zip(both[0].parameters(), plain.parameters(), strict=True):
            second.add_(first).div_(2)
    same_weights(model, plain, 1e-5, "averaged")


@pooled(world_size=2)
def test_what_accelerate_would_get_wrong_is_refused(tmp_path: Any) -> None:
    from accelerate.utils import DistributedType

    accelerator = accelerator_of()
    model = autopar.initialize(grouped().train(), PARALLEL)
    model = accelerator.prepare(model)
    loader = autopar.prepare_dataloader(Sequences(), 2, mpu=model.mpu)
    with raises_everywhere(ConfigError, "which is already sharded over 1 replicas\n  Do not pass it to prepare"):
        accelerator.prepare(loader)
    accelerator.dataloader_config.use_stateful_dataloader = True
    with raises_everywhere(ConfigError, "use_stateful_dataloader is not supported with a", "mpu=model.mpu"):
        accelerator.prepare(DataLoader(Sequences()))
    accelerator.dataloader_config.use_stateful_dataloader = False
    accelerator.state.parallelism_config = object()
    with raises_everywhere(ConfigError, "Accelerator(parallelism_config=...) is not supported with a model that"):
        accelerator.prepare_data_loader(DataLoader(Sequences()))
    accelerator.state.parallelism_config = None
    many, accelerator.state.distributed_type = accelerator.state.distributed_type, DistributedType.NO
    with raises_everywhere(ConfigError, "Accelerator() counts 1 process, expected 2", "Accelerator(cpu=True)"):
        accelerator.prepare(DataLoader(Sequences()))
    with raises_everywhere(ConfigError, "Accelerator() counts 1 process, expected 2"):
        accelerator.prepare(accelerator.unwrap_model(model))
    accelerator.state.distributed_type = many
    for save in (
        lambda: accelerator.save_model(model, tmp_path),
        lambda: accelerator.save_state(tmp_path),
        lambda: accelerator.get_state_dict(model),
    ):
        with pytest.raises(ConfigError, match="save_parallelized"):
            save()


def accelerator_of(**settings: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    assert accelerator.state.num_processes == dist.get_world_size()
    return accelerator


@pooled(world_size=4)
def test_the_recipe_is_the_plain_loop() -> None:
    for precision, tolerance in (("no", 1e-5), ("bf16", 0.02)):
        accelerator = accelerator_of(
            gradient_accumulation_steps=2, mixed_precision=precision, step_scheduler_with_optimizer=False
        )
        plain = grouped().train()
        model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loader = autopar.prepare_dataloader(Sequences(), batch_size=2, mpu=model.mpu)
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        norms, losses = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    autopar.average_gradients(model)
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        halving = torch.optim.lr_scheduler.StepLR(reference, 1, 0.5)
        places = [SimpleNamespace(is_master=False, dp=SimpleNamespace(rank=rank, size=2)) for rank in range(2)]
        batches = [[*autopar.prepare_dataloader(Sequences(), 2, mpu=place)] for place in places]
        for step in range(2):
            for number in (2 * step, 2 * step + 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    both = [plain(**batches[rank][number]).loss for rank in range(2)]
                (sum(both) / 4).backward()
                close(losses[number], both[model.mpu.dp.rank].detach(), f"loss {number} {precision}", tolerance)
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            close(norms[step], norm, f"norm {step} {precision}", tolerance)
            reference.step()
            halving.step()
            reference.zero_grad()
        assert scheduler.get_last_lr() == halving.get_last_lr() == [0.025]
        same_weights(model, plain, tolerance, precision)
        model.mpu.destroy()
