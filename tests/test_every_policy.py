"""Every policy file, by itself: each model type, each task head, small and random, against the plain model."""

import copy
import functools
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import autopar
import autopar.dry_run.plan_model
from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import ConfigError
from autopar.features.context_parallel import plan as context_parallel
from autopar.features.sequence_parallel import plan as sequence_parallel
from autopar.plan.make_plan import make_plan
from autopar.policy.files import policy_files, policy_folder
from autopar.policy.load import load_policies, own_policies
from autopar.policy.match import find_policy, supported_model_types
from autopar.policy.schema import SUPPORTED
from autopar.tools.commands.models import auto_classes
from tests.docs.pages import DOCS, same
from tests.exchange import by_rank_0
from tests.harness.worlds import pooled
from tests.parity import check
from tests.random_models import Case, batches, build, cases, heads_of, kind, of_type
from tests.refused_types import (
    LATE_IN_CONTEXT,
    NAMES_IN_MEMORY,
    NOT_BY_ROWS,
    NOT_IN_CONTEXT,
    NOT_REHEARSED,
    ROWS_ON_FOUR,
)
from tests.representatives import IN_EVERY_RUN, REPRESENTATIVES, every_fourth, first_types, one_of_each_structure

# Heads and KV heads at each size: sharded unevenly (6 as 4 + 2), unevenly with replicas, fewer KV heads than ranks.
SIZES = {2: (6, 3), 3: (8, 2), 4: (8, 2)}

# Their merged checkpoints have the names in memory (NAMES_IN_MEMORY).
pytestmark = pytest.mark.filterwarnings("ignore:the conversion of Inkling2Loop:UserWarning")

MODEL_TYPES = sorted(supported_model_types())
COMPOSITES = {
    "gemma3n",
    "qwen2_5_omni",
    "qwen2_5_omni_talker",
    "qwen3_omni_moe",
}  # tests/tensor_parallel/test_composites.py
WHOLE = [name for name in MODEL_TYPES if not of_type(name).inside]  # the others are parts, tested inside these


def _main(model_type: str) -> list[Case]:
    """Cases of the heads that make text, the one with most behind it first; of a model type without, its first head."""
    listed = cases(model_type)
    order = ("seq2seq", "causal", "masked")
    words = sorted(
        (c for c in listed if kind(c.head) in order), key=lambda c: (order.index(str(kind(c.head))), c.variant)
    )
    return words or listed[:1]


def _of_policy(name: str, listed: list[Case]) -> list[Case]:
    """Those cases for whose config this file is the policy, if it is one of several of a model type."""
    policy = own_policies()[name]
    if not policy.config and not policy.classes:
        return listed
    return [case for case in listed if find_policy(build(case, *SIZES[2])).name == name] or listed


def _run(
    wanted: Iterable[Case],
    tp: int,
    heads: int = 0,
    kv_heads: int = 0,
    vocab: int = 131,
    thorough: bool = True,
    rows: bool = False,
    merges: bool = False,
    once: bool = False,
) -> None:
    """Check each case; the first failure names its case on every rank."""
    transformers.logging.set_verbosity_error()
    autopar.dry_run.plan_model.check_plan = lambda *_: True  # the tests of rehearsals have it, without a world
    if once:
        for module, name in ((sequence_parallel, "plan_sequence"), (context_parallel, "plan_rows")):
            setattr(module, name, by_rank_0(getattr(module, name)))
    heads, kv_heads = (heads, kv_heads) if heads else SIZES[tp]
    for case in wanted:
        try:
            model = build(case, heads, kv_heads, vocab=vocab)
            inputs = batches(case, model.config, 2 if thorough else 1)
            words = kind(case.head) in ("causal", "seq2seq") and model.can_generate()
            generates = words and vocab > 3 and of_type(case.model_type).generates
            too = [functools.partial(with_, case, tp) for with_ in (_with_rows, _with_context) if rows]
            checks: list[Callable[[nn.Module, nn.Module], None]] = [_same_folder] if merges else []
            checks += [functools.partial(_same_tokens, batch=inputs[0])] if generates else []

            def first(plain: nn.Module, parallel: nn.Module, checks: Any = checks) -> None:
                for compare in checks:
                    compare(plain, parallel)

            parallel = check(lambda model=model: model, inputs, tp, first=first, step=thorough, too=too)
            parallel.mpu.destroy()
        except Exception as error:
            raise AssertionError(f"{case} at tp {tp}, {heads} heads, {kv_heads} KV heads: {error}") from error


def _with_rows(case: Case, tp: int, build: Callable[[], nn.Module]) -> nn.Module | None:
    return _unless_listed(case, {"tensor_parallel_size": tp, "sequence_parallel": True}, NOT_BY_ROWS, build)


def _with_context(case: Case, cp: int, build: Callable[[], nn.Module]) -> nn.Module | None:
    if case.model_type in LATE_IN_CONTEXT:
        return None
    method = "gather" if len(case.model_type) % 2 else "ulysses"  # the others have their own tests
    sizes = {"context_parallel_size": cp, "context_parallel_method": method}
    return _unless_listed(case, sizes, NOT_IN_CONTEXT, build)


def _unless_listed(case: Case, sizes: Any, listed: Any, build: Callable[[], nn.Module]) -> nn.Module | None:
    """Parallelize, or see that it is refused if the list of refused types says so."""
    try:
        model, refused = autopar.initialize(build(), {"model_parallelism": sizes}), None
    except ConfigError as error:
        model, refused = None, str(error)
    expected = case.model_type in listed
    group = "NOT_BY_ROWS" if listed is NOT_BY_ROWS else "NOT_IN_CONTEXT"
    wrong = f"tests/refused_types.yaml: {group} lists {case.model_type}, which runs"
    if refused:
        wrong = (
            f"tests/refused_types.yaml: {group} lacks {case.model_type}, or tests/zoo a field of its config: {refused}"
        )
    assert (refused is not None) == expected, wrong
    return model


def _same_folder(plain: nn.Module, parallel: nn.Module) -> None:
    """The merged folder is what the plain model would save, byte for byte."""
    place = [tempfile.mkdtemp(prefix="autopar-merge-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)
    merged, expected = Path(place[0], "merged"), Path(place[0], "plain")
    parallel.save_parallelized(merged, merge_checkpoints=True)
    if dist.get_rank() == 0:
        plain.save_pretrained(expected)
        files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (merged, expected)]
        assert files[0].keys() == files[1].keys(), "other files are in the merged folder"
        for name, written in files[1].items():
            assert files[0][name] == written, f"{name} is another in the merged folder"
        shutil.rmtree(place[0])


_MEDIA = ("pixel_values", "image", "input_features", "input_values", "flattened_patches", "audio", "bbox")


def _same_tokens(plain: nn.Module, parallel: nn.Module, batch: dict[str, Any]) -> None:
    """Greedy generation with a cache: from padding on the left for text alone, else from the batch itself."""
    inputs = {
        key: value for key, value in batch.items() if not ("label" in key or key.startswith(("decoder_", "output_")))
    }
    if not plain.config.is_encoder_decoder and not any(key.startswith(_MEDIA) for key in inputs):
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(3, plain.config.get_text_config().vocab_size, (2, 5), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["attention_mask"][0, :2] = 0
        if getattr(plain.config, "add_cross_attention", False):
            if plain.config.model_type != "gpt2":
                return  # the plain ones generate only inside an EncoderDecoderModel
            inputs["encoder_hidden_states"] = torch.randn(2, 5, plain.config.hidden_size, generator=generator)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    if "pixel_values" not in inputs:  # BLIP passes one of its own on
        settings["pad_token_id"] = 0
    tokens = []
    for model in (plain, parallel):
        tokens.append(model.eval().generate(**copy.deepcopy(inputs), **settings))
        model.train()
    assert torch.equal(*tokens), f"generated {tokens[1].tolist()}, the plain model {tokens[0].tolist()}"


@pytest.mark.every_case
@pytest.mark.parametrize("model_type", first_types(REPRESENTATIVES, WHOLE, later="all"))
def test_the_main_head_is_planned_and_rehearsed(model_type: str) -> None:
    listed = cases(model_type)
    if not listed:
        return  # all its heads are left out, with reasons: a part that the tests of another model hold
    for case in _main(model_type)[:1]:
        for tp, sizes in SIZES.items():
            _comes_back(build(case, *sizes), tp)
    done = any(_rehearse(case, 2) for case in [*_main(model_type)[:1], *listed])  # until one can be
    wrong = "lists a type that a dry run supports" if done else "lacks it, or tests/zoo a field that its config needs"
    assert done != (model_type in NOT_REHEARSED), f"tests/refused_types.yaml: NOT_REHEARSED {wrong}"


@pytest.mark.parametrize("model_type", first_types((), WHOLE, later="sweep"))
def test_every_head_is_rehearsed(model_type: str) -> None:
    main = _main(model_type)[:1]
    for case in [case for case in cases(model_type) if case not in main]:
        if case.variant or kind(case.head) in ("seq2seq", "causal", "masked", "base"):
            _rehearse(case, 2)
    for case in main:
        for tp in (3, 4):
            _rehearse(case, tp)


def _rehearse(case: Case, tp: int) -> bool:
    """Whether it can be rehearsed; it is not refused."""
    transformers.logging.set_verbosity_error()
    model = build(case, *SIZES[tp])
    try:
        return check_plan(model, "", make_plan(model, find_policy(model), tp))
    except Exception as error:
        raise AssertionError(f"{case} at tp {tp}: {error}") from error


def _comes_back(model: nn.Module, tp: int) -> None:
    """Every parameter and buffer of the plan is what its shards make, which have the shapes that the plan says."""
    state = dict(model.state_dict(keep_vars=True))
    for name, tensor in make_plan(model, find_policy(model), tp).tensors.items():
        if tensor.layout is not None:
            shards = [tensor.layout.shard(state[name].detach(), rank) for rank in range(tp)]
            for rank, shard in enumerate(shards):
                assert shard.shape == tensor.local_shape(rank), f"{name} of {tp} ranks"
            assert torch.equal(tensor.layout.unshard(shards), state[name]), f"{name} over {tp} ranks"


@pytest.mark.every_case
@pytest.mark.tier("test", only=IN_EVERY_RUN)
@pytest.mark.parametrize("model_type", REPRESENTATIVES)
@pooled(world_size=2)
def test_a_representative_on_two(model_type: str) -> None:
    _run(_main(model_type)[:1], 2, rows=True, merges=True)


@pooled(world_size=3, timeout=300)
def test_one_of_each_family_on_three() -> None:
    for model_type in ("gpt2", "llama", "phi3", "qwen3", "bert", "distilbert", "mixtral", "t5", "bart", "mamba2"):
        _run(_main(model_type)[:1], 3)


@pytest.mark.every_case
@pytest.mark.parametrize("name", every_fourth(one_of_each_structure(WHOLE), 0))  # others in stages
@pooled(world_size=2, timeout=600)
def test_one_of_each_structure_on_two(name: str) -> None:
    first = next(model_type for model_type in own_policies()[name].model_types if model_type in WHOLE)
    _run(_of_policy(name, _main(first))[:1], 2, rows=True, merges=True, once=True)


@pytest.mark.tier("sweep")
@pytest.mark.parametrize("model_type", WHOLE)
@pooled(world_size=2, timeout=600)
def test_every_head_on_two(model_type: str) -> None:
    main = _main(model_type)[:1]
    _run(main, 2, rows=True, merges=model_type not in NAMES_IN_MEMORY, once=True)
    # That gradients add up and that a step finds its parameters is no matter of the head.
    _run([case for case in cases(model_type) if case not in main], 2, thorough=False)


@pytest.mark.tier("sweep")
@pytest.mark.parametrize("name", one_of_each_structure(WHOLE))
@pooled(world_size=4, timeout=600)
def test_one_of_each_structure_on_four(name: str) -> None:
    """More ranks than KV heads, where those may be replicated: without ranks that is planned for every model type."""
    first = next(model_type for model_type in own_policies()[name].model_types if model_type in WHOLE)
    units = [unit for tower in own_policies()[name].towers for unit in tower.units.values()]
    heads, kv_heads = SIZES[4]
    kv_heads = kv_heads if any(unit.replicate for unit in units) else heads // 2
    case = _of_policy(name, _main(first))[:1]
    _run(case, 4, heads, kv_heads, thorough=False, rows=first in ROWS_ON_FOUR, once=True)


LLAMA, QWEN3, PHI3 = (
    Case("llama", "LlamaForCausalLM"),
    Case("qwen3", "Qwen3ForCausalLM"),
    Case("phi3", "Phi3ForCausalLM"),
)
GPT2, BERT = Case("gpt2", "GPT2LMHeadModel"), Case("bert", "BertForMaskedLM")


@pytest.mark.tier("test")
@pooled(world_size=2, timeout=300)
def test_one_two_and_three_kv_heads_on_two() -> None:
    for heads, kv_heads in [(4, 1), (5, 1), (6, 2), (9, 3)]:
        _run([LLAMA, QWEN3, PHI3], 2, heads, kv_heads, thorough=False)


@pytest.mark.tier("sweep")
@pooled(world_size=4, timeout=300)
def test_one_two_and_three_kv_heads_on_four() -> None:
    for heads, kv_heads in [(6, 1), (8, 2), (9, 3), (25, 5)]:
        _run([LLAMA, QWEN3, PHI3], 4, heads, kv_heads, thorough=False)
    _run([GPT2, BERT], 4, 25, thorough=False)


@pooled(world_size=4, timeout=300)
def test_small_and_odd_vocabularies_on_four() -> None:
    for vocab in (17, 3):  # 3 leaves the last rank without a row
        _run([GPT2, LLAMA, BERT, Case("llama", "LlamaForCausalLM", "other tie")], 4, 4, 2, vocab, thorough=False)


def test_the_pages_say_how_many_model_types_have_rows_and_run_over_a_context_axis() -> None:
    refused = NOT_IN_CONTEXT | LATE_IN_CONTEXT
    causal = [name for name in WHOLE if any(kind(case.head) == "causal" for case in _main(name))]
    run = [name for name in causal if name not in refused]
    assert set(WHOLE) >= refused | NOT_BY_ROWS and len(run) >= 150
    rows, context = len(WHOLE) - len(NOT_BY_ROWS), len(WHOLE) - len(refused)
    for name, pattern, numbers in (
        ("sequence-parallel.md", r"\d+(\s+of the \d+ model types run)", rf"{rows}\g<1>"),
        (
            "long-sequences.md",
            r"\d+( of the \d+ model types run,\s)\d+( of the )\d+( causal)",
            rf"{context}\g<1>{len(run)}\g<2>{len(causal)}\g<3>",
        ),
    ):
        changed, found = re.subn(pattern, numbers, (DOCS / name).read_text())
        assert found == 1, name
        same(DOCS / name, changed)


def test_every_head_that_transformers_has_is_tested_or_listed_with_a_reason() -> None:
    for model_type in WHOLE:
        heads = set(heads_of(model_type))
        assert auto_classes(model_type) <= heads
        left_out = set(of_type(model_type).without)
        assert not left_out or left_out & heads, f"{model_type}: {left_out} are left out, but there are no such heads"
        for head in heads - left_out:
            known = kind(head) is not None or of_type(model_type).inputs is not None or "For" not in head
            assert known, f"{model_type}: no inputs for {head}; add them in tests/zoo"
        assert {case.head for case in cases(model_type)} == heads - left_out != set(), model_type


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "model_type", [name for name in MODEL_TYPES if of_type(name).inside and name not in COMPOSITES]
)
def test_a_part_is_inside_what_tests_it(model_type: str) -> None:
    outer = cases(of_type(model_type).inside)
    modules = [module for case in outer[:2] for module in build(case, *SIZES[2]).modules()]
    assert model_type in [each.config.model_type for each in modules if isinstance(each, transformers.PreTrainedModel)]


@pytest.mark.parametrize("path", policy_files(), ids=lambda path: path.stem)
def test_a_policy_says_what_is_special_and_for_which_transformers(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ") and lines[0].endswith(".") and len(lines[0]) > 20, lines[0]
    assert max(map(len, lines)) <= 120
    policies = load_policies(path)
    if "variants:" in lines:
        section = lines.index("variants:")
        names = [place for place in range(section, len(lines)) if re.fullmatch(r"  [\w-]+:", lines[place])]
        assert [lines[place].strip(" :") for place in names] == [policy.name for policy in policies] and len(names) > 1
        for place in names:
            comment = " ".join(itertools.takewhile(lambda line: line.startswith("    # "), lines[place + 1 :]))
            assert comment.endswith(".") and len(comment) > 20, lines[place]
    for policy in policies:
        ranges = {policy.range_of(model_type) for model_type in policy.model_types}
        assert ranges <= {SUPPORTED, ">=5.23,<6", ">=5.24,<6"}  # make test-all has both
    assert SUPPORTED not in path.read_text(), "it holds where a policy says nothing"


def test_the_files_are_as_few_as_the_families() -> None:
    count, most = len(policy_files()), 226
    fix = "add a variant to the file of its family (policies/README.md); only a new family raises the number"
    assert count <= most, f"{count} policies, at most {most}: {fix}"
    fragments = list((policy_folder() / "fragments").glob("*.yaml"))
    uses = "".join(path.read_text() for path in (*policy_files(), *fragments))
    used = {path.stem: len(re.findall(rf"fragments/{path.stem}\b", uses)) for path in fragments}
    assert min(used.values()) > 1, f"a fragment with one user stands in its file: {min(used, key=used.__getitem__)}"
