"""A rehearsal counts what the planner plans: bytes over each axis, states, peaks; and the timeline of a step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import autopar
from autopar.config import ParallelConfig
from autopar.pipeline_parallel.schedule import Action, make_schedule
from autopar.tools.planner import estimate, network
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.memory_plan import candidate_of
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.rehearsal.run import Rehearsal, _hidden
from autopar.tools.rehearsal.timeline import Slot, Timeline, Work, chrome_trace, play
from autopar.tools.rehearsal.trace import Call, Group
from tests.rehearsal.programs import llama, mixtral

BATCH, SEQUENCE = 8, 64
CASES = yaml.safe_load(Path(__file__).with_name("counted.yaml").read_text())


def build(kind: str = "llama") -> Any:
    with torch.device("meta"):
        model = {"llama": llama, "mixtral": mixtral}[kind]()
    model.set_attn_implementation("sdpa")
    return model


def estimator_of(kind: str, parsed: ParallelConfig) -> Estimator:
    settings = {"precision": parsed.precision, "method": parsed.context_parallel_method}
    settings |= {"dispatch": parsed.expert_dispatch, "sequence": SEQUENCE, "optimizer": "adamw"}
    planned = PlannedModel(build(kind).train(), **settings)
    return Estimator(planned, find_node("dgx-h100"), given=parsed)


def sent(found: Rehearsal) -> dict[str, int]:
    """Bytes by the planner's axes: all copies of a weight are its dp."""
    sums = dict.fromkeys(("tp", "cp", "ep", "pp", "dp"), 0)
    for axis, traffic in found.traffic.items():
        sums[{"edp": "dp", "dp_cp": "dp", "edp_cp": "dp"}.get(axis, axis)] += traffic.bytes
    return sums


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", CASES)
def test_bytes_and_states_are_the_planners(name: str) -> None:
    kind, config, world = CASES[name]
    parsed = ParallelConfig.parse(config, world)
    found = autopar.rehearse(build(kind), config, world, batch=BATCH, sequence=SEQUENCE, gpu="h100")
    assert found.problems == []
    estimate = estimator_of(kind, parsed).estimate(candidate_of(parsed, parsed.data_parallel_size(world), BATCH))
    assert sent(found) == dict(estimate.bytes)
    for rank, held in found.held.items():
        planned = estimate.memory[found.coordinates[rank][0]]
        assert abs(held.weights - planned.weights) < 1000, "buffers are among them"
        assert held.gradients == planned.gradients
        total = planned.total - planned.reserve
        assert abs(held.optimizer - planned.optimizer) < 50_000, "checks keep samples of weights"
        later = planned.gradients + planned.buffers  # that the peak of activations may not meet
        assert 0.93 * (total - later) < held.peak < 1.04 * total
    assert found.timeline is not None and set(found.timeline.slots) == set(found.traces)
    last = min(found.timeline.slots, key=lambda rank: found.timeline.spent(rank)["wait"])
    spent, parts = found.timeline.spent(last), dict(estimate.parts)
    for axis in ("tp", "cp"):
        assert spent.get(axis, 0.0) == pytest.approx(parts[axis], rel=0.01 if kind == "llama" else 0.3)
    assert 1 <= found.timeline.time / estimate.time_without_overlap < 1.6
    hidden = dict(estimate.hidden)["dp"]
    assert found.hidden == hidden == 0 or 0.5 < found.hidden / hidden < 2


@pytest.mark.tier("all")
def test_tensors_with_which_dtensors_find_sizes_are_not_counted() -> None:
    found = autopar.rehearse(build(), {"zero": {"stage": 3}}, 16, batch=1, sequence=2, gpu="h100")
    held, whole = found.held[0], sum(4 * parameter.numel() for parameter in build().parameters())
    assert held.peak < held.weights + held.gradients + held.optimizer + 1.5 * whole, "they have the sizes of all ranks"


def test_bytes_between_nodes() -> None:
    found = autopar.rehearse(build(), {"tp": 2}, 16, gpus_per_node=8)
    tp, dp = found.traffic["tp"], found.traffic["dp"]
    assert (tp.between, found.held, found.timeline) == (0, {}, None)
    assert dp.between == dp.bytes, "the last replica of a node sends to the next node"
    found = autopar.rehearse(build(), {"tp": 2}, 8, gpus_per_node=8)
    assert found.traffic["dp"].between == 0 < found.traffic["dp"].bytes


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
    longer = NODE.network.seconds("all_reduce", 10**9, network.Group(2, 2))  # to another node
    assert apart.time == pytest.approx(3 + longer) and longer > 10 > made.time - 3
    assert play({0: [(both, Work(1.0))]}, {0: NOTHING}, NODE).time == pytest.approx(1 + taken)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_stages_take_the_time_that_the_planner_says(schedule: str, ranks: int, microbatches: int) -> None:
    chunks = {"interleaved": 2, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    order = [*range(ranks)]
    rank_of = order + (order if schedule == "interleaved" else order[::-1]) if chunks == 2 else order
    lists = make_schedule(schedule, rank_of, microbatches)
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

    def message(kind: str, peer: int, action: Action, gradient: bool) -> Call:
        tag = 2 * (action.stage * microbatches + action.microbatch) + gradient
        return call(kind, tuple(range(ranks)), 1, peer, "pp")._replace(tag=tag)

    def calls_of(rank: int) -> tuple[list[tuple[Call, Work]], Work]:
        found: list[tuple[Call, Work]] = []
        work = 0.0
        for action in lists[rank]:
            kind, stage, number = action
            forward = kind == "F"
            before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            if kind != "W" and 0 <= before < len(rank_of) and rank_of[before] != rank:
                found.append((message("recv", rank_of[before], Action(kind, before, number), not forward), Work(work)))
                work = 0.0
            work += seconds[kind]
            if kind != "W" and 0 <= after < len(rank_of) and rank_of[after] != rank:
                found.append((message("send", rank_of[after], action, not forward), Work(work, str(action))))
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
    named = [event for event in written["traceEvents"] if "tid" in event and event["ph"] == "M"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    assert names[first["pid"], first["tid"]] == "compute"


@pytest.mark.parametrize(
    ("stage", "stages", "hides"), [(3, 1, True), (2, 1, True), (3, 2, True), (2, 2, False), (1, 1, False)]
)
def test_a_step_hides_what_the_planner_hides(stage: int, stages: int, hides: bool) -> None:
    sizes = {"pp": stages, "zero": {"stage": stage}}
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
