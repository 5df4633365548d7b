"""A region that no row closes: the error says which row was probably meant, and what to write."""

from __future__ import annotations

import pytest

from autopar.errors import PolicyError
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from tests.policy.written import RIGHT
from tests.small import gpt2, llama

GPT2 = """
match: {model_type: [gpt2]}
units: {ffn: inferred}
prefix: {wte: replicated, wpe: replicated}
blocks:
  path: h
  modules:
    ln_1: replicated
    attn: replicated
    ln_2: replicated
    mlp.c_fc: {column: ffn}
    mlp.c_proj: replicated
suffix: {ln_f: replicated}
head: {lm_head?: replicated}
"""


def refused(model: object, text: str) -> str:
    with pytest.raises(PolicyError) as info:
        make_plan(model, read_user_policy(text), 2)
    return str(info.value)


def with_changes(*changes: tuple[str, str]) -> str:
    text = RIGHT["models"]
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def test_kv_heads_that_nothing_follows() -> None:
    text = with_changes((", follows: kv}", "}"), ("heads / kv", "heads"))
    assert refused(llama(), text) == (
        "policy text:14: self_attn.v_proj opens a region sharded by 'kv' that no row closes; add a row rule, or "
        "gather_output: true\n"
        "  self_attn.o_proj closes a region of 'heads' (policy text:15). In grouped-query attention each of the 3 'kv' "
        "serves 2 of the 6 'heads', so they must follow:\n"
        "    heads: {count: num_attention_heads, follows: kv}   (policy text:4)"
    )


def test_numbers_that_do_not_group_get_no_advice() -> None:
    text = with_changes((", follows: kv}", "}"), ("count: num_key_value_heads", "count: head_dim"))
    assert refused(llama(head_dim=4, num_attention_heads=6), text).endswith("gather_output: true")


def test_a_row_that_splits_its_input_itself() -> None:
    text = with_changes(("down_proj: {row: ffn}", "down_proj: {row: ffn, split_input: true}"))
    assert refused(llama(), text).endswith(
        "\n  mlp.down_proj is a row of 'ffn' with split_input: true, which is for an input that arrives whole "
        "(policy text:18); without it this row closes the region."
    )


@pytest.mark.parametrize("conv1d", [False, True])
def test_a_layer_that_was_left_whole(conv1d: bool) -> None:
    text = GPT2 if conv1d else with_changes(("down_proj: {row: ffn}", "down_proj: replicated"))
    name, features, line = ("c_proj", 144, 12) if conv1d else ("down_proj", 37, 18)
    assert refused(gpt2() if conv1d else llama(), text).endswith(
        f"\n  mlp.{name} reads {features} features, as many as the region has, and is replicated "
        f"(policy text:{line}); {{row: ffn}} closes the region."
    )


def test_a_head_has_no_row_to_close_it() -> None:
    text = with_changes(("{column: vocab, gather_output: true}", "{column: vocab}"))
    assert refused(llama(), text).endswith("add a row rule, or gather_output: true")
