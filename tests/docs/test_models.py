"""The table of model types in docs/models.md is complete, and the pages state their number correctly.

UPDATE_DOCS=1 python -m pytest tests/docs/test_models.py      writes the table and the numbers
"""

import re
from collections import Counter
from pathlib import Path

import yaml

from autopar.policy.load import own_policies
from autopar.policy.match import supported_model_types
from autopar.tools.commands.models import auto_classes
from tests.docs.pages import DOCS, README, ROOT, same
from tests.random_models import of_type

PAGE = DOCS / "models.md"

HEADS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("heads.yaml").read_text())  # ending of a class -> task


def policy_table() -> str:
    """Return the lines between the markers: a row for each file, with its model types, their heads and features."""
    files: dict[str, dict[str, list[str]]] = {}
    policies = own_policies().values()
    usual, _ = Counter(policy.range_of(kind) for policy in policies for kind in policy.model_types).most_common(1)[0]
    for policy in policies:
        rules = [rule for tower in policy.towers for rule in tower.blocks.values()]
        units = [unit for tower in policy.towers for unit in tower.units.values()]
        marks = ["kv"] * any(unit.replicate for unit in units) + ["ep"] * any(rule.by_expert for rule in rules)
        for kind in policy.model_types:
            notes = [*marks, *(f"`{each.removesuffix(',<6')}`" for each in [policy.range_of(kind)] if each != usual)]
            about = ("/".join(tasks([kind])) or "part") + (f" ({', '.join(notes)})" if notes else "")
            files.setdefault(Path(policy.where.file).stem, {}).setdefault(about, []).append(kind)
    lines = [f"Versions of transformers: `{usual}`, unless noted.", "", "| policy | model types |", "|---|---|"]
    for file, groups in sorted(files.items()):
        cells = sorted(f"{', '.join(dict.fromkeys(kinds))}: {about}" for about, kinds in groups.items())
        lines.append(f"| [{file}](../policies/{file}.yaml) | {'<br>'.join(cells)} |")
    return "\n".join(lines)


def class_table() -> str:
    """Return a row for each file with classes of diffusers."""
    found: dict[str, set[str]] = {}
    for policy in own_policies().values():
        found.setdefault(Path(policy.where.file).stem, set()).update(policy.classes if policy.library else ())
    rows = [f"| [{f}](../policies/{f}.yaml) | {', '.join(sorted(each))} |" for f, each in sorted(found.items()) if each]
    return "\n".join(["| policy | classes |", "|---|---|", *rows])


def tasks(types: list[str]) -> list[str]:
    """Return the tasks of the heads of these model types."""
    kinds = [kind for kind in types if not of_type(kind).inside]
    heads = {head for kind in kinds for head in auto_classes(kind) - set(of_type(kind).without)}
    named = {next((word for ending, word in HEADS.items() if head.endswith(ending)), "other") for head in heads}
    return [word for word in dict.fromkeys([*HEADS.values(), "other"]) if word in named]


def test_pages_count_right() -> None:
    count = sum(not of_type(kind).inside for kind in supported_model_types())
    more = (DOCS / "long-sequences.md", DOCS / "sequence-parallel.md", ROOT / "tests" / "README.md")
    for page in (README, PAGE, *more):
        number = r"((?:of the|of all|for|lists) \[?)\d+(?= model types)|(model types with tensor parallelism \| )\d+"
        changed, found = re.subn(number, lambda match: f"{match[1] or match[2]}{count}", page.read_text())
        assert found, page
        same(page, changed)


def test_the_table_is_complete() -> None:
    text = PAGE.read_text()
    for name, table in (("policies", policy_table), ("classes", class_table)):
        marks = rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)"
        text = re.sub(marks, f"{table()}\n".replace("\\", r"\\"), text, flags=re.DOTALL)
    same(PAGE, text)
