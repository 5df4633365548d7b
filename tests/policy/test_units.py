"""Counting units in a config and sharing them out; what does not fit says both numbers and what would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import ConfigError, PolicyError
from autopar.policy.schema import UnitSpec, Where
from autopar.policy.units import UnitTable


def table(may_be_empty: frozenset[str] = frozenset(), **config: Any) -> UnitTable:
    specs = {
        "kv": UnitSpec("kv", "kv_heads", Where("p", 1), replicate=True),
        "heads": UnitSpec("heads", "n_heads", Where("p", 2), follows="kv"),
        "ffn": UnitSpec("ffn", "inferred", Where("p", 3)),
        "vocab": UnitSpec("vocab", "vocab_size", Where("p", 4)),
        "plain": UnitSpec("plain", "n_heads", Where("p", 5)),
        "after": UnitSpec("after", "n_heads", Where("p", 6), follows="ffn"),
    }
    sizes = {"kv_heads": 3, "n_heads": 9, "vocab_size": 17, **config}
    return UnitTable(specs, SimpleNamespace(**sizes), "Model", may_be_empty)


def layout(units: list[str], elements: int, size: int, config: UnitTable | None = None) -> Any:
    return (config or table()).layout(units, 0, elements, size, "proj", Where("p", 9))


def test_the_width_of_a_unit_is_inferred() -> None:
    found = layout(["heads", "kv", "kv"], 15 * 4, 2)
    assert [(block.unit, block.count, block.width) for block in found.blocks] == [
        ("heads", 9, 4),
        ("kv", 3, 4),
        ("kv", 3, 4),
    ]
    assert [block.shares for block in found.blocks] == [((0, 6), (6, 9)), ((0, 2), (2, 3)), ((0, 2), (2, 3))]
    found = layout(["ffn", "ffn"], 74, 2)
    assert [(block.count, block.width) for block in found.blocks] == [(37, 1), (37, 1)]


@pytest.mark.parametrize(
    ("kv", "heads", "size", "kv_shares", "head_shares"),
    [
        (1, 4, 3, ((0, 1), (0, 1), (0, 1)), ((0, 2), (2, 3), (3, 4))),
        (2, 8, 3, ((0, 1), (0, 1), (1, 2)), ((0, 2), (2, 4), (4, 8))),
        (3, 9, 4, ((0, 1), (0, 1), (1, 2), (2, 3)), ((0, 2), (2, 3), (3, 6), (6, 9))),
        (3, 9, 2, ((0, 2), (2, 3)), ((0, 6), (6, 9))),
    ],
)
def test_query_heads_stay_with_their_kv_head(kv: int, heads: int, size: int, kv_shares: Any, head_shares: Any) -> None:
    units = table(kv_heads=kv, n_heads=heads)
    assert units.shares("kv", kv, size) == kv_shares
    assert units.shares("heads", heads, size) == head_shares
    assert units.family("heads") == units.family("kv") == "kv"


def test_only_what_may_be_empty_may_be() -> None:
    assert layout(["vocab"], 17, 4, table(frozenset({"vocab"}))).ranges(3) == ((13, 17),)
    assert layout(["vocab"], 3, 4, table(frozenset({"vocab"}), vocab_size=3)).ranges(3) == ()
    with pytest.raises(ConfigError, match="3 vocab cannot be shared out over 4 ranks"):
        layout(["vocab"], 3, 4, table(vocab_size=3))
    assert layout(["hidden"], 3, 4).ranges(3) == ()


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError) as info:
        layout(["heads"], 36, 10)
    assert str(info.value) == (
        "tensor_parallel_size=10 does not fit Model: 9 heads cannot be shared out over 10 ranks.\n"
        "  'heads' is n_heads=9 (p:2), cut by proj (p:9).\n"
        "  Largest size that fits this model: 9."
    )
    with pytest.raises(ConfigError, match=r"5 ffn cannot.*\n  'ffn' is counted on the parameter \(p:3\), cut by proj"):
        layout(["ffn"], 5, 6)
    units = table(kv_heads=9)
    layout(["heads"], 36, 2, units)  # heads are cut too, so they bound what fits
    with pytest.raises(ConfigError, match="Largest size that fits this model: 9"):
        layout(["ffn"], 20, 21, units)


# units, elements, changes of the config, message
WRONG: list[tuple[list[str], int, dict[str, Any], str]] = [
    (["plain"], 40, {}, r"p:9: proj has 40 features, \[plain\] describes 9 equal parts: 40 / 9 is not whole"),
    (["plain", "plain"], 45, {}, r"p:9: .*\[plain, plain\] describes 18 equal parts: 45 / 18 is not whole"),
    (["ffn", "ffn"], 75, {}, "p:9: .*describes 2 equal parts: 75 / 2 is not whole"),
    (["ffn", "heads"], 75, {}, r"p:9: \[ffn, heads\] of proj mixes an inferred unit with others"),
    (["plain"], 36, {"n_heads": None}, "p:5: 'plain' is n_heads=None in the config, which is no count"),
    (["plain"], 36, {"n_heads": 0}, "p:5: 'plain' is n_heads=0 in the config, which is no count"),
    (["plain"], 36, {"n_heads": True}, "p:5: 'plain' is n_heads=True in the config, which is no count"),
    (["after"], 36, {}, "p:6: 'after' follows 'ffn', whose count is inferred"),
]


@pytest.mark.parametrize(("units", "elements", "config", "message"), WRONG)
def test_units_that_do_not_describe_the_dim(units: list[str], elements: int, config: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=f"^{message}"):
        layout(units, elements, 2, table(**config))


def test_a_count_that_the_config_lacks_names_the_nearest() -> None:
    units = UnitTable({"u": UnitSpec("u", "n_head", Where("p", 1))}, SimpleNamespace(n_heads=2), "Model", frozenset())
    with pytest.raises(
        PolicyError, match=r"^p:1: 'u' is n_head, which SimpleNamespace lacks. Did you mean 'n_heads'\?"
    ):
        units.layout(["u"], 0, 4, 2, "proj", Where("p", 9))


def test_heads_that_do_not_divide_by_their_kv_heads() -> None:
    with pytest.raises(ConfigError, match="8 units cannot follow 3: 8 / 3 is not whole"):
        layout(["heads"], 32, 2, table(n_heads=8))
