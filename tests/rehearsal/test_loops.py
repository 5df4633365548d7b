"""Loops of users: what is right is matched, what real ranks would hang on or refuse is found."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import autopar
from tests.harness.tiers import in_tier
from tests.rehearsal.programs import llama
from tests.rehearsal.test_rehearse import on_meta

Loop = Callable[[Any, Any, dict[str, Any]], None]


def rank() -> int:
    return dist.get_rank()


def on_device(model: Any, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=model.mpu.device)


def rehearsed(loop: Loop, config: dict[str, Any] | None = None, world: int = 4) -> Any:
    return autopar.rehearse(on_meta(llama), config or {"cp": 2}, world, sequence=16, loop=loop)


def own_groups(model: Any, optimizer: Any, batch: Any) -> None:
    first, pairs = dist.new_group([0, 1, 2]), [dist.new_group([0, other]) for other in (1, 2)]
    copy = dist.new_group([0, 1, 2])
    for group in (copy, first):
        if rank() < 3:
            dist.all_reduce(on_device(model, 3), group=group)
    for other, pair in enumerate(pairs, 1):
        if rank() in (0, other):
            dist.all_reduce(on_device(model, other), group=pair)
            places = torch.tensor(rank())
            dist.all_reduce(places, group=pair)
            assert places.item() == other
    dist.all_reduce(on_device(model, 5))


def in_a_ring(model: Any, optimizer: Any, batch: Any) -> None:
    x, y = on_device(model, 3), on_device(model, 3)
    receive, send = dist.P2POp(dist.irecv, y, (rank() - 1) % 4), dist.P2POp(dist.isend, x, (rank() + 1) % 4)
    for pair in ([receive, send], [send, receive]):
        for work in dist.batch_isend_irecv(pair):
            work.wait()


def much_of_the_host(model: Any, optimizer: Any, batch: Any) -> None:
    total = torch.ones(1_000_000)
    dist.all_reduce(total)
    assert total[0].item() == 4
    ways = {0: 1, 1: 0}  # more than a pipe holds, in both directions, before anything is received
    if rank() in ways:
        sent = [dist.isend(torch.tensor([float(number)]), ways[rank()]) for number in range(600)]
        rooms = [torch.zeros(1) for _ in sent]
        for room in rooms:
            dist.recv(room, ways[rank()])
        assert [int(room) for room in rooms] == list(range(600))


def numbers_in_a_ring(model: Any, optimizer: Any, batch: Any) -> None:
    x, y = torch.tensor([float(rank())]), torch.zeros(1)
    for work in (dist.isend(x, (rank() + 1) % 4), dist.irecv(y, (rank() - 1) % 4)):
        work.wait()  # gloo carries them, on GPUs as well
    assert y.item() == (rank() - 1) % 4


def settings_of_rank_0(model: Any, optimizer: Any, batch: Any) -> None:
    settings = [{"steps": 3}] if rank() == 0 else [None]
    dist.broadcast_object_list(settings, src=0)
    for step in range(settings[0]["steps"]):  # type: ignore[index]
        dist.all_reduce(on_device(model, step + 1))
    stop = torch.tensor([float(rank() == 0)])
    dist.broadcast(stop, 0)
    assert stop.item() == 1


def as_torchrun_has_it(model: Any, optimizer: Any, batch: Any) -> None:
    assert int(os.environ["RANK"]) == rank() and os.environ["WORLD_SIZE"] == "4" and "LOCAL_RANK" in os.environ
    data = TensorDataset(torch.arange(16))
    for _ in DataLoader(data, sampler=DistributedSampler(data), batch_size=2, num_workers=1):
        loss = model(**batch).loss
        dist.all_reduce(loss, async_op=True).wait(timeout=None)
        assert f"{loss:.3f}" == "1.000"
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def parts_of_a_root(model: Any, optimizer: Any, batch: Any) -> None:
    part = on_device(model, 3)
    dist.scatter(part, [on_device(model, 3) for _ in range(4)] if rank() == 0 else None, src=0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [{"of": place} for place in range(4)] if rank() == 0 else None, src=0)
    assert mine[0]["of"] == rank()


RIGHT: list[Loop] = [own_groups, in_a_ring, settings_of_rank_0, as_torchrun_has_it, parts_of_a_root]


@pytest.mark.tier("test")
@pytest.mark.parametrize("loop", [*RIGHT, much_of_the_host, numbers_in_a_ring])
def test_a_right_loop_is_matched(loop: Loop) -> None:
    assert rehearsed(loop).problems == []


@pytest.mark.tier("test")
def test_what_a_root_tells_is_known_later_and_prints_are_seen(capfd: pytest.CaptureFixture[str]) -> None:
    found = rehearsed(settings_of_rank_0, {"tp": 2}, 64)
    assert found.problems == [] and len(found.traces) == 3
    later = [call for part, call in found.traces[63] if part == "step" and call.kind == "all_reduce"]
    assert len(later) == 3

    rehearsed(lambda *_: print(f"step of rank {rank()}"))
    shown = capfd.readouterr().out
    assert all(f"step of rank {place}" in shown for place in range(4))


def another_operation(model: Any, *_: Any) -> None:
    dist.all_reduce(on_device(model, 3), op=dist.ReduceOp.MAX if rank() == 3 else dist.ReduceOp.SUM)


def equal_groups_crossed(model: Any, *_: Any) -> None:
    groups = [dist.new_group(), dist.new_group()]
    for group in reversed(groups) if rank() == 3 else groups:
        dist.all_reduce(on_device(model, 3), group=group)


def a_message_of_another_group(model: Any, *_: Any) -> None:
    one, other = dist.new_group(), dist.new_group()
    if rank() == 1:
        dist.send(on_device(model, 3), 2, group=one)
    if rank() == 2:
        dist.recv(on_device(model, 3), 1, group=other)


def a_mesh_that_a_rank_lacks(model: Any, *_: Any) -> None:
    if rank() != 3:
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def more_rows(model: Any, *_: Any) -> None:
    rows = on_device(model, 8 if rank() == 3 else 4, 5)
    dist.all_to_all_single(torch.empty_like(rows), rows)


def longer_parts(model: Any, *_: Any) -> None:
    parts = [on_device(model, 3 if rank() == 3 else 2) for _ in range(4)]
    dist.all_to_all([torch.empty_like(part) for part in parts], parts)


def a_tensor_that_a_rank_does_not_take(model: Any, *_: Any) -> None:
    mesh = init_device_mesh("cpu", (4,))
    if rank() != 3:
        distribute_tensor(on_device(model, 8, 8), mesh, [Shard(0)])


def on_the_host(model: Any, *_: Any) -> None:
    dist.all_reduce(torch.ones(3) if rank() == 3 else on_device(model, 3))


def one_after_the_other_on_nccl(model: Any, *_: Any) -> None:
    received = dist.irecv(on_device(model, 3), (rank() - 1) % 4)
    dist.isend(on_device(model, 3), (rank() + 1) % 4).wait()
    received.wait()


def a_sum_that_a_rank_skips(model: Any, optimizer: Any, batch: Any) -> None:
    for step in range(3):
        total = torch.tensor(1.0)
        if (rank(), step) != (2, 1):
            dist.all_reduce(total)
        model.save_parallelized("checkpoint")


def numbers_in_another_order(model: Any, optimizer: Any, batch: Any) -> None:
    total, settings = torch.tensor(1.0), torch.tensor(1.0)
    calls = [lambda: dist.all_reduce(total), lambda: dist.broadcast(settings, 0)]
    for call in reversed(calls) if rank() == 3 else calls:
        call()


def received_on_the_host(model: Any, optimizer: Any, batch: Any) -> None:
    if rank() == 0:
        dist.send(on_device(model, 3), 1)
    elif rank() == 1:
        dist.recv(torch.zeros(3), 0)
        raise ValueError("rank 1 does not come here")


def never_sent(model: Any, optimizer: Any, batch: Any) -> None:
    if rank() == 1:
        dist.recv(torch.zeros(2), 0)
    dist.all_reduce(torch.ones(1))


def room_for_fewer_numbers(model: Any, optimizer: Any, batch: Any) -> None:
    if rank() == 0:
        dist.send(torch.ones(3), 1)
    elif rank() == 1:
        dist.recv(torch.zeros(2), 0)


def saved_by_rank_0_alone(model: Any, optimizer: Any, batch: Any) -> None:
    for _ in range(2_000):  # calls that a pipe does not hold
        dist.all_reduce(on_device(model, 3))
    if rank() == 0:
        model.save_parallelized("checkpoint")


WRONG: dict[Loop, str] = {
    a_sum_that_a_rank_skips: "rank 2: barrier over world\n    autopar/checkpoint/save.py:",
    numbers_in_another_order: "rank 0: all_reduce over world [a number] float32",
    received_on_the_host: "is sent from a device and received on the CPU",
    never_sent: "rank 1 waits in recv from rank 0 over world [2] float32",
    room_for_fewer_numbers: "send to rank 1 over world [3] float32 and received as recv from rank 0 over world [2]",
    saved_by_rank_0_alone: "The first missing collective: barrier over world\n    autopar/checkpoint/save.py:",
    another_operation: "have different reductions, sum and max",
    equal_groups_crossed: "waits in all_reduce over group #2 [3] float32",
    a_message_of_another_group: "rank 1 sends 1 messages with tag 0 to rank 2 over group, which receives 0",
    a_mesh_that_a_rank_lacks: "groups, but rank 3 creates",
    more_rows: "rank 0 sends 1 rows to rank 3, which expects 2",
    longer_parts: "rank 0 sends 2 rows to rank 3, which expects 3",
    a_tensor_that_a_rank_does_not_take: "The first missing collective: scatter to rank 0",
    on_the_host: "are on different devices, one on the CPU and one on the GPU",
    one_after_the_other_on_nccl: "over nccl, where a group sends one message at a time, rank 0 waits in recv",
}


@pytest.mark.every_case
@pytest.mark.tier("test")
@pytest.mark.parametrize("loop", [*list(WRONG)[::3], *in_tier("all", list(WRONG)[1::3] + list(WRONG)[2::3])])
def test_a_wrong_loop_is_found(loop: Loop) -> None:
    problems = rehearsed(loop).problems
    assert WRONG[loop] in "\n".join(problems)
    assert "test_loops.py:" in problems[0] or "creates" in problems[0]


REFUSED: dict[str, tuple[Loop, str]] = {
    "room for another number": (
        lambda model, *_: dist.all_gather_into_tensor(on_device(model, 13), on_device(model, 3)),
        "has 13 elements, but 4 ranks have 3 each",
    ),
    "too few tensors": (
        lambda model, *_: dist.all_gather([on_device(model, 3)] * 3, on_device(model, 3)),
        "has 3 tensors, but the group has 4 ranks",
    ),
    "splits of other rows": (
        lambda model, *_: dist.all_to_all_single(on_device(model, 3), on_device(model, 4), [1] * 4, [1] * 4),
        r"receives 3 rows, but the split sizes are \[1, 1, 1, 1\]",
    ),
    "too short a list of objects": (lambda *_: dist.all_gather_object([None], rank()), "IndexError"),
    "of any sender": (
        lambda model, *_: dist.recv(on_device(model, 3)) if rank() == 0 else dist.send(on_device(model, 3), 0),
        "must name a sender; got recv.*test_loops.py",
    ),
    "without an end": (lambda model, *_: forever(model), "more than .* calls: .*\n.*loop that waits for a value"),
}


def forever(model: Any) -> None:
    while on_device(model, 1).item() > 0:
        dist.barrier()


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_what_backends_refuse_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.tools.rehearsal.one_rank._MOST", 500)
    loop, text = REFUSED[name]
    with pytest.raises(RuntimeError, match=f"(?s)fails in its rehearsal.*{text}"):
        rehearsed(loop)


def different_before(model: Any, optimizer: Any, batch: Any) -> None:
    dist.all_reduce(on_device(model, 3 + (rank() == 1)))
    dist.barrier()
    if rank() == 2:
        raise ValueError("3 is not 4")


@pytest.mark.tier("test")
def test_what_did_not_fit_before_a_rank_failed_is_told() -> None:
    with pytest.raises(RuntimeError) as error:
        rehearsed(different_before)
    text = str(error.value)
    assert text.startswith("rank 2 of 4 fails in its rehearsal:\nTraceback")
    assert "ValueError: 3 is not 4\nBefore that, call " in text and "does not have" not in text
    assert "have different sizes, [(3,)] and [(4,)]:\n  rank 0: all_reduce over world [3] float32\n" in text
