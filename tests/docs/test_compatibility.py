"""docs/compatibility.md shows the recorded runs, and these cover the ranges of ``pyproject.toml``."""

import json

from packaging.specifiers import SpecifierSet

from tests import versions
from tests.docs.pages import same

RECORDED = json.loads(versions.RECORDED.read_text())


def test_runs_cover_the_ranges() -> None:
    ranges = versions.admitted()
    assert versions.uncovered(ranges, RECORDED) == [], "run make oldest or make newest, or narrow the range"
    wider = {"torch": SpecifierSet(">=2.12,<2.15"), "trl": SpecifierSet(">=1.16,<1.18")}
    found = versions.uncovered(ranges | wider, RECORDED)
    assert [line.split()[1:3] for line in found] == [["oldest:", "torch"], ["newest:", "trl"]]
    low, admits = (versions.requirements(ranges | dict.fromkeys(ranges, wider["trl"]), end) for end in versions.ENDS)
    assert low[-1] == "trl==1.16" and admits[-1] == f"trl{wider['trl']}"


def test_the_page_shows_the_runs() -> None:
    same(versions.PAGE, versions.page(RECORDED))
    if RECORDED["newest"]["versions"]["transformers"] == versions.transformers.__version__:
        assert versions.without_policy() <= {*RECORDED["oldest"]["without_policy"], *RECORDED["newest"]["new"]}
