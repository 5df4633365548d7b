"""What the benchmarks measure with: the limit, recorded collectives, memory by parts, ranks."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks import traffic, variants
from benchmarks.models import build, tokens
from benchmarks.ranks import RanksTimeout, run_ranks
from benchmarks.step import ROWS, greedy
from benchmarks.tensor_memory import peak_of
from tests.harness.worlds import pooled

FAMILY, SIZE = ROWS["tiny"]


@pooled(world_size=2)
def test_the_limit_computes_alone_and_its_collectives_are_those_of_autopar() -> None:
    plain, ids = build(FAMILY, SIZE), tokens(SIZE)
    ours = variants.autopar_model(plain, "autopar", 2)
    limit = variants.limit(plain, 2)
    assert isinstance(ours, variants.Made)
    if dist.get_rank() == 0:  # the other rank takes no part
        limit.loss(ids)
    dist.barrier()
    found = traffic.record(lambda: limit.loss(ids))
    shape = ids.numel() * SIZE["hidden"]
    assert sum(each.name == "allreduce" and each.elements == shape for each in found) >= 4 * SIZE["layers"]
    assert [p.shape for p in limit.model.parameters()] == [p.shape for p in ours.model.parameters()]
    traffic.replay(found)()
    traffic.replay_on_axis(found, ours.model.mpu.tp)()
    ours.model.mpu.destroy()
    limit.model.mpu.destroy()


@pooled(world_size=2)
def test_what_is_compared_computes_the_same() -> None:
    plain, ids = build(FAMILY, SIZE), tokens(SIZE)
    expected = variants.plain_model(plain).loss(ids).detach()
    for made in (variants.autopar_model(plain, "autopar", 2), variants.dtensor(plain, 2)):
        assert isinstance(made, variants.Made)
        loss = made.loss(ids).detach()
        torch.testing.assert_close(loss.full_tensor() if hasattr(loss, "full_tensor") else loss, expected)
        grad = made.model.model.norm.weight.grad
        torch.testing.assert_close(grad, plain.model.norm.weight.grad, rtol=1e-4, atol=1e-6)
    whole = variants.dtensor(plain, 2, whole_logits=True)
    assert isinstance(whole, variants.Made)
    with torch.no_grad():
        assert torch.equal(
            greedy(whole.model, ids, 4), plain.generate(ids, max_new_tokens=4, eos_token_id=None)[:, -4:]
        )


def test_the_parts_of_the_memory_are_those_of_known_tensors() -> None:
    model = torch.nn.Linear(100, 1000, bias=False)  # 400,000 bytes
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.zeros(50, 100)

    def step() -> None:
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak = peak_of(step, model, optimizer, {1000})
    assert peak.parts["weights"] == peak.parts["gradients"] == 400_000
    assert 800_000 <= peak.parts["optimizer"] < 800_100
    forward = peak_of(lambda: model(x).pow(2).sum(), model, None, {1000})
    assert forward.parts["logits"] == 2 * 50 * 1000 * 4
    assert forward.parts["gradients"] == forward.parts["optimizer"] == 0
    assert forward.total == sum(forward.parts.values())


def rank_main(options: dict[str, int]) -> int:
    rank = int(os.environ["LOCAL_RANK"])
    if options.get("hangs") == rank:
        time.sleep(600)
    if options.get("fails") == rank:
        raise ValueError("this rank fails")
    return options["value"] + rank


@pytest.mark.tier("all")
def test_ranks_return_their_results_and_name_the_one_that_fails_or_hangs() -> None:
    work = "tests.benchmarks.test_measuring:rank_main"
    assert run_ranks(work, {"value": 5}, 2) == [5, 6]
    with pytest.raises(RuntimeError, match=r"(?s)on 2 ranks failed.*rank 1: .*ValueError: this rank fails"):
        run_ranks(work, {"value": 5, "fails": 1}, 2, backend="")
    with pytest.raises(
        RanksTimeout, match=r"(?s)on 1 ranks did not end in 5 s.*rank 0: .*test_measuring.py.* in rank_main"
    ):
        run_ranks(work, {"value": 5, "hangs": 0}, 1, backend="", timeout=5)
