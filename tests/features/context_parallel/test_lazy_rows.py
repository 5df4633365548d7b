"""Local sequences and heads, and their embeddings before the block boundary: operations and readers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.distributed.axis import Axis
from autopar.errors import ConfigError
from autopar.features.context_parallel import attention
from autopar.features.context_parallel.attention import _causal_rows, _of_rows, heads_layout, keys_layout
from autopar.features.context_parallel.lazy_rows import LazyRows, OwnRows, _clipped, may_own_rows
from autopar.features.context_parallel.plan import plan_rows
from autopar.features.context_parallel.state import RowPlan, RowState
from autopar.layout import rows_layout
from autopar.policy.match import find_policy
from autopar.swap import swap
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.random_models import Case, build
from tests.small import gpt2, llama

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])  # [batch, rows]


def _state(method: str = "gather") -> RowState:
    """Rank 1 of two: rows 2 to 5 of 7."""
    state = RowState(Axis("cp", None, range(2), 1), method, RowPlan(()))
    state.start(cutting=True, keeping=True)
    return state


def _pair(width: int = 6) -> tuple[nn.Embedding, Any, RowState]:
    """A plain embedding, and one with the same weights that computes own rows."""
    torch.manual_seed(0)
    plain, made, state = nn.Embedding(10, width), nn.Embedding(10, width), _state()
    made.load_state_dict(plain.state_dict())
    swap(made, OwnRows, _autopar_rows=state, _autopar_own="embed")
    return plain, made, state


ROWS_OF_FEATURES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled": lambda x: x * 3.0,
    "scaled by a number of no dims": lambda x: torch.tensor(3.0) * x,
    "added to what all rows have": lambda x: torch.arange(6.0) + x,
    "added to rows": lambda x: x + torch.arange(14.0).view(2, 7, 1),
    "added to positions": lambda x: x + torch.arange(42.0).view(1, 7, 6),
    "added to itself": lambda x: x + x * 2,
    "normed": lambda x: F.layer_norm(x, (6,), torch.arange(6.0)),
    "projected": lambda x: F.linear(x, torch.arange(18.0).view(3, 6)),
    "dropped in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "in another type": lambda x: x.to(torch.float64),
}


@pytest.mark.parametrize("operation", ROWS_OF_FEATURES.values(), ids=list(ROWS_OF_FEATURES))
def test_what_treats_rows_apart_is_done_to_rows(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    plain, made, state = _pair()
    expected, ahead = operation(plain(IDS)), operation(made(IDS))
    assert isinstance(ahead, LazyRows) and ahead.shape == expected.shape and ahead.dtype == expected.dtype
    rows = state.rows_of(7)
    torch.testing.assert_close(ahead.opened(rows, 1), rows.shard(expected, 1, 1))
    assert not state.spoiled and "has rows 2 to 5" in f"{ahead}"


def gathered(patch: pytest.MonkeyPatch, full: torch.Tensor) -> None:
    """Let a read gather what the other rank would send."""
    patch.setattr("autopar.features.context_parallel.lazy_rows.join", lambda own, *args: full + 0 * own.sum())


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mixed": lambda x: x.cumsum(1),
    "normed over all": lambda x: F.layer_norm(x, (7, 6)),
    "mean over rows": lambda x: x.mean(1, keepdim=True),
    "transposed": lambda x: x.transpose(0, 1),
    "joined": lambda x: torch.cat([x, x], 1),
    "indexed": lambda x: x[:, 1:],
    "rows as features": lambda x: x + x.transpose(1, 2).transpose(1, 2),
}


@pytest.mark.parametrize("operation", READERS.values(), ids=list(READERS))
def test_whatever_else_reads_it_gets_the_whole(
    operation: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, made, state = _pair()
    gathered(monkeypatch, plain(IDS))
    assert torch.equal(operation(made(IDS)), operation(plain(IDS)))
    assert state.spoiled == {"embed"}


def test_frozen_embeddings_and_functions_of_ones_own_lose_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters and gradient checkpointing ask for it in a hook."""
    _, made, state = _pair()
    made.weight.requires_grad_(False)
    made.register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    ahead = made(IDS)
    assert ahead.requires_grad and ahead.is_leaf
    (ahead * 2).opened(state.rows_of(7), 1).sum().backward()
    assert torch.equal(ahead.own.grad, torch.full((2, 4, 6), 2.0))

    plain, made, _ = _pair()
    gathered(monkeypatch, 2 * plain(IDS))
    with pytest.raises(RuntimeError, match=r"would be lost\n  Pass the full tensor: function.apply\(embeddings\[:\]"):
        _Twice.apply(made(IDS)).sum().backward()
    _Twice.apply(made(IDS)[:]).sum().backward()
    assert plain.weight.grad is not None


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_ids_shapes_and_embeddings_that_stay_whole() -> None:
    plain, made, state = _pair()
    for ids in (IDS[:, :1], IDS[0], torch.tensor(3), IDS[None]):  # too short to be cut; other dims
        assert not isinstance(made(ids), LazyRows) and torch.equal(made(ids), plain(ids))
    with pytest.raises(IndexError):  # on the other rank, too, whose rows are fine
        made(IDS.clone().index_fill_(1, torch.tensor([0]), 10))
    state.finish()
    assert not isinstance(made(IDS), LazyRows), "outside of a forward"

    assert may_own_rows(nn.Embedding(3, 2)) and not may_own_rows(nn.Embedding(3, 2, max_norm=1.0))
    assert not may_own_rows(nn.Embedding(3, 2, scale_grad_by_freq=True)) and not may_own_rows(nn.Linear(2, 2))


def test_dropout_draws_for_own_rows() -> None:
    _, made, state = _pair()
    state.region.find_dropout(nn.Sequential(nn.Dropout(0.5)).train())
    state.region.start()
    before = torch.get_rng_state()
    ahead = F.dropout(made(IDS), 0.5, True)
    drawn = torch.rand(())
    assert isinstance(ahead, LazyRows) and 0 < (ahead.own == 0).sum() < ahead.own.numel()
    torch.set_rng_state(before)
    assert torch.equal(F.dropout(made(IDS), 0.5, True).own, ahead.own)
    assert torch.equal(torch.rand(()), drawn), "of the others' generator one number is taken"


@pytest.mark.parametrize(
    ("model_type", "head", "own", "full"),
    [
        ("llama", "LlamaForCausalLM", {"embed_tokens"}, None),
        ("gpt2", "GPT2LMHeadModel", {"wte", "wpe"}, None),
        ("bert", "BertForMaskedLM", {"word_embeddings", "position_embeddings", "token_type_embeddings"}, None),
        ("gemma3_text", "Gemma3ForCausalLM", {"embed_tokens"}, None),
        ("t5", "T5ForConditionalGeneration", {"embed_tokens"}, None),
        ("bart", "BartForConditionalGeneration", {"embed_tokens"}, None),
        ("mamba", "MambaForCausalLM", None, {"mixer"}),
        ("bloom", "BloomForCausalLM", None, {"self_attention"}),
        ("qwen3_moe", "Qwen3MoeForCausalLM", None, set()),
        ("deepseek_v32", "DeepseekV32ForCausalLM", None, {"self_attn"}),  # an indexer that looks at all rows
    ],
)
def test_the_rehearsal_finds_what_computes_own_rows_and_what_needs_all(
    model_type: str, head: str, own: set[str] | None, full: set[str] | None
) -> None:
    model = build(Case(model_type, head), 6, 3)
    plan = plan_rows(model, find_policy(model), "", 2)
    assert own is None or {path.rpartition(".")[2] for path in plan.own} == own
    if full is not None:
        assert {path.rpartition(".")[2] for path in plan.whole} == full
        assert plan.through and plan.head == "lm_head"


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
@pooled(world_size=2)
def test_readers_in_a_model(make: Callable[..., Any]) -> None:
    """Hooks of adapters, noise and readers; hidden states; embeddings that are given; all at once with the loss."""
    plain, parallel = make().train(), autopar.initialize(make(), {"cp": 2})
    parallel.train()
    batch = language_batches(131, count=1, seq=9)[0]
    kept: dict[Any, list[torch.Tensor]] = {plain: [], parallel: []}

    def run(model: Any, hook: Any, **more: Any) -> torch.Tensor:
        autopar.local_hooks(model.get_input_embeddings())
        handle = model.get_input_embeddings().register_forward_hook(hook)
        torch.manual_seed(0)
        out = model(**{**batch, **more}, use_cache=False)
        handle.remove()
        hidden = out.hidden_states or ()
        assert not any(isinstance(x, LazyRows) for x in hidden)
        return out.loss + sum(x.square().mean() for x in hidden)

    def noise(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + torch.zeros_like(out).uniform_(-1, 1)

    def read(module: Any, args: Any, out: torch.Tensor) -> None:
        kept[plain if module is plain.get_input_embeddings() else parallel].append(out[:, -1].detach())

    for hook in (lambda module, args, out: out.requires_grad_(True), noise, read):
        for hidden in (False, True):
            for model in (plain, parallel):
                loss = run(model, hook, output_hidden_states=hidden)
                loss.backward()
                kept[model].append(loss.detach())
    given = plain.get_input_embeddings()(batch["input_ids"]).detach()
    for model in (plain, parallel):
        run(model, read, input_ids=None, inputs_embeds=given).backward()
    for actual, expected in zip(kept[parallel], kept[plain], strict=True):
        close(actual, expected, "what was seen")
    autopar.average_gradients(parallel)
    same_gradients(parallel, plain)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("length", [2, 3, 7, 16, 33])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_row_lies_on_one_rank_and_each_rank_has_two_at_least(ranks: int, length: int, zigzag: bool) -> None:
    layout = rows_layout(length, ranks, zigzag=zigzag)
    assert (layout is None) == (length < 2 * ranks)
    if layout is None:
        return
    rows = [layout.shard(torch.arange(length), rank, 0) for rank in range(ranks)]
    assert sorted(torch.cat(rows).tolist()) == list(range(length))
    sizes = [len(each) for each in rows]
    assert max(sizes) - min(sizes) <= (2 if zigzag else 1)
    assert min(sizes) > 1
    assert torch.equal(layout.unshard(rows, 0), torch.arange(length))


def test_zigzag_rows_heads_and_masks() -> None:
    for zigzag, looks in ((True, [132, 132, 132, 132]), (False, [36, 100, 164, 228])):
        layout = rows_layout(32, 4, zigzag=zigzag)
        assert [int(_causal_rows(layout, rank, torch.device("cpu")).sum()) for rank in range(4)] == looks

    layout = heads_layout(3, 4, 2)  # 3 keys of 4 query heads each
    assert [layout.ranges(rank) for rank in range(2)] == [((0, 8),), ((8, 12),)]

    for mask, kind in ((torch.ones(2, 7), r"\[2, 7\]"), ("blocks", "str")):
        call: Any = SimpleNamespace(mask=mask, given={})
        with pytest.raises(ConfigError, match=f"requires a mask of 4 dims; 'sdpa' attention got {kind}"):
            attention._with_whole_keys(rows_layout(7, 2), 0, "sdpa", call, False)


@pytest.mark.parametrize("zigzag", [False, True])
def test_rows_of_a_mask_are_those_of_the_queries(zigzag: bool) -> None:
    layout = rows_layout(7, 2, zigzag=zigzag)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    for rank in range(2):
        assert torch.equal(_of_rows(causal, layout, rank), _causal_rows(layout, rank, torch.device("cpu")))
    assert _of_rows(causal[:, :, :1], layout, 0).shape == (1, 1, 1, 7)  # one row for all


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, 6), (1, 7), (2, 3), (0, 0)])
def test_shifted_rows_stay_on_their_ranks(start: int, stop: int, zigzag: bool) -> None:
    layout = rows_layout(7, 2, zigzag=zigzag)
    some = _clipped(layout, start, stop)
    assert some.size == stop - start
    for rank in range(2):
        held = [row for low, high in layout.ranges(rank) for row in range(low, high) if start <= row < stop]
        assert [row + start for low, high in some.ranges(rank) for row in range(low, high)] == held


@pytest.mark.parametrize(
    ("heads", "kv_heads", "needed"),
    [
        (8, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (8, 1, [(0, 1)] * 4),
        (6, 2, [(0, 1), (0, 2), (1, 2), (1, 2)]),  # 2, 2, 1 and 1 heads: the second rank's are of two groups
        (3, 3, [(0, 1), (1, 2), (2, 3), None]),
    ],
)
def test_of_few_keys_each_rank_gets_those_of_its_heads(heads: int, kv_heads: int, needed: list[Any]) -> None:
    layout = keys_layout(heads_layout(heads, 1, 4), kv_heads)
    assert [layout.ranges(rank) for rank in range(4)] == [() if each is None else (each,) for each in needed]
