"""Tables of refusals: every row is tried on every rank, and those that are not refused as they should be are named."""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from autopar.errors import CheckpointError
from tests.exchange import everyones

Refuse = Callable[..., None]
Parts = str | re.Pattern[str] | tuple[str | re.Pattern[str], ...]


@contextlib.contextmanager
def refusals(kept: Callable[[], bool] | None = None, error: type[Exception] = CheckpointError) -> Iterator[Refuse]:
    """Yield ``refuse(name, parts, call, *args, **kwargs)`` for one row.

    The call must raise the error with all parts in its text and the same first line on every rank, and then ``kept()``
    must be true: nothing has changed.

    Raises:
        AssertionError: at the end, with the names of all rows that failed and what was wrong on which rank.
    """
    wrong: list[str] = []

    def refuse(name: Any, parts: Parts, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        said, problem = "", ""
        try:
            call(*args, **kwargs)
            problem = "was not refused"
        except error as refused:
            said = str(refused)
            wanted = parts if isinstance(parts, tuple) else (parts,)
            missing = [
                part for part in wanted if not re.search(re.escape(part) if isinstance(part, str) else part, said)
            ]
            problem = f"{missing} is not in:\n{said}" if missing else ""
        except Exception:
            problem = traceback.format_exc()
        everyone = _of_all((problem, said.partition("\n")[0]))
        problems = [text for text, _ in everyone]
        if not any(problems):
            lines = [line for _, line in everyone]
            problems = [f"ranks got different errors: {lines}"] if len(set(lines)) > 1 else []
            problems += _of_all("" if kept is None or kept() else "something has changed")
        wrong.extend(f"{name}: rank {rank}: {text}" for rank, text in enumerate(problems) if text)

    yield refuse
    assert not wrong, "\n".join(wrong)


def _of_all(mine: Any) -> list[Any]:
    """What each rank has; without a process group there is this one."""
    return everyones(mine) if dist.is_initialized() else [mine]
