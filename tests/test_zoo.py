"""The data of small models says nothing that is not known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig

from autopar.tools.verification.small_models import read_data
from tests.random_models import Case, batches, of_type
from tests.zoo import configs, engine, inputs
from tests.zoo.expressions import evaluate, is_size
from tests.zoo.form import Kind
from tests.zoo.merging import expanded, merge
from tests.zoo.reading import FOLDER
from tests.zoo.recipes import PURE, recipe


class _Zeros:
    def __call__(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape)


SIZES = {"heads": 6, "kv_heads": 3, "vocab": 131}


@pytest.mark.parametrize(
    ("text", "value"),
    [("8 * heads", 48), ("kv_heads - kv_heads % 2", 2), ("-(heads // 4 + 1)", -2)],
)
def test_expressions_over_sizes_are_numbers(text: str, value: int) -> None:
    assert is_size(text) and evaluate(text, SIZES) == value


@pytest.mark.parametrize(
    "text", ["__import__('os')", "heads[0]", "(lambda: 1)()", "open", "heads if heads else 1", "heads +", "heads ** 9"]
)
def test_nothing_else_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match="has no value"):
        evaluate(text, SIZES)


def test_attributes_are_of_configs_alone() -> None:
    names = {"config": LlamaConfig(vocab_size=24), "ids": torch.zeros(2)}
    assert evaluate("config.vocab_size // 2", names) == 12
    for text in ("config.__class__", "ids.shape", "config.nothing.__class__"):
        with pytest.raises(ValueError, match="has no value"):
            evaluate(text, names)


def test_fragments_come_in_the_order_of_writing() -> None:
    fragments = {"one": {"a": 1, "b": {"c": 1}}, "two": {"with": "one", "b": {"d": 2}}, "steps": ["x", "y"]}
    assert expanded({"a": 0, "with": "two", "e": 3}, fragments) == {"a": 1, "b": {"c": 1, "d": 2}, "e": 3}
    assert expanded({"with": "two", "a": 0}, fragments)["a"] == 0
    assert expanded([{"with": "steps"}, "z", {"with": "one"}], fragments) == ["x", "y", "z", fragments["one"]]


def test_changes_go_into_mappings_unless_nothing_else_stays() -> None:
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"only": True, "d": 3}}) == {"a": {"d": 3}}


def test_a_config_takes_sizes_others_inside_and_copies() -> None:
    made = configs.with_sizes({"a": ["heads", ("8 * heads", "b")], "c": {"d": "vocab"}}, SIZES, engine.kind_of)
    assert made == {"a": [6, (48, "b")], "c": {"d": 131}}
    inner = configs.with_sizes({"from": "llama4_text", "attention_bias": True}, SIZES, engine.kind_of)
    assert inner.model_type == "llama4_text" and inner.attention_bias and inner.num_attention_heads == 6
    assert of_type("codegen").make(4, 4, 131, {}).n_head == 8  # its own sizes


def test_steps_are_for_some_heads_configs_and_batches() -> None:
    steps = recipe(
        [
            {"for": "*Model", "a": 1},
            {"not": ["*Model"], "a": 2},
            {"when": {"vocab_size": 131}, "b": "full(7, ids)"},
            {"when": {"no.such": 1}, "c": 1},
            {"if": "ids", "steps": [{"d": [[1, 2]], "_": "normal(3)"}, {"only": ["a", "b", "d", "ids"]}]},
            {"if": "labels", "e": 1},
            {"drop": "ids"},
        ]
    )
    config, batch = LlamaConfig(vocab_size=131), {"ids": torch.zeros(2, 5), "mask": 0}
    for head, a in (("LlamaModel", 1), ("LlamaForCausalLM", 2)):
        made = steps(head, config, batch, _Zeros())
        assert set(made) == {"a", "b", "d"} and made["a"] == a
        assert made["b"].shape == (2, 5) and made["d"].tolist() == [[1, 2]]
    assert set(batch) == {"ids", "mask"}


def test_batches_are_the_same_every_time() -> None:
    case = Case("roc_bert", "RoCBertForPreTraining")
    config = CONFIG_MAPPING["roc_bert"](vocab_size=131, shape_vocab_size=9, pronunciation_vocab_size=9)
    once, again = batches(case, config), batches(case, config)
    assert {"attack_input_ids", "labels_input_shape_ids"} <= set(once[0])
    for one, other in zip(once, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_entries_are_of_model_types_and_every_fragment_and_step_is_known() -> None:
    for model_type in engine.model_types():
        described = of_type(model_type)
        assert model_type in CONFIG_MAPPING, model_type
        own = replace(described, settings={}, make=None)  # settings for the config of the other model
        assert not described.inside or own == Kind(inside=described.inside), model_type
        assert not (described.settings and described.make), f"{model_type} has settings that nothing reads"


def test_every_function_is_called() -> None:
    text = "\n".join(path.read_text() for path in FOLDER.glob("*.yaml"))
    assert not [name for name in (*inputs.STEPS, *PURE) if f"{name}(" not in text]


def test_every_fragment_is_taken() -> None:
    for path in FOLDER.glob("*.yaml"):
        if path.name != "shared.yaml":
            assert read_data(path).get("shared", {}).keys() <= _taken(path.read_text()), path.name
    whole = "\n".join(path.read_text() for path in FOLDER.glob("*.yaml"))
    assert read_data(FOLDER / "shared.yaml").keys() <= _taken(whole)


def _taken(text: str) -> set[str]:
    return {
        name for names in re.findall(r"with: (\[[^]]*\]|[^\s,}\]]+)", text) for name in re.findall(r"[\w.-]+", names)
    }
