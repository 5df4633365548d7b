"""The data of small models says nothing that is not known."""

import re
from dataclasses import replace

import torch
from transformers import CONFIG_MAPPING

from autopar.tools.verification.small_models import read_data
from tests.random_models import Case, batches, of_type
from tests.zoo import engine, inputs
from tests.zoo.form import Kind
from tests.zoo.reading import FOLDER
from tests.zoo.recipes import PURE


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


def test_every_function_is_called_and_every_fragment_is_taken() -> None:
    whole = "\n".join(path.read_text() for path in FOLDER.glob("*.yaml"))
    assert not [name for name in (*inputs.STEPS, *PURE) if f"{name}(" not in whole]
    for path in FOLDER.glob("*.yaml"):
        if path.name != "shared.yaml":
            assert read_data(path).get("shared", {}).keys() <= _taken(path.read_text()), path.name
    assert read_data(FOLDER / "shared.yaml").keys() <= _taken(whole)


def _taken(text: str) -> set[str]:
    return {
        name for names in re.findall(r"with: (\[[^]]*\]|[^\s,}\]]+)", text) for name in re.findall(r"[\w.-]+", names)
    }
