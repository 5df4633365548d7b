"""The form of a policy: what it holds when it is right, and the message with its line when it is not."""

from __future__ import annotations

import pytest

from autopar.errors import PolicyError
from autopar.policy.load import read_user_policy
from autopar.policy.schema import KINDS, Part, Ratio
from autopar.policy.yaml_reader import Where

RIGHT = """\
match:
  model_type: llama
  transformers: ">=5,<6"
  config: {tie_word_embeddings: false, sizes: [1, 2]}
units:
  kv: {count: num_key_value_heads, replicate: true}
  heads: {count: num_attention_heads, follows: kv}
  ffn: inferred
blocks:
  path: layers
  modules:
    q_proj: {column: [heads, kv]}
    o_proj: {row: heads, split_input: true}
    lm_head?: {column: ffn, gather_output: true}
    norm: {replicated: heads}
    ln: replicated
  attributes:
    attn.groups: heads / kv
    attn.heads: heads
"""


def test_a_right_policy() -> None:
    policy = read_user_policy(RIGHT)
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
    assert tower.block_attributes["attn.groups"] == Ratio((Part("heads"),), "kv", Where("policy text", 18))
    assert tower.block_attributes["attn.heads"] == Ratio((Part("heads"),), None, Where("policy text", 19))
    assert str(blocks["q_proj"].where) == "policy text:12"


EXACTLY_ONE = f"the rule of norm must name exactly one of {', '.join(KINDS)}"

# what stands in RIGHT, what stands there instead, line, message
WRONG = [
    ("units:", "unitz:", 5, "unknown key 'unitz' in policy 'user'. Did you mean 'units'? Known: match, units,"),
    ("  model_type: llama\n", "", 1, "'match' has no 'model_type'"),
    ("model_type: llama", "model_type: []", 2, "'model_type' lists none"),
    ("model_type: llama", "model_type: 5", 2, "'model_type' must be text, not 5"),
    ("  path: layers\n", "", 9, "'blocks' has no 'path'"),
    ("path: layers", "path: [a, b]", 10, "'path' must be text, not ['a', 'b']"),
    ("count: num_key_value_heads, ", "", 6, "unit 'kv' has no 'count'"),
    ("replicate: true", "replicated: true", 6, "unknown key 'replicated' in unit 'kv'. Did you mean 'replicate'?"),
    ("replicate: true", "replicate: yeah", 6, "'replicate' must be true or false, not 'yeah'"),
    (
        "follows: kv",
        "follows: kw",
        7,
        "unit 'kw' is not defined under 'units'. Did you mean 'kv'? Defined: kv, heads, ffn",
    ),
    ("follows: kv", "follows: heads", 7, "'heads' follows itself: heads -> heads"),
    ("ffn: inferred", "hidden: inferred", 8, "'hidden' cannot be defined: it stands for single features"),
    ("ffn: inferred", "ffn: 4096", 8, "'ffn' must be text, not 4096"),
    ("ln: replicated", "ln: replicate", 16, "unknown rule 'replicate' for ln. Did you mean 'replicated'?"),
    ("ln: replicated", "ln: column", 16, "unknown rule 'column' for ln. Write {column: UNIT}."),
    ("ln: replicated", "ln: 3", 16, "the rule of ln must hold keys, not 3"),
    ("ln: replicated", "ln: {colum: ffn}", 16, "unknown key 'colum' in the rule of ln. Did you mean 'column'?"),
    ("{replicated: heads}", "{replicated: heads, row: ffn}", 15, EXACTLY_ONE),
    ("{replicated: heads}", "{gather_output: true}", 15, EXACTLY_ONE),
    ("{replicated: heads}", "{replicated: [heads, kv]}", 15, "'replicated' of norm takes one unit, not 2"),
    ("[heads, kv]", "[heads, head]", 12, "unit 'head' is not defined under 'units'. Did you mean 'heads'?"),
    ("split_input", "gather_output", 13, "'gather_output' belongs to 'column', not to 'row' (o_proj)"),
    ("gather_output: true", "gather_output: 1", 14, "'gather_output' must be true or false, not 1"),
    ("heads / kv", "heads / kv / ffn", 18, "attn.groups must be a unit or the quotient of two, not 'heads / kv / ffn'"),
    ("heads / kv", "heads *", 18, "'heads *' has no width after '*'"),
    ("attn.heads: heads", "attn.heads: 4", 19, "'attn.heads' must be text, not 4"),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), WRONG, ids=[f"{w[2]}-{w[3][:30]}" for w in WRONG])
def test_a_wrong_policy_says_what_and_in_which_line(old: str, new: str, line: int, message: str) -> None:
    assert RIGHT.count(old) == 1 or old in ("units:", "split_input")
    with pytest.raises(PolicyError) as info:
        read_user_policy(RIGHT.replace(old, new, 1))
    assert str(info.value).startswith(f"policy text:{line}: ")
    assert message in str(info.value)
    assert info.value.where == f"policy text:{line}"


@pytest.mark.parametrize("section", ["units", "blocks"])
def test_a_section_that_must_be_there(section: str) -> None:
    kept = {"match": {"model_type": "x"}, "units": {}, "blocks": {"path": "h", "modules": {}}}
    del kept[section]
    more = r" \(nor 'towers', nor 'models'\)" if section == "blocks" else ""
    with pytest.raises(PolicyError, match=f"^policy dict:top: policy 'user' has no section '{section}'{more}$"):
        read_user_policy(kept)
