"""What the language reads: parts with widths, keys of each rule, towers, models inside, inputs; and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import PolicyError
from autopar.policy.load import load_policy, read_user_policy
from autopar.policy.schema import Input, Part, Ratio
from autopar.policy.yaml_reader import Where

RIGHT = """\
match: {model_type: mixed, class: [One, Two]}
units:
  groups: {count: n_groups, replicate: true}
  heads: {count: width / head_dim * 2, follows: groups}
  ffn: {count: inferred, or_whole: true}
  inner: {count: block.mixer.inner, multiple: 4}
models: [vision?, audio]
blocks:
  path: stages.*.layers
  modules:
    in_proj: {column: [heads * head_dim, groups * 2 * n, ffn]}
    up: {column: ffn, inside: true}
    out: {row: heads, enter_output: true}
    conv: {sharded: [heads, groups], dim: 1}
    sinks: {sharded: heads}
    norm: {norm_over: heads * 4, within: groups}
    latent: {enter_output: heads}
    select: {gathered: heads, dim: -2}
    experts: {region: ffn, by_expert: inner}
    experts.bias: {once: ffn}
  attributes:
    conv_dim: [heads * 4, groups]
    group_size: heads * 4 / groups
  inputs:
    attn.alibi: {sharded: heads, dim: 0}
attributes:
  width: heads
inputs:
  shared.bias: {sharded: heads, dim: 1}
head_attributes:
  classes?: ffn
"""


def where(line: int) -> Where:
    return Where("policy text", line)


def test_the_new_keys_are_read() -> None:
    policy = read_user_policy(RIGHT)
    (tower,) = policy.towers
    assert policy.classes == ("One", "Two")
    assert policy.models == {"vision?": where(7), "audio": where(7)}
    units = policy.units
    assert (units["heads"].count, units["inner"].multiple) == ("width / head_dim * 2", 4)
    assert units["ffn"].or_whole and not units["heads"].or_whole and units["heads"].multiple == 1
    assert tower.blocks_path == "stages.*.layers"
    rules = tower.blocks
    assert rules["in_proj"].parts == (Part("heads", "head_dim"), Part("groups", "2 * n"), Part("ffn"))
    assert rules["up"].inside and rules["out"].enter_output
    assert (rules["conv"].kind, rules["conv"].dim, rules["sinks"].dim) == ("sharded", 1, None)
    assert (rules["norm"].parts, rules["norm"].within) == ((Part("heads", "4"),), "groups")
    assert (rules["latent"].kind, rules["latent"].enter_output) == ("enter_output", False)
    assert (rules["select"].kind, rules["select"].dim) == ("gathered", -2)
    assert (rules["experts"].by_expert, rules["experts.bias"].kind) == ("inner", "once")
    assert tower.block_attributes["conv_dim"] == Ratio((Part("heads", "4"), Part("groups")), None, where(22))
    assert tower.block_attributes["group_size"] == Ratio((Part("heads", "4"),), "groups", where(23))
    assert tower.block_inputs == {"attn.alibi": Input("heads", 0, where(25))}
    assert tower.inputs == {"shared.bias": Input("heads", 1, where(29))}
    assert list(tower.attributes) == ["width"] and list(policy.head_attributes) == ["classes?"]


# what stands in RIGHT, what stands there instead, line, message
WRONG = [
    ("class: [One, Two]", "class: []", 1, "'class' lists none"),
    ("class: [One, Two]", "class: [1]", 1, "'class' must be text, not 1"),
    ("or_whole: true", "or_whole: 2", 5, "'or_whole' must be true or false, not 2"),
    ("or_whole: true", "or_hole: true", 5, "unknown key 'or_hole' in unit 'ffn'. Did you mean 'or_whole'?"),
    ("multiple: 4", "multiple: four", 6, "'multiple' must be an integer, not 'four'"),
    ("multiple: 4", "multiple: 0", 6, "'multiple' must be at least 1, not 0"),
    ("[vision?, audio]", "vision", 7, "'models' must be a list of paths"),
    ("[vision?, audio]", "[[vision]]", 7, "'models' must be text, not ['vision']"),
    ("groups * 2 * n, ffn]", "groups *, ffn]", 11, "'groups *' has no width after '*'"),
    (
        "groups * 2 * n, ffn]",
        "group * 2, ffn]",
        11,
        "unit 'group' is not defined under 'units'. Did you mean 'groups'?",
    ),
    ("groups * 2 * n, ffn]", "7]", 11, "'column' must be text, not 7"),
    ("[heads * head_dim, groups * 2 * n, ffn]", "[]", 11, "'column' lists no unit"),
    ("column: ffn, inside: true", "row: ffn, inside: true", 12, "'inside' belongs to 'column', not to 'row' (up)"),
    ("inside: true", "inside: 1", 12, "'inside' must be true or false, not 1"),
    (
        "row: heads, enter_output: true",
        "row: heads, enter_output: ffn",
        13,
        "'enter_output' must be true or false, not ",
    ),
    (
        "row: heads, enter_output",
        "column: heads, enter_output",
        13,
        "the rule of out must name exactly one of column, ",
    ),
    ("sharded: [heads, groups], dim: 1", "sharded: heads, dim: one", 14, "'dim' must be an integer, not 'one'"),
    ("{sharded: heads}", "{row: heads, dim: 0}", 15, "'dim' belongs to 'sharded' and 'gathered', not to 'row' (sinks)"),
    (
        "norm_over: heads * 4, within",
        "sharded: heads, within",
        16,
        "'within' belongs to 'norm_over', not to 'sharded' (norm)",
    ),
    ("within: groups", "within: [groups, heads]", 16, "'within' takes the name of one unit, not ['groups', 'heads']"),
    ("within: groups", "within: groups * 2", 16, "'within' takes the name of one unit, not 'groups * 2'"),
    ("within: groups", "within: rows", 16, "unit 'rows' is not defined under 'units'. Did you mean 'groups'?"),
    ("{enter_output: heads}", "{enter_output: true}", 17, "'enter_output' must be text, not True"),
    ("{enter_output: heads}", "{enter_output: [heads, ffn]}", 17, "'enter_output' of latent takes one unit, not 2"),
    (
        "{enter_output: heads}",
        "enter_output",
        17,
        "unknown rule 'enter_output' for latent. Write {enter_output: UNIT}.",
    ),
    ("gathered: heads, dim: -2", "gathered: [heads, ffn]", 18, "'gathered' of select takes one unit, not 2"),
    (
        "region: ffn, by_expert",
        "sharded: ffn, by_expert",
        19,
        "'by_expert' belongs to 'region', not to 'sharded' (experts)",
    ),
    ("by_expert: inner", "by_expert: outer", 19, "unit 'outer' is not defined under 'units'."),
    ("by_expert: inner", "by_experts: inner", 19, "unknown key 'by_experts' in the rule of experts. Did you mean 'by_"),
    ("{sharded: heads}", "{row: heads, opens: true}", 15, "'opens' belongs to 'region', not to 'row' (sinks)"),
    (
        "region: ffn, by_expert",
        "region: ffn, closes: true, by_expert",
        19,
        "of 'opens', 'closes' and 'by_expert' one goes with a region (experts)",
    ),
    ("{sharded: heads}", "{row: heads, repeat: 2}", 15, "'repeat' belongs to 'sharded', not to 'row' (sinks)"),
    ("{once: ffn}", "{once: [ffn, ffn]}", 20, "'once' of experts.bias takes one unit, not 2"),
    ("[heads * 4, groups]", "[heads * 4, group]", 22, "unit 'group' is not defined under 'units'."),
    (
        "heads * 4 / groups",
        "heads / groups / ffn",
        23,
        "group_size must be a unit or the quotient of two, not 'heads / ",
    ),
    ("heads * 4 / groups", "heads / rows", 23, "unit 'rows' is not defined under 'units'."),
    (
        "attn.alibi: {sharded: heads, dim: 0}",
        "attn.alibi: heads",
        25,
        "the input attn.alibi must hold keys, not 'heads'",
    ),
    (
        "attn.alibi: {sharded: heads, dim: 0}",
        "attn.alibi: {sharded: heads}",
        25,
        "the input attn.alibi needs 'sharded' and 'dim'",
    ),
    (
        "sharded: heads, dim: 0",
        "sharded: [heads, ffn], dim: 0",
        25,
        "'sharded' takes the name of one unit, not ['heads', 'ffn']",
    ),
    (
        "sharded: heads, dim: 0",
        "column: heads, dim: 0",
        25,
        "unknown key 'column' in the input attn.alibi. Known: sharded, dim",
    ),
    ("  shared.bias:", "  shared.bias: 1 #", 29, "the input shared.bias must hold keys, not 1"),
    ("  classes?: ffn", "  classes?: rows", 31, "unit 'rows' is not defined under 'units'."),
]


def test_the_earlier_word_for_sharded_is_read_too() -> None:
    earlier = RIGHT.replace("{sharded:", "{cut:")
    assert earlier != RIGHT
    assert read_user_policy(earlier) == read_user_policy(RIGHT)


@pytest.mark.parametrize(("old", "new", "line", "message"), WRONG, ids=[f"{w[2]}-{w[3][:30]}" for w in WRONG])
def test_a_wrong_policy_says_what_and_in_which_line(old: str, new: str, line: int, message: str) -> None:
    assert RIGHT.count(old) == 1
    with pytest.raises(PolicyError) as info:
        read_user_policy(RIGHT.replace(old, new))
    assert str(info.value).startswith(f"policy text:{line}: {message}"), str(info.value)


TOWERS = """\
match: {model_type: pair}
units: {vocab: vocab_size, heads: n_heads}
prefix: {shared: {embedding: vocab}}
towers:
  encoder:
    config: text_config
    units: {heads: encoder_heads, rows: {count: encoder_rows, follows: vocab}}
    blocks: {path: encoder.layers, modules: {q: {column: heads}, o: {row: heads}, r?: {sharded: rows}}}
    suffix: {encoder.norm: replicated}
  decoder:
    blocks: {path: decoder.layers, modules: {q: {column: heads}, o: {row: heads}}}
"""


def test_towers_have_units_of_their_own_over_those_of_the_policy() -> None:
    outer, encoder, decoder = read_user_policy(TOWERS).towers
    assert [tower.name for tower in (outer, encoder, decoder)] == ["", "encoder", "decoder"]
    assert (outer.config, encoder.config, decoder.config) == ("", "text_config", "")
    assert list(outer.prefix) == ["shared"] and not encoder.prefix and list(encoder.suffix) == ["encoder.norm"]
    assert [tower.units["heads"].count for tower in (outer, encoder, decoder)] == [
        "n_heads",
        "encoder_heads",
        "n_heads",
    ]
    assert set(encoder.units) == {"vocab", "heads", "rows"} and set(decoder.units) == {"vocab", "heads"}
    assert (encoder.blocks_path, decoder.blocks_path) == ("encoder.layers", "decoder.layers")
    assert str(encoder.where) == "policy text:5"


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            "    config: text_config",
            "    configs: x",
            6,
            "unknown key 'configs' in tower 'encoder'. Did you mean 'config'?",
        ),
        ("    config: text_config", "    config: [x]", 6, "'config' must be text, not ['x']"),
        ("    config: text_config", "    head: {}", 6, "unknown key 'head' in tower 'encoder'."),
        ("follows: vocab", "follows: vocabs", 7, "unit 'vocabs' is not defined under 'units'. Did you mean 'vocab'?"),
        ("{path: decoder.layers, ", "{", 11, "'blocks' has no 'path'"),
        ("q: {column: heads}, o: {row: heads}, r", "q: {column: head}, r", 8, "unit 'head' is not defined"),
        ("  decoder:\n", "  other: 5\n  decoder:\n", 10, "tower 'other' must hold keys, not 5"),
        ("prefix: {shared", "towers: []\nprefix: {shared", 5, "key 'towers' stands here and in line 3"),
    ],
)
def test_a_wrong_tower_says_what_and_in_which_line(old: str, new: str, line: int, message: str) -> None:
    assert TOWERS.count(old) == 1
    with pytest.raises(PolicyError) as info:
        read_user_policy(TOWERS.replace(old, new))
    assert str(info.value).startswith(f"policy text:{line}: {message}"), str(info.value)


def test_a_tower_extends_by_itself_and_a_file_changes_what_its_towers_were(tmp_path: Path) -> None:
    (tmp_path / "layer.yaml").write_text(
        "units: {ffn: inferred}\nblocks: {modules: {fc: {column: ffn}, out: {row: ffn}}}"
    )
    (tmp_path / "base.yaml").write_text(
        "match: {model_type: a}\nunits: {}\ntowers:\n"
        "  left:\n    extends: layer\n    blocks: {path: l, modules: {ln: replicated}}\n"
        "  right:\n    extends: layer\n    blocks: {path: r}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "extends: base\nmatch: {model_type: b}\n"
        "towers:\n  left: {blocks: {modules: {ln: ~, fc: {column: [ffn, ffn]}}}}\n  right: ~\n"
    )
    base, mine = load_policy(tmp_path / "base.yaml"), load_policy(tmp_path / "mine.yaml")
    assert [list(tower.blocks) for tower in base.towers] == [[], ["fc", "out", "ln"], ["fc", "out"]]
    assert [tower.name for tower in mine.towers] == ["", "left"]
    left = mine.towers[1]
    assert (left.blocks_path, list(left.blocks), left.blocks["fc"].units) == ("l", ["fc", "out"], ("ffn", "ffn"))
    assert str(left.blocks["out"].where) == f"{tmp_path}/layer.yaml:2"
    assert (mine.model_types, base.model_types) == (("b",), ("a",))


def test_models_alone_make_a_policy() -> None:
    policy = read_user_policy("match: {model_type: pair}\nmodels: [text, image]\n")
    assert list(policy.models) == ["text", "image"] and not policy.units
    with pytest.raises(PolicyError, match=r"^policy text:1: policy 'user' has no section 'blocks' \(nor 'towers', nor"):
        read_user_policy("match: {model_type: pair}\n")
