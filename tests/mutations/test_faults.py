"""The list of planted faults fits the tree: what it changes is there, and so are the tests that notice."""

import re
from collections import Counter

import pytest

from tests.mutations.faults import MECHANISMS, ROOT, problems, read, tiers_of


def test_every_fault_can_be_planted_and_names_a_test() -> None:
    assert not problems(read())


def test_there_are_many_and_no_mechanism_is_without() -> None:
    faults = read()
    assert len(faults) >= 60
    assert not set(MECHANISMS) - {fault.mechanism for fault in faults}


@pytest.mark.tier("all")
def test_make_test_catches_nine_of_ten_and_the_page_has_their_numbers() -> None:
    faults = read()
    tiers = tiers_of(faults)
    counts = Counter(tiers)
    assert counts["check"] + counts["test"] >= 0.9 * len(faults) and not counts["sweep"], counts
    page = " ".join((ROOT / "tests" / "README.md").read_text().split())
    said = re.search(r"Of the (\d+) faults, `make check` catches (\d+) and `make test` (\d+)", page)
    assert said and [*map(int, said.groups())] == [len(faults), counts["check"], counts["check"] + counts["test"]]
