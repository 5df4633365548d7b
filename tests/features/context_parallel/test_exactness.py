"""Context parallelism against the plain model: masks, lengths, methods, meshes. Logits, losses, every gradient."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import autopar
from autopar.distributed import collectives
from autopar.features.context_parallel import attention
from autopar.layout import rows_layout
from tests.features.context_parallel.meshes import MESHES, compare
from tests.harness.worlds import pooled
from tests.parity import check, close, language_batches
from tests.pipeline_parallel.oracle import check_pipeline
from tests.random_models import Case, build
from tests.small import gpt2, llama

METHODS = ("ulysses", "gather")
VOCAB, WIDTH = 131, 24
Batch = dict[str, Any]


def sizes(cp: int, method: str = "auto", **more: Any) -> dict[str, Any]:
    return {"model_parallelism": {"context_parallel_size": cp, "context_parallel_method": method, **more}}


def made(model_type: str, head: str, heads: int = 4, kv_heads: int = 2, **changes: Any) -> PreTrainedModel:
    model = build(Case(model_type, head), heads, kv_heads, vocab=131)
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def padded_left(length: int) -> dict[str, Any]:
    batch = language_batches(131, count=1, seq=length, seed=2)[0]
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def packed(*lengths: int) -> dict[str, Any]:
    ids = torch.arange(sum(lengths))[None] + 5
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}


def labelled_on_one_rank(length: int) -> dict[str, Any]:
    batch = language_batches(131, count=1, seq=length, seed=3)[0]
    batch["labels"][:, : length // 2 + 2] = -100  # no row of the first rank has a label
    return batch


def batches() -> list[dict[str, Any]]:
    """Lengths that do not divide, padding on both sides, documents, a rank without labels."""
    return [*language_batches(131, count=1, seq=7), padded_left(16), packed(7, 9), labelled_on_one_rank(33)]


CAUSAL = {
    "grouped keys": llama,
    "one key": functools.partial(made, "llama", "LlamaForCausalLM", 4, 1),
    "windows": functools.partial(made, "mistral", "MistralForCausalLM", sliding_window=4),
    "soft-capping": functools.partial(made, "gemma2", "Gemma2ForCausalLM"),
    "some windows": functools.partial(made, "gemma3_text", "Gemma3ForCausalLM"),
    "sinks and experts": functools.partial(made, "gpt_oss", "GptOssForCausalLM"),
    "experts with a loss": functools.partial(made, "qwen3_moe", "Qwen3MoeForCausalLM", output_router_logits=True),
    "fused": functools.partial(made, "phi3", "Phi3ForCausalLM"),
    "learned positions": lambda: gpt2(n_positions=64),
    "attention of its own": functools.partial(made, "bloom", "BloomForCausalLM"),
}


@pytest.mark.tier("test", only=("grouped keys-ulysses", "windows-gather"))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CAUSAL)
@pooled(world_size=2)
def test_masks_and_lengths(name: str, method: str) -> None:
    wanted = [batch for batch in batches() if name != "attention of its own" or "position_ids" not in batch]
    check(CAUSAL[name], wanted, 1, config=sizes(2, method), step=False)


@pytest.mark.parametrize("method", METHODS)
@pooled(world_size=4)
def test_four_ranks(method: str) -> None:
    for build_one in (llama, CAUSAL["some windows"], CAUSAL["one key"]):  # fewer keys, and fewer heads, than ranks
        check(build_one, batches(), 1, config=sizes(4, method), step=False).mpu.destroy()
    speech = functools.partial(made, "moonshine", "MoonshineForConditionalGeneration")  # causal but for one query
    batch = {"input_values": torch.randn(2, 2500), "labels": torch.arange(10).view(2, 5)}
    check(speech, [batch], 1, config=sizes(4, method), step=False).mpu.destroy()
    if method == "ulysses":  # heads of one rank look at two keys
        parts = functools.partial(made, "llama", "LlamaForCausalLM", 6, 2)
        check(parts, batches()[1:2], 1, config=sizes(4, method), step=False).mpu.destroy()


@pytest.mark.parametrize(
    "head",
    [
        *("BertForMaskedLM", "BertForTokenClassification", "LlamaForSequenceClassification"),
        *("T5ForConditionalGeneration", "BartForConditionalGeneration"),
    ],
)
@pooled(world_size=2)
def test_other_heads(head: str) -> None:
    listed = []
    for length, target in ((8, 16), (16, 8), (7, 3)):  # the rows of one sequence are as many as the other has
        batch: dict[str, Any] = language_batches(131, count=1, seq=length)[0]
        if "Conditional" in head:
            batch["labels"] = torch.arange(2 * target).view(2, target)
        elif "Classification" in head:
            batch["labels"] = torch.arange(2) if "Sequence" in head else batch["labels"].clamp(max=2)
        listed.append(batch)
    model = functools.partial(made, head.partition("For")[0].lower(), head)
    check(model, listed, 1, config=sizes(2), step=False)


@pytest.mark.parametrize("method", METHODS)
@pooled(world_size=4)
def test_with_sequence_parallelism(method: str) -> None:
    """Rows of rows between the regions, also recomputed; of 3 tokens one rank has one, which is not cut."""
    listed = [*batches(), *language_batches(131, count=1, seq=3)]
    config = sizes(2, method, tensor_parallel_size=2, sequence_parallel=True)
    for name in ("grouped keys", "experts with a loss") if method == "ulysses" else ("learned positions",):
        check(CAUSAL[name], listed, 2, config=config, step=False).mpu.destroy()
    config["activation_checkpointing"] = {"enable": True}
    listed = [{**batch, "output_hidden_states": True} for batch in listed[:2]]
    check(CAUSAL["some windows"], listed, 2, config=config, first=_same_hidden_states)


def _same_hidden_states(plain: nn.Module, parallel: nn.Module) -> None:
    batch = {**language_batches(131, count=1, seq=9)[0], "output_hidden_states": True}
    with torch.no_grad():
        for ours, theirs in zip(parallel(**batch).hidden_states, plain(**batch).hidden_states, strict=True):
            close(ours, theirs, "hidden states")


@pytest.mark.tier("all")
@pooled(world_size=8)
def test_with_stages_and_sequence_parallelism() -> None:
    """Rows of rows of two stages, recomputed."""
    more = {"sequence_parallel": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = {**sizes(2, **more), "pipeline": {"num_microbatches": 2}, "activation_checkpointing": {"enable": True}}
    for build_one in (CAUSAL["windows"], gpt2):
        check_pipeline(build_one, language_batches(131, batch=4, seq=9), tp=2, **config).mpu.destroy()


@pooled(world_size=2)
def test_long_runs_are_computed_some_queries_at_a_time() -> None:
    batch = language_batches(131, count=1, seq=80)[0]
    del batch["attention_mask"]  # plain causal: no mask is made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_MOST", 1)
        assert len(list(attention._pieces(rows_layout(80, 2, zigzag=True).ranges(0)))) == 4
        check(llama, [batch], 1, config=sizes(2, "gather"), step=False)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_dropout_differs_over_the_rows_and_is_drawn_again_the_same() -> None:
    model = llama(attention_dropout=0.5)
    model.model.layers[0].mlp.dropout = nn.Dropout(0.5)
    model = autopar.initialize(model, sizes(2)).train()
    seen: list[torch.Tensor] = []
    autopar.local_hooks(model.model.layers[0].mlp)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(nn.functional.dropout(torch.ones(64))))
    for _ in range(2):
        torch.manual_seed(5)
        model(**language_batches(131, count=1, seq=8)[0])
    assert torch.equal(seen[0], seen[1])
    everyone = collectives.all_gather(seen[0], model.mpu.cp, collectives.even_layout(128, 2), 0)
    assert not torch.equal(everyone[:64], everyone[64:])


KINDS = {  # of models that hand on states
    "gated delta": ("qwen3_next", "Qwen3NextForCausalLM"),
    "short convolution": ("lfm2", "Lfm2ForCausalLM"),
    "state space": ("bamba", "BambaForCausalLM"),
    "rows that are read early": ("zaya", "ZayaForCausalLM"),
}
GROUPS: dict[str, list[tuple[str, str, str]]] = {
    "common": [
        ("gpt2", "GPT2LMHeadModel", "gather"),
        ("llama", "LlamaForCausalLM", "ulysses"),
        ("t5", "T5ForConditionalGeneration", "ulysses"),
    ],
    "others": [
        *(("gemma3_text", "Gemma3ForCausalLM", "auto"), ("bert", "BertForMaskedLM", "auto")),
        ("bart", "BartForConditionalGeneration", "auto"),
    ],
    "states": [(*kind, "auto") for kind in KINDS.values()],
}
_OTHERS = [("cp2xpp2", "others"), ("cp4", "states"), ("cp2xtp2", "states"), ("cp2xpp2", "states")]


@pytest.mark.every_case
@pytest.mark.tier("test", only=("cp2xtp2-common", "cp2xpp2-common"))
@pytest.mark.tier("sweep", only=(*(f"{mesh}-common" for mesh in list(MESHES)[2:]), "cp2xtp2-states", "cp2xpp2-states"))
@pytest.mark.parametrize(("mesh", "group"), [*((mesh, "common") for mesh in MESHES), *_OTHERS])
@pooled(world_size=4)
def test_meshes_of_four(mesh: str, group: str) -> None:
    """``make verify-all`` has every model type."""
    for model_type, head, method in GROUPS[group]:
        verdict = compare(Case(model_type, head), MESHES[mesh], method)
        if (model_type, mesh) == ("t5", "cp2xsp2"):
            assert verdict.verdict == "refused" and "with sequence_parallel" in verdict.why
            continue
        assert verdict.verdict == "equal", f"{model_type}: {verdict.why}"
        assert (len(verdict.cut) > 0) == (MESHES[mesh].cp > 1)


def test_the_page_has_the_numbers_of_all_meshes() -> None:
    from benchmarks.context_parallel_policies import NOT_IN_STAGES, NOT_OVER_FOUR
    from tests.refused_types import LATE_IN_CONTEXT, NOT_IN_CONTEXT
    from tests.test_every_policy import WHOLE

    page = " ".join((Path(__file__).parents[3] / "docs" / "long-sequences.md").read_text().split())
    assert set(WHOLE) - NOT_IN_CONTEXT - LATE_IN_CONTEXT >= NOT_IN_STAGES.keys() | NOT_OVER_FOUR.keys()
    assert f"{len(NOT_IN_STAGES)} of them have no two stages" in page
    assert f"{len(NOT_OVER_FOUR)} do not fit a context-parallel size of 4" in page


def four_sequences(batch: Batch) -> Batch:
    """Four sequences of a batch of one or two, for two micro-batches."""
    return {n: x.repeat(4 // x.shape[0], 1) if isinstance(x, torch.Tensor) else x for n, x in batch.items()}


def embedded(length: int) -> Batch:
    """Embeddings in the place of ids."""
    (batch,) = language_batches(VOCAB, count=1, batch=4, seq=length)
    del batch["input_ids"]
    return {**batch, "inputs_embeds": torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(3))}


def causal_batches() -> list[Batch]:
    """Padding on both sides, documents, a rank without labels, lengths that do not divide."""
    (short,) = language_batches(VOCAB, count=1, batch=4, seq=7)
    return [short, *map(four_sequences, (padded_left(16), packed(7, 9), labelled_on_one_rank(33)))]


def staged(schedule: str = "1f1b", method: str = "auto", **more: Any) -> dict[str, Any]:
    chunks = {"chunks": 2} if schedule == "interleaved" else {}
    pipeline = {"num_microbatches": 2, "schedule": schedule, **chunks}
    return {**sizes(2, method, pipeline_parallel_size=2, **more), "pipeline": pipeline}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gpipe", "interleaved"])
@pooled(world_size=4)
def test_masks_and_lengths_in_stages(schedule: str) -> None:
    tied, config = schedule != "1f1b", staged(schedule, "ulysses" if schedule == "gpipe" else "auto")
    of_llama = functools.partial(llama, num_hidden_layers=4, tie_word_embeddings=tied)
    check_pipeline(of_llama, [*causal_batches(), embedded(7)], **config).mpu.destroy()
    of_gpt2 = functools.partial(gpt2, n_layer=4, n_positions=64)
    check_pipeline(of_gpt2, causal_batches(), **config).mpu.destroy()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor of each width: logits, and what is ``[batch, rows, width]``."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (leaf.ndim == 3 or (leaf.ndim == 2 and leaf.shape[-1] == VOCAB)):
                width = leaf.shape[-1]
                self.elements[width] = max(self.elements.get(width, 0), leaf.numel())
        return result


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pooled(world_size=4)
def test_no_stage_makes_rows_of_another_rank(tied: bool) -> None:
    """Of embeddings, hidden states and logits; neither does the first step, which is examined."""
    build = functools.partial(llama, tie_word_embeddings=tied, max_position_embeddings=128)
    model: Any = autopar.initialize(build(), staged(method="ulysses")).train()
    for length in (64, 96):
        ids = torch.arange(2 * length).view(2, -1) % VOCAB
        with Largest() as largest:
            model.execute_pipeline({"input_ids": ids, "labels": ids})
        rows = length // 2  # of one sequence: a micro-batch is one
        for width in (WIDTH, VOCAB) if model.mpu.pp.rank else (WIDTH,):
            assert largest.elements[width] <= rows * width, f"{length} tokens, {width} wide: {largest.elements}"
        assert model.mpu.pp.rank or VOCAB not in largest.elements, "logits on the first stage"


@pooled(world_size=4)
def test_the_first_step_gathers_no_logits() -> None:
    """Under tensor parallelism neither: whether a stage has what its logits are made of is seen by their parts."""
    read = []
    for config in (staged(), {**staged(), **sizes(1, tensor_parallel_size=2, pipeline_parallel_size=2)}):
        model: Any = autopar.initialize(llama(), config).train()
        with pytest.MonkeyPatch.context() as patch:
            place = "autopar.tensor_parallel.sharded_logits._Gather.apply"
            patch.setattr(place, lambda logits: read.append(list(logits.shape)))
            model.execute_pipeline(language_batches(VOCAB, count=1, batch=4, seq=9)[0])
        assert not read
        model.mpu.destroy()
