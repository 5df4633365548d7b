"""The network: times of collectives against NCCL's formulas, worked out by hand, and their limits."""

import itertools
from dataclasses import replace

import pytest

from autopar.errors import ConfigError
from autopar.tools.planner.hardware import GPUS, find_gpu, find_node
from autopar.tools.planner.network import DATA, Group, Network, exposed
from autopar.tools.planner.search import Space

H100 = find_node("dgx-h100").network
NVLINK, NET = 450e9 * 0.82, 50e9 * 0.96
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
GROUPS = (Group(2), Group(8), Group(2, 2), Group(16, 2), Group(64, 64), Group(512, 64), Group(2048, 1024))
MILLION, BILLION = 10**6, 10**9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_larger_messages_take_longer_and_none_less_than_a_hop(kind: str, group: Group) -> None:
    times = [H100.seconds(kind, 2**power, group) for power in range(6, 34)]
    # Corrections of a tree's bandwidth rise from one size to the next.
    assert all(later > 0.85 * earlier for earlier, later in itertools.pairwise(times))
    assert times[0] > 6e-6 and times[-1] > times[0]


@pytest.mark.parametrize("group", [Group(8), Group(16, 2), Group(64, 8)], ids=str)
def test_large_tensors_approach_the_bandwidth_of_the_slowest_link(group: Group) -> None:
    ring = H100.ring_bandwidth(group)
    for kind, rounds in {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}.items():
        ideal = rounds * 100 * BILLION * (group.ranks - 1) / group.ranks / ring
        assert ideal < H100.seconds(kind, 100 * BILLION, group) < 1.02 * ideal
    assert ring == pytest.approx(NVLINK, rel=0.06), "8 network cards are about as fast as NVLink"


def test_times_by_hand() -> None:
    # LL: 6.6 us, and 7 hops of 0.6 us in a node; between 4 nodes 28 of a posted message and 3 of 2.7
    assert H100.seconds("all_gather", 1, Group(8)) == pytest.approx((6.6 + 7 * 0.6) * 1e-6, rel=1e-3)
    assert H100.seconds("all_gather", 1, Group(32, 4)) == pytest.approx((6.6 + 28 * 1.0 + 3 * 2.7) * 1e-6, rel=1e-3)
    assert H100.seconds("send", 1, Group(2, 2)) == pytest.approx((6.6 + 2.7) * 1e-6, rel=1e-3)
    # A ring in simple, over 8 GPUs of a node: 8.4 us, 7 hops of 3.4 us, and 7/8 GB at 369 GB/s
    assert H100.seconds("all_gather", BILLION, Group(8)) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 0.875e9 / NVLINK)
    # A tree in LL: up and down 6 levels of 5 us; a ring would have 128 hops of 2.7 us
    assert H100.seconds("all_reduce", 64, Group(64, 64)) == pytest.approx((6.8 + 2 * 6 * 5.0) * 1e-6, rel=1e-3)
    assert H100.seconds("all_gather", 64, Group(64, 64)) > 2 * H100.seconds("all_reduce", 64, Group(64, 64))


def test_ranks_of_a_node_use_their_cards_side_by_side() -> None:
    one, two, eight = (H100.ring_bandwidth(Group(16 * beside, 16)) for beside in (1, 2, 8))
    assert (two, eight) == (pytest.approx(2 * one), pytest.approx(8 * one)) and 8 * one < NVLINK
    assert one == pytest.approx(NET / (1 + 4 * DATA["assumed"]["fabric_loss"]))


def test_more_nodes_are_less_efficient() -> None:
    times = [
        H100.seconds("all_gather", BILLION, Group(nodes, nodes)) * nodes / (nodes - 1) for nodes in (2, 16, 128, 1024)
    ]
    assert times == sorted(times) and times[-1] > 1.2 * times[0]
    small = [H100.seconds("all_gather", MILLION, Group(nodes, nodes)) for nodes in (2, 16, 128, 1024)]
    assert small[-1] > 10 * small[0], "hops count where messages are small"


def test_an_exchange_between_all_ranks_fills_both_links() -> None:
    inside, across = H100.seconds("all_to_all", BILLION, Group(8)), H100.seconds("all_to_all", BILLION, Group(16, 2))
    assert inside == pytest.approx(0.875e9 / NVLINK, rel=0.01)
    assert across == pytest.approx(0.5e9 / H100.usable_inter(2), rel=0.01)


def test_latency_and_links_of_a_machine() -> None:
    slow = replace(H100, latency=50e-6)
    assert slow.seconds("all_gather", 1, Group(4, 4)) == pytest.approx(
        H100.seconds("all_gather", 1, Group(4, 4)) + 150e-6
    )
    assert slow.seconds("all_gather", 1, Group(8)) == H100.seconds("all_gather", 1, Group(8))
    pcie = find_node("2x4090").network
    assert not pcie.nvlink and pcie.seconds("all_reduce", BILLION, Group(2)) > 10 * H100.seconds(
        "all_reduce", BILLION, Group(2)
    )
    assert Network(1e9, 1e9).seconds("all_reduce", BILLION, Group(1)) == 0


def test_no_communication_is_hidden_for_nothing() -> None:
    share = DATA["assumed"]["overlap"]
    assert 0 < share < 1
    assert exposed(2.0, 10.0) == pytest.approx(2.0 * (1 - share))
    assert exposed(10.0, 2.0) == pytest.approx(10.0 - 2.0 * share)
    assert exposed(1.0, 0.0) == 1.0


def test_groups_lie_on_nodes() -> None:
    sizes = {(8, 1): (8,), (2, 4): (2,), (4, 4): (4, 2), (4, 8): (4, 4), (64, 2): (64, 16), (1, 8): (1,)}
    for (size, stride), expected in sizes.items():
        assert Group.of(size, stride, 8) == Group(*expected)


def test_machines_by_name_and_number() -> None:
    named = find_node("dgx-a100")
    assert (named.gpu, named.gpus, named.network.intra, named.network.inter) == (GPUS["a100"], 8, 300e9, 25e9)
    assert (find_node("2xt4").gpus, find_node("4xl40s").gpu.name) == (2, "l40s")
    assert find_node("2x4090").gpu == GPUS["rtx4090"] and find_node("l4").gpus == 8
    assert find_node("8xh100", gpus_per_node=4).gpus == 4
    own = find_node(
        "h100", gpu_memory=96, inter_node_bandwidth=12.5, latency=30, storage_bandwidth=5, memory_bandwidth=2400
    )
    assert (own.gpu.memory, own.gpu.bandwidth, own.network.inter) == (96e9, 2.4e12, 12.5e9)
    assert (own.network.latency, own.storage) == (pytest.approx(30e-6), 5e9)
    for node in DATA["nodes"]:
        assert find_node(node).gpus > 1
    with pytest.raises(ConfigError, match=r"node='dgx-h10' is not known. Did you mean 'dgx-h100'\? Known: dgx-a100"):
        find_node("dgx-h10")
    with pytest.raises(ConfigError, match=r"gpu='h10' is not known. Did you mean 'h100'\? Known: a100, h100"):
        find_gpu("h10")
    with pytest.raises(ConfigError, match="inter-node-bandwidth must be above 0, not 0"):
        find_node("dgx-h100", inter_node_bandwidth=0.0)


def test_every_gpu_says_what_an_estimate_needs() -> None:
    assert all(gpu.memory >= 16e9 and gpu.flops > gpu.flops_fp32 > 8e12 for gpu in GPUS.values())
    for name, gpu in GPUS.items():
        network = find_node(name).network
        assert gpu.bandwidth > network.intra > network.inter > 3e9 and 0.5 < gpu.products < 1


def test_tensor_parallel_groups_stay_within_nodes() -> None:
    assert {tp for tp, *_ in Space(30, 8, 30).meshes(1024)} == {1, 2}, "3, 5 and 6 would cross"
    assert {tp for tp, *_ in Space(6, 8, 6).meshes(1024)} == {1, 2, 3, 6}, "one node"
    assert {tp for tp, *_ in Space(24, 8, 24).meshes(1024)} == {1, 2, 4, 8}
