"""The timeline of a step: calls played under the planner's costs, written for Perfetto."""

import json
from dataclasses import replace

import pytest

from autopar.config import ParallelConfig
from autopar.pipeline_parallel.schedule import Action, make_schedule
from autopar.tools.planner import estimate, network
from autopar.tools.planner.hardware import find_node
from autopar.tools.rehearsal.run import _hidden
from autopar.tools.rehearsal.timeline import Slot, Timeline, Work, chrome_trace, play
from autopar.tools.rehearsal.trace import Call, Group

NODE = replace(find_node("dgx-h100"), network=network.Network(1e9, 1e8))
NOTHING = Work()


def call(kind: str, ranks: tuple[int, ...], size: int, peer: int = -1, name: str = "tp") -> Call:
    return Call(kind, Group(name, ranks), ((size,),), "float32", peer=peer, where="train.py:7")


def test_a_collective_begins_with_the_last_rank_and_goes_around_the_ring() -> None:
    both = call("all_reduce", (0, 1), 250_000_000)  # 1 GB, of which each sends 2 x 1/2 at 1 GB/s
    taken = NODE.network.seconds("all_reduce", 10**9, network.Group(2))
    made = play({0: [(both, Work(1.0))], 1: [(both, Work(3.0))]}, {0: Work(2.0), 1: NOTHING}, NODE)
    assert made.time == pytest.approx(3 + taken + 2)
    assert made.spent(0) == pytest.approx({"compute": 3.0, "wait": 2.0, "tp": taken})
    assert made.spent(1) == pytest.approx({"compute": 3.0, "tp": taken, "wait": 2.0}), "until the last rank ends"
    alone = replace(NODE, gpus=1)
    apart = play({0: [(both, Work(1.0))], 1: [(both, Work(3.0))]}, {0: NOTHING, 1: NOTHING}, alone)
    assert apart.time == pytest.approx(3 + NODE.network.seconds("all_reduce", 10**9, network.Group(2, 2))), (
        "to another node"
    )
    assert apart.time > 3 + 10 > made.time


def test_ranks_that_were_not_rehearsed_are_there_at_once() -> None:
    both = call("all_reduce", (0, 1), 250_000_000)
    taken = NODE.network.seconds("all_reduce", 10**9, network.Group(2))
    assert play({0: [(both, Work(1.0))]}, {0: NOTHING}, NODE).time == pytest.approx(1 + taken)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_stages_take_the_time_that_the_planner_says(schedule: str, ranks: int, microbatches: int) -> None:
    chunks = {"interleaved": 2, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    order = [*range(ranks)]
    rank_of = order + (order if schedule == "interleaved" else order[::-1]) if chunks == 2 else order
    lists = make_schedule(schedule, rank_of, microbatches)
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    group = tuple(range(ranks))

    def message(kind: str, peer: int, action: Action, gradient: bool) -> tuple[Call, Work]:
        tag = 2 * (action.stage * microbatches + action.microbatch) + gradient
        return call(kind, group, 1, peer, "pp")._replace(tag=tag), NOTHING

    def calls_of(rank: int) -> tuple[list[tuple[Call, Work]], Work]:
        found: list[tuple[Call, Work]] = []
        work = 0.0
        for action in lists[rank]:
            kind, stage, number = action
            forward = kind == "F"
            before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            if kind != "W" and 0 <= before < len(rank_of) and rank_of[before] != rank:
                own, _ = message("recv", rank_of[before], Action(kind, before, number), not forward)
                found.append((own, Work(work)))
                work = 0.0
            work += seconds[kind]
            if kind != "W" and 0 <= after < len(rank_of) and rank_of[after] != rank:
                own, _ = message("send", rank_of[after], action, not forward)
                found.append((own, Work(work, str(action))))
                work = 0.0
        return found, Work(work)

    traces = {rank: calls_of(rank) for rank in range(ranks)}
    alone = replace(NODE, gpus=1, network=network.Network(1e30, 1e30, latency=0.25))
    made = play({r: found for r, (found, _) in traces.items()}, {r: left for r, (_, left) in traces.items()}, alone)
    travels = alone.network.seconds("send", 4, network.Group(2, 2))
    planned = estimate.play(lists, len(rank_of), lambda action: seconds[action.kind], travels)
    assert made.time == pytest.approx(planned)
    for rank, actions in enumerate(lists):
        assert made.spent(rank)["compute"] == pytest.approx(sum(seconds[action.kind] for action in actions))


def test_the_file_for_perfetto() -> None:
    both = call("all_reduce", (0, 1), 250_000_000)
    name = "stage 0: forward of micro-batch 3"
    made = play({0: [(both, Work(1.0, name))], 1: [(both, Work(3.0))]}, {0: Work(2.0), 1: NOTHING}, NODE)
    written = json.loads(json.dumps(chrome_trace(made)))
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    first = events[0]
    assert (first["name"], first["ts"], first["dur"]) == ("stage 0: forward of micro-batch 3", 0, 1e6)
    (reduced,) = [event for event in events if event["pid"] == 1 and event["cat"] == "tp"]
    taken = NODE.network.seconds("all_reduce", 10**9, network.Group(2)) * 1e6
    assert (reduced["ts"], reduced["dur"]) == (3e6, pytest.approx(taken)) and reduced["args"] == {"where": "train.py:7"}
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in written["traceEvents"]
        if "tid" in event and event["ph"] == "M"
    }
    assert names[first["pid"], first["tid"]] == "compute"


@pytest.mark.parametrize(
    ("stage", "stages", "hides"), [(3, 1, True), (2, 1, True), (3, 2, True), (2, 2, False), (1, 1, False)]
)
def test_a_step_hides_what_the_planner_hides(stage: int, stages: int, hides: bool) -> None:
    sizes = {"model_parallelism": {"pipeline_parallel_size": stages}, "zero": {"stage": stage}}
    timeline = Timeline({0: [Slot(0, 4, "compute", ""), Slot(4, 7, "dp", ""), Slot(7, 8, "tp", "")]})
    assert timeline.time == 8
    hidden = 3 - network.exposed(3, 4) if hides else 0.0
    assert _hidden(ParallelConfig.parse(sizes), timeline) == pytest.approx(hidden)


def test_the_average_of_gradients_hides_behind_the_last_backward() -> None:
    names = [f"stage {stage}: backward of micro-batch {number}" for number in (0, 1) for stage in (2, 0)]
    slots = [Slot(2 * at, 2 * at + 2, "compute", name) for at, name in enumerate(names)]
    slots += [Slot(8, 9, "dp", "all_reduce of 5"), Slot(9, 12, "dp", "broadcast of 5")]
    hidden = _hidden(ParallelConfig.parse({}), Timeline({0: slots}))
    assert hidden == pytest.approx(1 - network.exposed(1, 4))
