"""The language and the form of policies: parts, keys of rules, towers, models inside, inputs, sections."""

from pathlib import Path

import pytest

from autopar.errors import PolicyError
from autopar.policy.load import load_policy, read_user_policy
from autopar.policy.schema import Input, Ratio, UnitRun
from autopar.policy.yaml_reader import Where
from tests.policy.written import RIGHT, refused, write


def where(line: int) -> Where:
    return Where("policy text", line)


def test_the_new_keys_are_read() -> None:
    policy = read_user_policy(RIGHT["language"])
    (tower,) = policy.towers
    assert policy.classes == ("One", "Two")
    assert policy.models == {"vision?": where(7), "audio": where(7)}
    units = policy.units
    assert (units["heads"].count, units["inner"].align) == ("width / head_dim * 2", 4)
    assert units["ffn"].or_whole and not units["heads"].or_whole and units["heads"].align == 1
    assert tower.blocks_path == "stages.*.layers"
    rules = tower.blocks
    assert rules["in_proj"].parts == (UnitRun("heads", "head_dim"), UnitRun("groups", "2 * n"), UnitRun("ffn"))
    assert rules["up"].inside and rules["out"].enter_output
    assert (rules["conv"].kind, rules["conv"].dim, rules["sinks"].dim) == ("sharded", 1, None)
    assert (rules["norm"].parts, rules["norm"].within) == ((UnitRun("heads", "4"),), "groups")
    assert (rules["latent"].kind, rules["latent"].enter_output) == ("enter_output", False)
    assert (rules["select"].kind, rules["select"].dim) == ("gathered", -2)
    assert (rules["experts"].by_expert, rules["experts.bias"].kind) == ("inner", "once")
    assert tower.block_attributes["conv_dim"] == Ratio((UnitRun("heads", "4"), UnitRun("groups")), None, where(22))
    assert tower.block_attributes["group_size"] == Ratio((UnitRun("heads", "4"),), "groups", where(23))
    assert tower.block_inputs == {"attn.alibi": Input("heads", 0, where(25))}
    assert tower.inputs == {"shared.bias": Input("heads", 1, where(29))}
    assert list(tower.attributes) == ["width"] and list(policy.head_attributes) == ["classes?"]


def test_towers_have_units_of_their_own_over_those_of_the_policy() -> None:
    outer, encoder, decoder = read_user_policy(RIGHT["towers"]).towers
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


def test_a_tower_extends_by_itself_and_a_file_changes_what_its_towers_were(tmp_path: Path) -> None:
    write(
        tmp_path,
        layer="units: {ffn: inferred}\nblocks: {modules: {fc: {column: ffn}, out: {row: ffn}}}",
        base="match: {model_type: a}\nunits: {}\ntowers:\n"
        "  left:\n    extends: layer\n    blocks: {path: l, modules: {ln: replicated}}\n"
        "  right:\n    extends: layer\n    blocks: {path: r}\n",
        mine="extends: base\nmatch: {model_type: b}\n"
        "towers:\n  left: {blocks: {modules: {ln: ~, fc: {column: [ffn, ffn]}}}}\n  right: ~\n",
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
    with refused("policy dict:top: policy 'user' has no section 'units'"):
        read_user_policy({"match": {"model_type": "x"}, "blocks": {"path": "h", "modules": {}}})


def test_a_right_policy() -> None:
    policy = read_user_policy(RIGHT["schema"])
    assert (policy.name, policy.model_types, policy.transformers) == ("user", ("llama",), ">=5,<6")
    assert policy.config == {"tie_word_embeddings": False, "sizes": [1, 2]}
    assert policy.units["kv"].replicate and policy.units["heads"].follows == "kv"
    assert policy.units["ffn"].count == "inferred"
    (tower,) = policy.towers
    blocks = tower.blocks
    assert (tower.name, tower.blocks_path, str(tower.blocks_where)) == ("", "layers", "policy text:9")
    assert blocks["q_proj"].units == ("heads", "kv")
    assert blocks["o_proj"].split_input and not blocks["o_proj"].gather_output
    assert blocks["lm_head?"].gather_output
    assert (blocks["ln"].kind, blocks["ln"].units) == ("replicated", ())
    assert blocks["norm"].units == ("heads",)
    assert tower.block_attributes["attn.groups"] == Ratio((UnitRun("heads"),), "kv", Where("policy text", 18))
    assert tower.block_attributes["attn.heads"] == Ratio((UnitRun("heads"),), None, Where("policy text", 19))
    assert str(blocks["q_proj"].where) == "policy text:12"
