"""Drop options of a composition that fails while it goes on failing."""

from __future__ import annotations

from collections.abc import Callable

from tests.compositions.draw import Composition, simpler

__all__ = ["minimise"]


def minimise(composition: Composition, failure_of: Callable[[Composition], str | None]) -> tuple[Composition, str]:
    """Return the simplest composition found that fails, and how.

    Args:
        failure_of: runs a composition; None where it is right or refused.
    """
    text = failure_of(composition)
    if text is None:
        raise ValueError(f"{composition} does not fail")
    found = True
    while found:
        found = False
        for candidate in simpler(composition):
            failure = failure_of(candidate)
            if failure is not None:
                composition, text, found = candidate, failure, True
                break
    return composition, text
