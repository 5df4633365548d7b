"""Reading files, text and dicts, what ``extends`` merges, and mistakes with their file and line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import PolicyError
from autopar.plan.make_plan import make_plan
from autopar.policy.files import policy_folder
from autopar.policy.load import load_policies, load_policy, own_policies, read_user_policy
from autopar.policy.schema import SUPPORTED
from tests.policy.written import MISTAKES, RIGHT, family, mounting, refused, write
from tests.small import llama

MATCH = "match: {model_type: mine}\n"
BLOCKS = "units: {ffn: inferred}\nblocks: {path: h, modules: {fc: {column: ffn}, out: {row: ffn}}}\n"


def test_a_policy_as_path_text_and_dict_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, mine=MATCH + BLOCKS)
    plain = {
        "match": {"model_type": "mine"},
        "units": {"ffn": "inferred"},
        "blocks": {"path": "h", "modules": {"fc": {"column": "ffn"}, "out": {"row": "ffn"}}},
    }
    found = [read_user_policy(source) for source in (path, str(path), MATCH + BLOCKS, plain)]
    for policy in found:
        assert policy.model_types == ("mine",)
        assert {path: (rule.kind, rule.units) for path, rule in policy.towers[0].blocks.items()} == {
            "fc": ("column", ("ffn",)),
            "out": ("row", ("ffn",)),
        }
    assert [str(policy.towers[0].blocks["out"].where) for policy in found] == [
        f"{path}:3",
        f"{path}:3",
        "policy text:3",
        "policy dict:blocks.modules.out",
    ]
    assert [policy.name for policy in found] == ["mine", "mine", "user", "user"]
    assert read_user_policy(found[0]) is found[0]


def test_fragments_merge_and_rules_of_the_file_replace_theirs(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mine=f"extends: [fragments/a, fragments/b]\n{MATCH}"
        "blocks:\n  modules:\n    fc: {column: [ffn, ffn]}\n    ln: ~\n",
        fragments__a="units: {ffn: inferred}\n"
        "blocks:\n  path: h\n  modules:\n    fc: {column: ffn}\n    ln: replicated\n",
        fragments__b="units: {ffn: inferred}\nblocks:\n  modules:\n    out: {row: ffn}\n  attributes: {width: ffn}\n",
    )
    (tower,) = load_policy(path).towers
    assert list(tower.blocks) == ["fc", "out"]
    assert tower.blocks["fc"].units == ("ffn", "ffn")  # a rule is replaced as a whole
    assert str(tower.blocks["fc"].where) == f"{path}:5"
    assert str(tower.blocks["out"].where) == f"{tmp_path}/fragments/b.yaml:4"
    assert list(tower.block_attributes) == ["width"]


def test_a_policy_of_the_users_extends_what_comes_with_autopar(tmp_path: Path) -> None:
    text = "extends: llama\nmatch: {model_type: mine}\nblocks:\n  modules:\n    post_attention_layernorm: ~\n"
    for source in (text, write(tmp_path, mine=text)):
        policy = read_user_policy(source)
        assert policy.model_types == ("mine",) and policy.transformers == SUPPORTED
        blocks = policy.towers[0].blocks
        assert "post_attention_layernorm" not in blocks and "input_layernorm" in blocks
        assert str(blocks["mlp.down_proj"].where).startswith("policies/fragments/module_gated.yaml:")
        assert str(policy.units["kv_heads"].where).startswith("policies/fragments/heads_grouped.yaml:")


def test_fragments_of_fragments_and_a_file_beside_come_first(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mine=f"extends: fragments/outer\n{MATCH}",
        fragments__outer="extends: fragments/mlp_gated\nblocks: {path: h}\n",
        fragments__mlp_gated="units: {ffn: inferred}\nblocks: {modules: {only: {column: ffn}}}\n",
    )
    assert list(load_policy(path).towers[0].blocks) == ["only"]  # not the mlp_gated of autopar


CONTRADICTIONS = [
    ("fc: replicated", "fc: {column: ffn}"),
    ("fc: {column: ffn}", "fc: {column: ffn, gather_output: true}"),
    ("fc: {column: ffn}", "fc: {row: ffn}"),
    ("fc: {column: [ffn, ffn]}", "fc: {column: ffn}"),
]


@pytest.mark.parametrize(("one", "other"), CONTRADICTIONS)
def test_two_fragments_that_contradict_each_other(tmp_path: Path, one: str, other: str) -> None:
    frame = "units: {ffn: inferred}\nblocks:\n  path: h\n  modules:\n    "
    files = {"fragments__a": frame + one, "fragments__b": frame + other}
    for names in ("a", "b"), ("b", "a"):
        path = write(
            tmp_path, **{f"mine_{names[0]}": f"extends: [fragments/{names[0]}, fragments/{names[1]}]\n{MATCH}"}, **files
        )
        left, right = (f"{tmp_path}/fragments/{name}.yaml:5" for name in names)
        with refused(f"{left}: 'blocks.modules.fc' contradicts {right}; set it in this file"):
            load_policy(path)
    for word in ("fc: {row: ffn}", "fc: ~"):
        expected = ["row"] if "row" in word else []
        path = write(
            tmp_path,
            **{f"said{len(word)}": f"extends: [fragments/a, fragments/b]\n{MATCH}blocks: {{modules: {{{word}}}}}\n"},
        )
        assert [rule.kind for rule in load_policy(path).towers[0].blocks.values()] == expected
    path = write(tmp_path, gone=f"extends: [fragments/a, fragments/b]\n{MATCH}blocks: ~\n")
    with pytest.raises(PolicyError, match="policy 'gone' has no section 'blocks'"):
        load_policy(path)


def test_a_circle_and_a_missing_file(tmp_path: Path) -> None:
    path = write(tmp_path, a="extends: b\n", b="extends: a\n")
    with pytest.raises(PolicyError, match=r"b\.yaml:1: 'a' extends itself"):
        load_policy(path)
    with pytest.raises(PolicyError, match="autopar has a policy llama, which it finds by the model's type: leave "):
        read_user_policy("llama")
    with refused("policy file 'nowhere.yaml' does not exist; a policy is a path, a dict or YAML text"):
        read_user_policy("nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PolicyError, match=r"binary\.yaml:1: cannot be read: byte 0xff is not UTF-8"):
        read_user_policy(tmp_path / "binary.yaml")


def test_files_that_extend_each_other_many_times(tmp_path: Path) -> None:
    names = [f"f{n}" for n in range(40)]
    for name, following in zip(names, [*names[1:], "llama"], strict=True):  # twice each: 2 ** 40 ways
        write(tmp_path, **{name: f"extends: [{following}, {following}]\n{MATCH}"})
    policy = load_policy(tmp_path / "f0.yaml")
    assert policy.model_types == ("mine",) and "mlp.down_proj" in policy.towers[0].blocks


def test_a_file_of_the_users_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    for kind in ("one", "other"):
        path = write(tmp_path, mine="extends: beside\n", beside=f"match: {{model_type: {kind}}}\n{BLOCKS}")
        assert read_user_policy(path).model_types == (kind,)


def test_every_policy_of_autopar_loads_and_every_fragment_is_used() -> None:
    places = set()
    for policy in own_policies().values():
        sections = [policy.head, policy.head_attributes]
        for tower in policy.towers:
            sections += [tower.prefix, tower.every_stage, tower.blocks, tower.suffix, tower.units]
            sections += [tower.attributes, tower.block_attributes, tower.inputs, tower.block_inputs]
        places |= {entry.where.file for section in sections for entry in section.values()}
    fragments = {f"policies/fragments/{path.name}" for path in (policy_folder() / "fragments").glob("*.yaml")}
    for name in fragments - places:  # it may only name others, and then somebody names it
        own = name.removeprefix("policies/").removesuffix(".yaml")
        assert "extends: " in (policy_folder() / f"{own}.yaml").read_text(), name
        assert any(re.search(rf"{own}\b", file.read_text()) for file in policy_folder().rglob("*.yaml")), name


def test_the_example_of_the_readme_is_a_policy_that_fits_a_model() -> None:
    text = (policy_folder() / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    policy = read_user_policy(text)
    assert policy.model_types == ("my_model",) and policy.units["heads"].follows == "kv_heads"
    text = text.replace("my_model", "llama").replace("  config: {qk_norm: true}", "  config: {use_cache: true}")
    with pytest.raises(PolicyError, match=r"no rule covers 2 parameters.*post_attention_layernorm"):
        make_plan(llama(), read_user_policy(text), 2)
    own = "    input_layernorm: replicated\n"
    make_plan(llama(), read_user_policy(text.replace(own, own + "    post_attention_layernorm: replicated\n")), 2)


def _mounted(folder: Path, text: str) -> None:
    load_policy(mounting(folder, text.removeprefix(RIGHT["mounts"])))


def _planned(folder: Path, text: str) -> None:
    """Make a plan of a model, which stays as it was."""
    model = llama()
    before = {name: id(module) for name, module in model.named_modules()}
    try:
        make_plan(model, read_user_policy(text), 2)
    finally:
        assert before == {name: id(module) for name, module in model.named_modules()}


READ: dict[str, tuple[Callable[[Path, str], Any], str]] = {  # how the text is read, and the file that messages name
    "variants": (lambda folder, text: load_policies(family(folder, text)), "FOLDER/kin.yaml"),
    "mounts": (_mounted, "FOLDER/mine.yaml"),
    "models": (_planned, "policy text"),
}
ROWS = [
    pytest.param(kind, *row, id=f"{kind}-{row[0]}-{row[-1][:30]}")
    for kind, mistakes in MISTAKES.items()
    for row in mistakes["wrong"]
]


@pytest.mark.parametrize(("kind", "line", "old", "new", "message"), ROWS)
def test_a_mistake_is_refused_with_its_line(
    tmp_path: Path, kind: str, line: int | str, old: str, new: str, message: str
) -> None:
    right = RIGHT[kind]
    assert right.count(old) == 1 or not old
    read, file = READ.get(kind, (lambda _, text: read_user_policy(text), "policy text"))
    with pytest.raises(PolicyError) as info:
        read(tmp_path, right.replace(old, new) if old else right + new)
    place = f"{file}:{line}" if isinstance(line, int) else f"FOLDER/{line}"
    place, message = (text.replace("FOLDER", str(tmp_path)) for text in (place, message))
    assert info.value.where == place
    assert str(info.value).startswith(f"{place}: {message}"), str(info.value)
