"""The table of model types in docs/models.md is complete, and what pages say about their number is right.

UPDATE_DOCS=1 python -m pytest tests/docs/test_models.py      writes the table
"""

import re
from pathlib import Path

from autopar.policy.load import own_policies
from autopar.policy.match import supported_model_types
from tests.docs.pages import DOCS, README, same
from tests.random_models import auto_heads, of_type

PAGE = DOCS / "models.md"

HEADS = {  # ending of a class -> its task
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "generation",
    "MTModel": "generation",
    "ForPreTraining": "pretraining",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "question answering",
    "ForMultipleChoice": "choice",
    "ForImageClassification": "image",
    "ForSemanticSegmentation": "segmentation",
    "ForAudioFrameClassification": "audio",
    "ForCTC": "CTC",
    "Model": "base",
}


def policy_table() -> str:
    """The table between the markers: a row for the model types of one policy that need the same transformers."""
    rows = set()
    for policy in own_policies().values():
        rules = [rule for tower in policy.towers for rule in tower.blocks.values()]
        units = [unit for tower in policy.towers for unit in tower.units.values()]
        fewer = "yes" if any(unit.replicate for unit in units) else ""
        by_expert = "yes" if any(rule.by_expert for rule in rules) else ""
        file = Path(policy.where.file).name
        for versions in dict.fromkeys(map(policy.range_of, policy.model_types)):
            types = [kind for kind in policy.model_types if policy.range_of(kind) == versions]
            rows.add(
                f"| {', '.join(types)} | {', '.join(tasks(types)) or 'part of a model'} | {fewer} | {by_expert} "
                f"| {versions.removesuffix(',<6')} | [{file}](../policies/{file}) |"
            )
    head = "| model types | heads | fewer KV heads | by expert | transformers | policy |"
    return "\n".join([head, "|---|---|---|---|---|---|", *sorted(rows)])


def tasks(types: list[str]) -> list[str]:
    """What the task heads of these model types do."""
    kinds = [kind for kind in types if not of_type(kind).inside]
    heads = {head for kind in kinds for head in auto_heads(kind) - set(of_type(kind).without)}
    named = {next((word for ending, word in HEADS.items() if head.endswith(ending)), "others") for head in heads}
    return [word for word in dict.fromkeys([*HEADS.values(), "others"]) if word in named]


def test_pages_count_right() -> None:
    whole = [kind for kind in supported_model_types() if not of_type(kind).inside]
    stated = [re.findall(r"(\d+) model types", page.read_text()) for page in (README, PAGE)]
    assert all(stated)
    assert {int(number) for found in stated for number in found} == {len(whole)}


def test_the_table_is_complete() -> None:
    marks = r"(?<=<!-- policies -->\n).*?(?=<!-- /policies -->)"
    same(PAGE, re.sub(marks, lambda _: policy_table() + "\n", PAGE.read_text(), flags=re.DOTALL))
