"""Counting units in a config and sharing them out; what does not fit says both numbers and what would."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from torch import nn

from autopar.errors import ConfigError, PolicyError
from autopar.layout import Layout, aligned_shards, replicated_shards
from autopar.plan.units import UnitTable
from autopar.policy.schema import UnitRun, UnitSpec
from autopar.policy.yaml_reader import Where

DATA = yaml.safe_load(Path(__file__).with_name("units.yaml").read_text())
NONE: frozenset[str] = frozenset()


def table(size: int, may_be_empty: frozenset[str] = NONE, **config: Any) -> UnitTable:
    specs = {
        "kv": UnitSpec("kv", "kv_heads", Where("p", 1), replicate=True),
        "heads": UnitSpec("heads", "n_heads", Where("p", 2), follows="kv"),
        "ffn": UnitSpec("ffn", "inferred", Where("p", 3)),
        "vocab": UnitSpec("vocab", "vocab_size", Where("p", 4)),
        "plain": UnitSpec("plain", "n_heads", Where("p", 5)),
        "after": UnitSpec("after", "n_heads", Where("p", 6), follows="ffn"),
    }
    sizes = {"kv_heads": 3, "n_heads": 9, "vocab_size": 17, **config}
    return UnitTable(specs, SimpleNamespace(**sizes), "Model", size, may_be_empty)


def one(size: int, count: str, block: nn.Module | None = None, config: Any = None, **changes: Any) -> UnitTable:
    return UnitTable({"u": UnitSpec("u", count, Where("p", 1), **changes)}, config, "Model", size, NONE)


def layout(units: UnitTable, parts: list[str], elements: int, block: nn.Module | None = None) -> Layout:
    split = [part.partition(" * ") for part in parts]
    return units.layout([UnitRun(u, w or None) for u, _, w in split], 0, elements, "proj", Where("p", 9), block)


def test_the_width_of_a_unit_is_inferred() -> None:
    found = layout(table(2), ["heads", "kv", "kv"], 15 * 4)
    assert [(block.unit, block.count, block.width) for block in found.blocks] == [
        ("heads", 9, 4),
        ("kv", 3, 4),
        ("kv", 3, 4),
    ]
    assert [block.ranges for block in found.blocks] == [((0, 6), (6, 9)), ((0, 2), (2, 3)), ((0, 2), (2, 3))]
    found = layout(table(2), ["ffn", "ffn"], 74)
    assert [(block.count, block.width) for block in found.blocks] == [(37, 1), (37, 1)]


def test_widths_that_are_written_stand_and_the_others_share_what_is_left() -> None:
    parts = ["heads * 5", "kv * d", "kv * 2 * d", "plain"]
    found = layout(table(2, d=4), parts, 9 * 5 + 3 * 4 + 3 * 8 + 9 * 7)
    assert [(block.unit, block.width) for block in found.blocks] == [("heads", 5), ("kv", 4), ("kv", 8), ("plain", 7)]
    assert found.ranges(0) == ((0, 30), (45, 53), (57, 73), (81, 116))
    assert found.ranges(1) == ((30, 45), (53, 57), (73, 81), (116, 144))
    found = layout(table(2), ["heads * 5", "ffn", "ffn"], 45 + 14)  # inferred units count what is left
    assert [(block.count, block.width) for block in found.blocks] == [(9, 5), (7, 1), (7, 1)]


def test_query_heads_stay_with_their_kv_head() -> None:
    units, shares = table(4), replicated_shards(3, 4)
    assert units.ranges("kv", 3, 4) == shares and units.ranges("heads", 9, 4) == aligned_shards(9, 3, shares)
    assert units.family("heads") == units.family("kv") == "kv"


def test_only_what_may_be_empty_may_be() -> None:
    assert layout(table(4, frozenset({"vocab"})), ["vocab"], 17).ranges(3) == ((13, 17),)
    assert layout(table(4, frozenset({"vocab"}), vocab_size=3), ["vocab"], 3).ranges(3) == ()
    with pytest.raises(ConfigError, match="3 vocab cannot be sharded over 4 ranks"):
        layout(table(4, vocab_size=3), ["vocab"], 3)
    assert layout(table(4), ["hidden"], 3).ranges(3) == ()


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError) as info:
        layout(table(10), ["heads"], 36)
    assert str(info.value) == (
        "tensor_parallel_size=10 does not fit Model: 9 heads cannot be sharded over 10 ranks.\n"
        "  'heads' is n_heads=9 (p:2), sharded by proj (p:9).\n"
        "  Largest size that fits this model: 9."
    )
    with pytest.raises(
        ConfigError, match=r"5 ffn cannot.*\n  'ffn' is counted on the parameter \(p:3\), sharded by proj"
    ):
        layout(table(6), ["ffn"], 5)
    units = table(21, kv_heads=9)
    units.used[("heads", 9, 9)] = ("q", Where("p", 8))  # heads are cut too, so they bound what fits
    with pytest.raises(ConfigError, match="Largest size that fits this model: 9"):
        layout(units, ["ffn"], 20)
    with pytest.raises(ConfigError, match="8 units cannot follow 3: 8 / 3 is not an integer"):
        layout(table(2, n_heads=8), ["heads"], 32)


def test_a_count_is_a_product_or_quotient_from_left_to_right() -> None:
    config = SimpleNamespace(width=12, heads=4, expand=2, inner=SimpleNamespace(size=6))
    for expression, expected in DATA["counts"]:
        assert one(1, expression, config=config).count("u") == expected
    for expression, message in DATA["refused"]:
        with pytest.raises(PolicyError) as info:
            one(1, expression, config=config).count("u")
        assert str(info.value) == message
    differing = type("Config", (), {"heads": property(lambda _: (_ for _ in ()).throw(RuntimeError("per layer")))})
    with pytest.raises(PolicyError, match=r"^p:1: 'u' is heads, which may differ between layers. Use an attribute of"):
        one(1, "heads", config=differing()).count("u")


def test_a_count_that_a_block_holds_differs_from_block_to_block() -> None:
    blocks = [nn.Module(), nn.Module()]
    for number, block in enumerate(blocks):
        block.attn = nn.Module()
        block.attn.num_heads = 4 + 4 * number
    units = one(4, "block.attn.num_heads * 2")
    assert [units.count("u", block) for block in blocks] == [8, 16]
    assert [layout(units, ["u"], 32, block).blocks[0].width for block in blocks] == [4, 2]
    with pytest.raises(PolicyError, match=r"^p:1: 'u' is block.attn.heads, which Module lacks. Did you mean 'num_hea"):
        one(2, "block.attn.heads").count("u", blocks[0])
    with pytest.raises(PolicyError, match=r"^p:1: 'u' is block.attn.num_heads, which NoneType lacks.$"):
        one(2, "block.attn.num_heads").count("u")


def test_what_is_made_of_too_few_units_stays_whole_where_the_unit_says_so() -> None:
    assert not one(2, "2", or_whole=True).stays_whole("u")
    assert one(3, "2", or_whole=True).stays_whole("u")
    assert not one(3, "2").stays_whole("u")
    specs = {
        "kv": UnitSpec("kv", "2", Where("p", 1), or_whole=True),
        "heads": UnitSpec("heads", "8", Where("p", 2), follows="kv"),
        "ffn": UnitSpec("ffn", "inferred", Where("p", 3), or_whole=True),
    }
    for size, whole in ((2, False), (4, True)):
        units = UnitTable(specs, None, "Model", size, NONE)
        assert units.stays_whole("kv") == units.stays_whole("heads") == whole  # followers stay with their leader
        assert not units.stays_whole("ffn")  # nobody counted it yet


@pytest.mark.parametrize(("parts", "elements", "config", "message"), DATA["wrong"])
def test_units_that_do_not_describe_the_dim(parts: list[str], elements: int, config: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=f"^{message}"):
        layout(table(2, **config), parts, elements)
