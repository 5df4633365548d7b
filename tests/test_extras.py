"""The dependencies and extras of pyproject.toml: each extra has the packages that its files import, and no others."""

import functools
import re
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from autopar.compat.transformers import free_part
from tests.docs.pages import PAGES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = {
    "trainer": ("integrations/accelerate.py", "integrations/trainer/replica_view.py"),
    "rl": ("integrations/accelerate.py", "integrations/trainer/*.py"),
    "peft": ("integrations/peft.py", "features/peft/*.py"),
    "quantized": ("features/quantized/bitsandbytes.py", "features/peft/*.py"),
    "diffusers": ("features/diffusers/*.py",),
    "plot": ("tools/plot.py",),
}
WITHOUT_EXTRA = {"deepspeed", "psutil", "torchao"}  # used only if the user has installed them
IMPORT = r'^ *(?:from|import) (\w+)[\w.]*(?: import .*| as \w+|  #.*)*$|(?:import_module\(|^LIBRARY = )"(\w+)'


@functools.cache
def always() -> set[str]:
    """Return the distributions that an installation without extras has."""
    queue, found = [*map(Requirement, PROJECT["dependencies"])], set[str]()
    while queue:
        one = queue.pop()
        if one.name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.add(one.name)
            queue += map(Requirement, metadata.requires(one.name) or ())
    return {*map(canonicalize_name, found)}


def imported(*patterns: str) -> set[str]:
    """Return the distributions that files import, without the distributions of every installation."""
    text = "\n".join(path.read_text() for pattern in patterns for path in (ROOT / "autopar").glob(pattern))
    modules = {name for names in re.findall(IMPORT, text, re.MULTILINE) for name in names if name}
    owners = metadata.packages_distributions()
    found = {owners.get(name, [name])[0] for name in modules - sys.stdlib_module_names - {"autopar"}}
    return {*map(canonicalize_name, found)} - always()


def test_each_extra_has_what_its_files_import() -> None:
    extras = {name: {Requirement(text).name for text in PROJECT["optional-dependencies"][name]} for name in FILES}
    assert extras == {name: imported(*files) for name, files in FILES.items()}
    assert imported("**/*.py") == WITHOUT_EXTRA.union(*extras.values())
    text = "\n".join(path.read_text() for path in [*PAGES, ROOT / "Dockerfile", *(ROOT / "autopar").rglob("*.py")])
    named = re.findall(r"(?:\bautopar|['\"]\.)\[([a-z,]+)\]", text)
    assert set(",".join(named).split(",")) == set(FILES) == {*PROJECT["optional-dependencies"]} - {"test"}


def test_psutil_is_not_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert free_part() == 1.0
