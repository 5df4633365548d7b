"""The form of a policy: what it holds when it is right, and which sections it must have."""

import pytest

from autopar.policy.load import read_user_policy
from autopar.policy.schema import Ratio, UnitRun
from autopar.policy.yaml_reader import Where
from tests.policy.written import RIGHT, refused


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


@pytest.mark.parametrize("section", ["units", "blocks"])
def test_a_section_that_must_be_there(section: str) -> None:
    kept = {"match": {"model_type": "x"}, "units": {}, "blocks": {"path": "h", "modules": {}}}
    del kept[section]
    more = " (nor 'towers', nor 'models')" if section == "blocks" else ""
    with refused(f"policy dict:top: policy 'user' has no section '{section}'{more}"):
        read_user_policy(kept)
