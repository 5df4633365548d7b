"""Which stage holds what, and schedules as lists: complete, in an order that can run, within their memory."""

import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from autopar.config.sections import SCHEDULES, PipelineConfig
from autopar.dry_run.pipeline_parallel import find_reads
from autopar.errors import ConfigError, UnsupportedModelError
from autopar.pipeline_parallel.schedule import Action, forwards, make_schedule
from autopar.plan.stages import StagePlan, make_stages, partition, rank_of_stage
from autopar.policy.match import find_policy
from tests.features.experts.module_mixtures import nllb
from tests.pipeline_parallel.deep import deep
from tests.random_models import Case, build
from tests.small import llama


def _stages(model, ranks, **settings) -> StagePlan:
    policy = find_policy(model)
    return make_stages(model, policy, ranks, reads=find_reads(model, policy), **settings)


def test_partition_is_the_best_one() -> None:
    draw = random.Random(0)
    for _ in range(60):
        costs = [draw.randrange(1, 50) for _ in range(draw.randrange(1, 9))]
        stages = draw.randrange(1, len(costs) + 1)
        bounds = partition(costs, stages)
        assert bounds[0] == 0
        assert bounds[-1] == len(costs)
        assert all(start < stop for start, stop in itertools.pairwise(bounds))
        worst = max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))
        for inner in itertools.combinations(range(1, len(costs)), stages - 1):
            other = [0, *inner, len(costs)]
            assert worst <= max(sum(costs[a:b]) for a, b in itertools.pairwise(other))


def test_embedding_and_head_are_counted() -> None:
    model = llama(num_hidden_layers=10, vocab_size=500)
    plan = _stages(model, 4)
    assert [stop - start for start, stop in itertools.pairwise(plan.bounds)] == [1, 4, 4, 1]
    assert sum(plan.costs) == sum(p.numel() for p in model.parameters())


def test_stages_by_hand_and_sizes_that_do_not_fit() -> None:
    model = deep("gpt2", 5)
    assert _stages(model, 2, layers_per_stage=[1, 4]).bounds == (0, 1, 5)
    for ranks, settings, words in (
        (2, {"layers_per_stage": [2, 2]}, r"layers_per_stage=\[2, 2\] has 2 stages with 4 blocks in all; .* 5 blocks"),
        (2, {"layers_per_stage": [2, 2, 1]}, "has 3 stages with 5 blocks in all; there are 2 stages"),
        (6, {}, "6 does not fit GPT2LMHeadModel .transformer.h.: 5 blocks cannot be split"),
        (2, {"chunks": 3}, "pipeline_parallel_size=2 x chunks=3"),
    ):
        with pytest.raises(ConfigError, match=words):
            _stages(model, ranks, **settings)


def test_encoder_and_decoder_are_one_row_and_tied_weights_lie_on_both_ends() -> None:
    plan = _stages(deep("gpt2", 4), 4)
    assert plan.holders("transformer.wte.weight") == plan.holders("lm_head.weight") == (0, 3)
    assert plan.holders("transformer.wpe.weight") == (0,) and plan.holders("transformer.ln_f.bias") == (3,)
    assert all(plan.holders(f"transformer.h.{block}.ln_1.weight") == (block,) for block in range(4))
    plan = _stages(deep("bart", 2), 4)
    assert plan.elements[2] == "model.encoder"
    assert plan.bounds == (0, 1, 3, 4, 5)  # the encoder ends with its last block
    assert plan.holders("model.encoder.layernorm_embedding.weight") == (0,)
    assert plan.holders("model.decoder.layernorm_embedding.weight") == (2,)
    assert plan.holders("model.shared.weight") == (0, 2, 3)
    assert _stages(deep("t5", 2), 4).holders("encoder.final_layer_norm.weight") == (1,)


def test_what_several_stages_read_lies_on_all_of_them() -> None:
    """No policy says so: DeBERTa's relative embeddings are read by every block, Zamba's words by every shared one."""
    model = build(Case("deberta", "DebertaForMaskedLM"), 6, 3)
    assert _stages(model, 2).holders("deberta.encoder.rel_embeddings.weight") == (0, 1)
    assert _stages(model, 2).holders("deberta.embeddings.LayerNorm.weight") == (0,)
    zamba = build(Case("zamba", "ZambaForCausalLM"), 6, 3)
    plan = _stages(zamba, 2)
    assert plan.holders("model.embed_tokens.weight") == (0, 1)
    shared = "shared_transf.feed_forward.down_proj.weight"
    assert {plan.holders(name) for name in plan.tensors if name.endswith(shared)} == {(0, 1)}


def test_a_dry_run_with_weights_leaves_the_attributes_of_modules() -> None:
    """Routers of NLLB-MoE, whose forward does not run without data, write their capacity for so many tokens."""
    model = nllb().train()
    before = {path: router.expert_capacity for path, router in routers_of(model)}
    reads = find_reads(model, find_policy(model))
    assert reads is not None and reads.dry_run is not None
    make_stages(model, find_policy(model), 2, reads=reads)
    assert before == {path: router.expert_capacity for path, router in routers_of(model)}
    assert len(before) > 1 and all(module.training for module in model.modules())


def routers_of(model: Any) -> list[tuple[str, Any]]:
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "expert_capacity")]


def test_models_that_are_no_chain_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"must call each block once, in order .it calls 0, 1, 0, 1"):
        _stages(build(Case("hrm_text", "HrmTextForCausalLM"), 6, 3), 2)
    gemma = build(Case("gemma3n_text", "Gemma3nForCausalLM"), 6, 3)  # later layers use keys of earlier ones
    with pytest.raises(ConfigError, match="read outputs of earlier blocks, which leaves 1 groups"):
        _stages(gemma, 4)


def test_placing_stages() -> None:
    assert rank_of_stage(2, 2) == (0, 1, 0, 1)
    assert rank_of_stage(3, 2, folded=True) == (0, 1, 2, 2, 1, 0)
    plan = _stages(deep("llama", 4), 2, chunks=2, folded=True)
    assert plan.stages_on(0) == (0, 3)
    assert plan.holders("lm_head.weight") == plan.holders("model.embed_tokens.weight") == (0,)


def test_plain_data_and_the_meta_device() -> None:
    with torch.device("meta"):
        model = deep("gpt2", 4)
    plan = _stages(model, 2)
    assert json.loads(json.dumps(plan.to_json()))["rank_of"] == [0, 1]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert plan == _stages(deep("gpt2", 4), 2)


TICKS = {"F": 1, "I": 1, "W": 1, "B": 2}
TORCHS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
# Where DualPipeV is defined: twice as many micro-batches as ranks, and more.
SIZES = [(ranks, microbatches) for ranks in (2, 3, 5) for microbatches in range(2 * ranks, 4 * ranks + 1)]


def _layout(name: str, ranks: int) -> tuple[int, ...]:
    config = PipelineConfig.of({"schedule": name}, ranks, [])
    return rank_of_stage(ranks, config.chunks, folded=config.folded)


def _play(lists: list[list[Action]], stages: int) -> list[int]:
    """Run the lists as the engine does: an action waits until its input is there. AssertionError if all wait.

    Returns the ticks that each rank is idle until all are done.
    """
    ends: dict[Action, int] = {}
    places, free = [0] * len(lists), [0] * len(lists)
    while any(place < len(row) for place, row in zip(places, lists, strict=True)):
        moved = False
        for rank, row in enumerate(lists):
            while places[rank] < len(row) and (due := _due(row[places[rank]], ends, stages)) is not None:
                action = row[places[rank]]
                ends[action] = free[rank] = max(free[rank], due) + TICKS[action.kind]
                places[rank] += 1
                moved = True
        assert moved, f"deadlock at {[row[p : p + 1] for row, p in zip(lists, places, strict=True)]}"
    busy = [sum(TICKS[action.kind] for action in row) for row in lists]
    return [max(free) - ticks for ticks in busy]


def _peak(actions: list[Action]) -> int:
    """The most forwards that wait for their backward at one time: what activations need memory for."""
    most = now = 0
    for action in actions:
        now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, now)
    return most


def _due(action: Action, ends: dict[Action, int], stages: int) -> int | None:
    """The tick from which an action's inputs are there; None if an input is not made yet."""
    kind, stage, m = action
    if kind == "F":
        return 0 if stage == 0 else ends.get(Action("F", stage - 1, m))
    if kind == "W":
        return ends.get(Action("I", stage, m))
    forward = ends.get(Action("F", stage, m))
    if forward is None or stage == stages - 1:
        return forward
    gradient = ends.get(Action("I", stage + 1, m), ends.get(Action("B", stage + 1, m)))  # a half or a whole backward
    return None if gradient is None else max(forward, gradient)


def _complete(lists: list[list[Action]], rank_of: tuple[int, ...], microbatches: int) -> None:
    """Each stage and micro-batch: one forward, and one backward or both its halves, on the stage's rank."""
    found: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(lists):
        for action in row:
            assert rank_of[action.stage] == rank
            found[action.stage, action.microbatch] = found.get((action.stage, action.microbatch), "") + action.kind
    assert found.keys() == {(s, m) for s in range(len(rank_of)) for m in range(microbatches)}
    assert set(found.values()) <= {"FB", "FIW"}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 13])
def test_every_action_once_and_no_deadlock(name: str, ranks: int, microbatches: int) -> None:
    rank_of = _layout(name, ranks)
    lists = make_schedule(name, rank_of, microbatches)
    _complete(lists, rank_of, microbatches)
    kinds = {action.kind for row in lists for action in row}
    if name != "dualpipev":
        assert kinds == set("FIW" if name in ("zero-bubble", "zbv") else "FB")
    else:
        assert kinds == set("FBIW" if 2 * ranks <= microbatches else "FIW")
    _play(lists, len(rank_of))
    _play(forwards(name, rank_of, microbatches), len(rank_of))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_dualpipev_is_in_torchs_order(ranks: int, microbatches: int) -> None:
    rank_of = _layout("dualpipev", ranks)
    lists = make_schedule("dualpipev", rank_of, microbatches)
    _complete(lists, rank_of, microbatches)
    torchs = SimpleNamespace(pp_group_size=ranks, _n_microbatches=microbatches)
    for rank, row in enumerate(lists):
        expected = [
            Action(TORCHS[each.computation_type.name], each.stage_index, each.microbatch_index)
            for pair_or_one in ScheduleDualPipeV._calculate_single_rank_operations(torchs, rank)
            for each in pair_or_one.sub_actions or (pair_or_one,)
        ]
        assert row == expected
        # The stages of a V, each with a micro-batch, and one more (the paper's table 2).
        assert _peak(row) == 2 * ranks + 1


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 5), (3, 7), (4, 8), (4, 43), (8, 37)])
def test_interleaved_with_any_number_of_chunks_and_micro_batches(chunks: int, ranks: int, microbatches: int) -> None:
    rank_of = rank_of_stage(ranks, chunks, folded=False)
    lists = make_schedule("interleaved", rank_of, microbatches)
    _complete(lists, rank_of, microbatches)
    assert _play(lists, len(rank_of)) == [3 * (ranks - 1)] * ranks
    most = max(_peak(row) for row in lists)
    assert most <= (chunks - 1) * (ranks + -(-(microbatches % ranks) // (microbatches // ranks))) + 2 * ranks - 1


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (4, 43), (8, 83)])
def test_idle_time_is_the_textbooks_with_any_number_of_micro_batches(name: str, ranks: int, microbatches: int) -> None:
    rank_of = _layout(name, ranks)
    idle = set(_play(make_schedule(name, rank_of, microbatches), len(rank_of)))
    ticks = {"gpipe": 3, "1f1b": 3, "interleaved": 3, "zero-bubble": 1, "zbv": 1, "dualpipev": 1}[name]
    assert idle == {ticks * (ranks - 1)}  # of stages that are half as long where a rank has two


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 19])
def test_what_goes_one_way_between_two_ranks_is_taken_in_the_order_of_sending(
    name: str, ranks: int, microbatches: int
) -> None:
    """On nccl, which has no tags, another order would mix messages up."""
    rank_of = _layout(name, ranks)
    lists = make_schedule(name, rank_of, microbatches)
    sent: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    taken: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for rank, row in enumerate(lists):
        for kind, stage, m in row:
            if kind == "W":
                continue
            way, step = ("forward", 1) if kind == "F" else ("backward", -1)
            for other, here in ((stage + step, sent), (stage - step, taken)):
                if 0 <= other < len(rank_of) and rank_of[other] != rank:
                    pair = (rank, rank_of[other]) if here is sent else (rank_of[other], rank)
                    here.setdefault((way, *pair), []).append((other if here is sent else stage, m))
    assert sent == taken


def test_the_textbook_lists() -> None:
    def shown(name: str, ranks: int, microbatches: int) -> list[str]:
        lists = make_schedule(name, _layout(name, ranks), microbatches)
        return [" ".join(f"{a.kind}{a.microbatch}" for a in row) for row in lists]

    assert shown("1f1b", 2, 4) == ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert shown("gpipe", 2, 2) == ["F0 F1 B0 B1", "F0 F1 B0 B1"]
    assert shown("zero-bubble", 2, 3) == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
    assert shown("interleaved", 2, 2) == ["F0 F1 F0 F1 B0 B1 B0 B1", "F0 F1 F0 B0 F1 B1 B0 B1"]
    first, second = make_schedule("dualpipev", _layout("dualpipev", 2), 4)
    assert " ".join(map(str, first)) == ("F0 F1 F2 F0@3 I0@3 W0@3 F1@3 F3 B1@3 F2@3 B0 B2@3 F3@3 B1 B3@3 I2 W2 I3 W3")
    assert " ".join(map(str, second)) == (
        "F0@1 F0@2 F1@1 F1@2 F2@1 B0@2 F2@2 B0@1 F3@1 B1@2 F3@2 B1@1 B2@2 B2@1 I3@2 I3@1 W3@2 W3@1"
    )


def test_activations_in_memory() -> None:
    for ranks in (2, 4, 8):
        for microbatches in (ranks, 4 * ranks):
            rank_of = _layout("1f1b", ranks)
            one = [_peak(row) for row in make_schedule("1f1b", rank_of, microbatches)]
            assert one == [ranks - rank for rank in range(ranks)]
            assert [_peak(row) for row in make_schedule("gpipe", rank_of, microbatches)] == [microbatches] * ranks
            assert max(_peak(row) for row in make_schedule("zero-bubble", rank_of, microbatches)) <= ranks
            folded = make_schedule("zbv", _layout("zbv", ranks), microbatches)
            assert max(_peak(row) for row in folded) <= 2 * ranks
