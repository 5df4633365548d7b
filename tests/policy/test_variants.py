"""Several policies in one file, fragments mounted under a path, ranges of transformers by model type."""

import tomllib
from pathlib import Path

import pytest

from autopar.errors import PolicyError, UnsupportedModelError
from autopar.plan.make_plan import make_plan
from autopar.policy import match
from autopar.policy.load import load_policies, load_policy, own_policies, read_user_policy
from autopar.policy.match import find_policy
from autopar.policy.schema import SUPPORTED, UnitRun
from tests.policy.written import RIGHT, family, mounting, refused, write
from tests.small import gpt2, llama

FAMILY = RIGHT["variants"]


def test_each_variant_is_a_policy_over_what_is_common(tmp_path: Path) -> None:
    path = family(tmp_path)
    narrow, wide, other = load_policies(path)
    assert [policy.name for policy in (narrow, wide, other)] == ["narrow", "wide", "other"]
    assert [policy.model_types for policy in (narrow, wide, other)] == [("kin",), ("kin",), ("other_kin",)]
    assert [list(policy.towers[0].blocks) for policy in (narrow, wide, other)] == [
        ["fc", "out"],
        ["fc", "out", "ln", "gate"],
        ["fc", "out", "ln"],
    ]
    assert (narrow.config, wide.config, other.config) == ({"wide": False}, {"wide": True}, {})
    assert (narrow.classes, wide.classes) == ((), ("Wide",))
    assert other.towers[0].blocks["fc"].units == ("ffn", "ffn")
    assert (narrow.transformers, other.transformers) == (">=5", SUPPORTED)  # the range is that of the model types
    assert str(wide.where) == f"{path}:9" and str(wide.towers[0].blocks["gate"].where) == f"{tmp_path}/more.yaml:1"


def test_a_model_gets_the_one_variant_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = FAMILY.replace("kin]", "gpt2]", 1).replace("wide: false", "n_inner: 5").replace("wide: true", "n_inner: 6")
    path = family(tmp_path, text.replace("[Wide]", "[GPT2LMHeadModel]"))
    monkeypatch.setattr(match, "policy_files", lambda: (path,))
    assert find_policy(gpt2(n_inner=5)).name == "narrow"
    assert find_policy(gpt2(n_inner=6)).name == "wide"
    with pytest.raises(UnsupportedModelError) as info:
        find_policy(gpt2(n_inner=7))
    assert str(info.value).startswith(
        "no policy supports this config of model_type 'gpt2': narrow needs {'n_inner': 5}; wide needs {'n_inner': 6} "
        "and class GPT2LMHeadModel."
    )
    path.write_text(path.read_text().replace("n_inner: 6", "n_layer: 2"))
    with refused(f"{path}:6 and {path}:9 both match model_type gpt2: restrict one of them with match.config"):
        find_policy(gpt2(n_inner=5))


def test_a_variant_is_extended_by_its_name(tmp_path: Path) -> None:
    match_ = "match: {model_type: mine}\n"
    for name in ("falcon", "falcon_full", "falcon_grouped"):  # a file with a variant of its name; variants of another
        own, mine = own_policies()[name], read_user_policy(f"extends: {name}\n{match_}")
        assert mine.towers[0].blocks == own.towers[0].blocks and mine.model_types == ("mine",)
    family(tmp_path, FAMILY.replace("  wide:", "  kin:"))
    assert "gate" in load_policy(write(tmp_path, mine=f"extends: kin\n{match_}")).towers[0].blocks
    assert load_policy(tmp_path / "kin.yaml").name == "kin"


def test_names_are_unique_and_a_file_is_found_by_the_name_of_each_variant() -> None:
    files = [Path(policy.where.file).stem for policy in own_policies().values()]
    names = [policy.name for file in set(files) for policy in own_policies().values() if policy.where.file.endswith(
        f"/{file}.yaml")]  # fmt: skip
    assert len(names) == len(set(names)) == len(own_policies())
    for file in set(files) - own_policies().keys():  # a family whose name is no policy's
        with pytest.raises(PolicyError, match=f"^policy text:1: '{file}' is a file of several policies; name one: "):
            read_user_policy(f"extends: {file}\nmatch: {{model_type: mine}}\n")


def test_variants_that_hold_nothing_or_extend_each_other(tmp_path: Path) -> None:
    for value, shown in (("[]", "[]"), ("{}", "{}"), ("5", "5"), ("~", "None")):
        path = family(tmp_path, FAMILY[: FAMILY.index("variants:")] + f"variants: {value}\n")
        with refused(f"{path}:5: 'variants' must hold policies by name, not {shown}"):
            load_policies(path)
    path = family(tmp_path, FAMILY.replace("  wide:", "  kin:").replace("extends: more", "extends: kin"))
    with pytest.raises(PolicyError, match=r"kin\.yaml:10: 'kin' extends itself$"):
        load_policies(path)


def test_a_policy_that_is_given_is_one(tmp_path: Path) -> None:
    with refused("policy text:2: expected one policy, got 3 in 'variants': narrow, wide, other"):
        read_user_policy(FAMILY)
    path = family(tmp_path)
    with refused(
        f"{path} holds 3 policies, expected one\n  Write a policy that extends one of them: {{extends: narrow}}, or "
        "one of wide, other."
    ):
        read_user_policy(path)


def test_a_module_is_mounted_inside_each_block(tmp_path: Path) -> None:
    path = mounting(tmp_path, "blocks: {path: h, extends: {deep?.attn: module}, modules: {ln: replicated}}\n")
    (tower,) = load_policy(path).towers
    assert list(tower.blocks) == ["deep?.attn.q", "deep?.attn.o", "deep?.attn.norm?", "ln"]
    assert tower.blocks["deep?.attn.q"].parts == (UnitRun("heads", "block.deep.attn.width"),)
    assert tower.units["heads"].count == "block.deep.attn.num_heads"
    assert list(tower.block_attributes) == ["deep?.attn.num_heads"] and list(tower.block_inputs) == ["deep?.attn.alibi"]
    assert str(tower.blocks["deep?.attn.o"].where) == f"{tmp_path}/module.yaml:5"


def test_a_module_is_mounted_twice_if_the_file_says_how_many_units_there_are(tmp_path: Path) -> None:
    mounts = "blocks: {path: h, extends: {a: module, b: module}, modules: {}}\n"
    with pytest.raises(
        PolicyError, match=r"module\.yaml:1: 'units.heads' contradicts .*module\.yaml:1; set it in this file"
    ):
        load_policy(mounting(tmp_path, mounts))
    (tower,) = load_policy(mounting(tmp_path, mounts + "units: {heads: num_heads}\n")).towers
    assert [rule for rule in tower.blocks if rule.endswith("q")] == ["a.q", "b.q"]
    assert tower.blocks["b.q"].parts == (UnitRun("heads", "block.b.width"),)
    assert tower.units["heads"].count == "num_heads"


def test_a_tower_is_mounted_below_a_module_of_the_base_model(tmp_path: Path) -> None:
    path = mounting(tmp_path, "towers: {left: {extends: {l?.x: tower}}}\nextends: [{right: [tower, whole]}]\n")
    right, left = load_policy(path).towers
    for tower, start in ((left, "l?.x"), (right, "right")):
        assert tower.blocks_path == f"{start}.layers" and list(tower.blocks) == ["fc", "out"]
        for section, name in (
            *(("prefix", "embed"), ("every_stage", "rotary"), ("suffix", "norm")),
            *(("attributes", "width"), ("inputs", "bias")),
        ):
            assert list(getattr(tower, section)) == [f"{start}.{name}"]
    policy = load_policy(path)
    assert policy.model_types == ("mine",) and list(policy.models) == ["right.image?"]


def test_a_model_whose_attention_is_mounted_is_planned() -> None:
    text = (
        "extends: [fragments/decoder, fragments/decoder_heads, fragments/heads_grouped, fragments/norms_before]\n"
        "match: {model_type: llama}\nunits: {ffn: intermediate_size}\n"
        "blocks: {extends: {self_attn: fragments/module_qkvo_grouped, mlp: fragments/module_gated}}\n"
    )
    model = llama()
    assert make_plan(model, read_user_policy(text), 2).modules == make_plan(model, find_policy(model), 2).modules


PLAIN = "match: {model_type: [gpt2, gpt3]%s}\nunits: {}\nblocks: {path: h, modules: {}}\n"


def test_the_default_range_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert f"transformers{SUPPORTED}" in project["project"]["dependencies"]
    assert read_user_policy(PLAIN % "").transformers == SUPPORTED
    assert read_user_policy(PLAIN[PLAIN.index("units") :] % ()).transformers == ""  # a plain module has no versions


def test_a_model_type_with_a_range_of_its_own() -> None:
    policy = read_user_policy(PLAIN % ', transformers: {gpt2: "<5"}')
    assert (policy.range_of("gpt2"), policy.range_of("gpt3"), policy.transformers) == ("<5", SUPPORTED, SUPPORTED)
    with pytest.raises(UnsupportedModelError, match=r"model_type 'gpt2' needs transformers <5, got 5\."):
        find_policy(gpt2(), policy)
    assert find_policy(gpt2(), PLAIN % ', transformers: {gpt3: "<5"}').name == "user"
    for wrong, message in (
        ("{gtp3: <5}", "'transformers' names 'gtp3', which 'model_type' does not list. Did you mean 'gpt3'?"),
        ("{gpt3: 5}", "'transformers' must be text, not 5"),
        ("[5]", "'transformers' must be text, not [5]"),
    ):
        with refused(f"policy text:1: {message}"):
            read_user_policy(PLAIN % f", transformers: {wrong}")


def test_a_range_is_not_inherited_by_other_model_types(tmp_path: Path) -> None:
    write(tmp_path, base=PLAIN % ', transformers: {gpt2: "<5"}')
    for own, ranges in (
        ("match: {model_type: mine}\n", {}),
        ("match: {model_type: mine, transformers: {mine: '>6'}}\n", {"mine": ">6"}),
        ("match: {class: Mine}\n", {"gpt2": "<5"}),
    ):
        assert load_policy(write(tmp_path, mine="extends: base\n" + own)).ranges == ranges
