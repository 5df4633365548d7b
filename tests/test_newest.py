"""The list of model types that ``make newest`` does not print."""

import re
from pathlib import Path

import pytest
import transformers

from tests import newest

PINS = Path(__file__).parents[1] / "constraints.txt"


def test_the_known_types_are_those_of_the_pinned_version() -> None:
    pinned = re.search(r"^transformers==(\S+)", PINS.read_text(), re.MULTILINE)
    if pinned is None or transformers.__version__ != pinned[1]:
        pytest.skip("another version of transformers has other model types")
    assert sorted(newest.without_policy() - newest.known_without_policy()) == [], "make newest lists these"
    assert sorted(newest.known_without_policy() - newest.without_policy()) == [], f"remove these from {newest.KNOWN}"
