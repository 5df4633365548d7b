"""The list of planted faults fits the tree: what it changes is there, and so are the tests that notice."""

from __future__ import annotations

from tests.mutations.faults import MECHANISMS, problems, read


def test_every_fault_can_be_planted_and_names_a_test() -> None:
    assert not problems(read())


def test_there_are_many_and_no_mechanism_is_without() -> None:
    faults = read()
    assert len(faults) >= 60
    assert not set(MECHANISMS) - {fault.mechanism for fault in faults}
