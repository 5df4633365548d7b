"""The checkpoints in docs/models.md have policies, sources and counted sizes, and their meshes are the planner's.

UPDATE_DOCS=1 python -m pytest --tier sweep tests/docs/test_checkpoints.py      writes the rows
"""

import re
import runpy

import pytest

from tests.docs.pages import DOCS, same
from tests.harness.tiers import in_tier

PAGE = DOCS / "models.md"
SCRIPT = runpy.run_path(str(DOCS / "figures" / "checkpoints.py"))
CHECKPOINTS = SCRIPT["CHECKPOINTS"]
FEW = ["Qwen/Qwen3-8B", "google-bert/bert-base-uncased", "Qwen/Qwen3-0.6B"]
ROWS = re.compile(r"(?<=\|---\|---\|---\|---\|---\|\n)(?:\| .*\n)*")


def rows() -> dict[str, str]:
    """Return the rows of the page by name."""
    return {re.split(r"[\[\]]", line)[1]: line for line in ROWS.findall(PAGE.read_text())[0].splitlines(True)}


@pytest.mark.tier("all")
@pytest.mark.every_case
@pytest.mark.parametrize("name", [*FEW, *in_tier("sweep", [name for name in CHECKPOINTS if name not in FEW])])
def test_a_row(name: str) -> None:
    known = rows() | {name: SCRIPT["row"](name) + "\n"}
    same(PAGE, ROWS.sub("".join(known[each] for each in CHECKPOINTS if each in known), PAGE.read_text()))


@pytest.mark.tier("all")
def test_every_checkpoint_is_listed_with_its_policy_and_its_size() -> None:
    assert list(rows()) == list(CHECKPOINTS)
    for name, checkpoint in CHECKPOINTS.items():
        assert SCRIPT["policy_of"](name) in rows()[name] and checkpoint["source"] in SCRIPT["DATA"]["sources"]
        assert SCRIPT["build"](name).num_parameters() == checkpoint["parameters"], name
