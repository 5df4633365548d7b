"""Bytes that a rank sends in a step with context parallelism: the formulas of docs/long-sequences.md, and its table.

The whole step is recorded, so a collective too many, or one of more heads or rows than it needs, is another number.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import autopar
from benchmarks.traffic import Collective, record
from tests.docs.pages import DOCS
from tests.features.context_parallel.test_exactness import made, sizes
from tests.harness.worlds import pooled
from tests.small import llama

LAYERS, HEADS, HEAD_DIM, BATCH, LENGTH, BYTES = 2, 8, 4, 3, 32, 4
SENT = {  # of what a rank gives: all but its own part; its part to each other rank; a part of each other rank's
    "alltoall_base": lambda n: (n - 1) / n,
    "allgather_base": lambda n: n - 1,
    "reduce_scatter_base": lambda n: n - 1,
}
CASES = [(n, kv_heads, method) for n in (2, 4) for kv_heads in (4, 2, 1) for method in ("ulysses", "gather")]


def sent(collectives: Sequence[Collective], ranks: int) -> int:
    return round(sum(each.bytes * SENT[each.name](ranks) for each in collectives))


def of_a_block(method: str, n: int, kv_heads: int) -> int:
    """The formula, forward and backward: they send as much."""
    rows = BATCH * LENGTH // n
    if method == "ulysses":
        exchanged = max(kv_heads, n)
        return 2 * 2 * rows * (HEADS + exchanged) * HEAD_DIM * (n - 1) * BYTES // n
    return 2 * 2 * rows * kv_heads * HEAD_DIM * (n - 1) * BYTES


def of_the_loss(n: int) -> int:
    """One number of a row, and its gradient."""
    return 2 * (BATCH * LENGTH // n) * (n - 1) * BYTES


def counted(n: int, kv_heads: int, method: str, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that this rank sends in the second step: checks that happen once are done."""
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "hidden_size": HEADS * HEAD_DIM}
    model = autopar.initialize(llama(**heads, num_hidden_layers=LAYERS), sizes(n, method))
    found = second_step(model, batch)
    assert all(each.name in SENT for each in found), found
    return sent(found, n)


def second_step(model: Any, batch: dict[str, Any]) -> list[Collective]:
    """Collectives of a step, without what the checks compare."""

    def step() -> None:
        model(**batch).loss.backward()

    step()
    return [each for each in record(step) if each.dtype != torch.int64]


@pooled(world_size=4)
def test_each_rank_sends_what_the_formulas_say() -> None:
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 131
    batch = {"input_ids": ids, "labels": ids}
    for n, kv_heads, method in CASES:
        expected = LAYERS * of_a_block(method, n, kv_heads) + of_the_loss(n)
        assert counted(n, kv_heads, method, batch) == expected, (n, kv_heads, method)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_page_has_these_numbers(kv_heads: int) -> None:
    numbers = [of_a_block(method, n, kv_heads) for n in (2, 4) for method in ("ulysses", "gather")]
    row = f"| {kv_heads} | " + " | ".join(f"{number:,}" for number in numbers) + " |"
    assert row in (DOCS / "long-sequences.md").read_text(), row


def handed_on(config: Any, name: str, itemsize: int = BYTES) -> int:
    """The formula, one way: the last rows that a convolution saw, and the state of the heads."""
    if name == "lfm2":
        return BATCH * (config.conv_L_cache - 1) * config.hidden_size * itemsize
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    channels = 2 * keys * config.linear_key_head_dim + values * config.linear_value_head_dim
    state = values * config.linear_key_head_dim * config.linear_value_head_dim
    return BATCH * ((config.linear_conv_kernel_dim - 1) * channels + state) * itemsize


@pooled(world_size=4)
def test_a_module_that_hands_on_states_sends_what_the_page_says() -> None:
    """To the rank behind, and back; whatever the length. The rest is attention and the loss."""
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 131
    kinds = (("qwen3_next", "Qwen3NextForCausalLM"), ("lfm2", "Lfm2ForCausalLM"))
    for n, (name, head) in itertools.product((2, 4), kinds):
        model = autopar.initialize(made(name, head, 4, 4), sizes(n, "ulysses"))
        found = second_step(model, {"input_ids": ids, "labels": ids, "use_cache": False})
        rank, messages = model.mpu.cp.rank, [each for each in found if each.name == "send"]
        neighbours = (rank > 0) + (rank < n - 1)
        assert sum(each.bytes for each in messages) == neighbours * handed_on(model.config, name), (name, n)
        others = [each for each in found if each.name not in ("send", "recv")]
        rows, head_dim = BATCH * LENGTH // n, getattr(model.config, "head_dim", model.config.hidden_size // 4)
        attention = 4 * rows * (4 + 4) * head_dim * (n - 1) * BYTES // n
        assert sent(others, n) == attention + of_the_loss(n), (name, n)
        model.mpu.destroy()
