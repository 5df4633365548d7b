"""Every mistake in a policy is refused with what is wrong, and with the file and the line to blame."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import PolicyError
from autopar.plan.make_plan import make_plan
from autopar.policy.load import load_policies, load_policy, read_user_policy
from tests.policy.written import MISTAKES, RIGHT, family, mounting
from tests.small import llama


def _mounted(folder: Path, text: str) -> None:
    load_policy(mounting(folder, text.removeprefix(RIGHT["mounts"])))


def _planned(folder: Path, text: str) -> None:
    """Make a plan of a model, which stays as it was."""
    model = llama()
    before = {name: id(module) for name, module in model.named_modules()}
    try:
        make_plan(model, read_user_policy(text), 2)
    finally:
        assert before == {name: id(module) for name, module in model.named_modules()}


READ: dict[str, tuple[Callable[[Path, str], Any], str]] = {  # how the text is read, and the file that messages name
    "variants": (lambda folder, text: load_policies(family(folder, text)), "FOLDER/kin.yaml"),
    "mounts": (_mounted, "FOLDER/mine.yaml"),
    "models": (_planned, "policy text"),
}
ROWS = [
    pytest.param(kind, *row, id=f"{kind}-{row[0]}-{row[-1][:30]}")
    for kind, mistakes in MISTAKES.items()
    for row in mistakes["wrong"]
]


@pytest.mark.parametrize(("kind", "line", "old", "new", "message"), ROWS)
def test_a_mistake_is_refused_with_its_line(
    tmp_path: Path, kind: str, line: int | str, old: str, new: str, message: str
) -> None:
    right = RIGHT[kind]
    assert right.count(old) == 1 or not old
    read, file = READ.get(kind, (lambda _, text: read_user_policy(text), "policy text"))
    with pytest.raises(PolicyError) as info:
        read(tmp_path, right.replace(old, new) if old else right + new)
    place = f"{file}:{line}" if isinstance(line, int) else f"FOLDER/{line}"
    place, message = (text.replace("FOLDER", str(tmp_path)) for text in (place, message))
    assert info.value.where == place
    assert str(info.value).startswith(f"{place}: {message}"), str(info.value)
