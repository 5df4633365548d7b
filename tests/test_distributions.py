"""The wheel and the sdist: built without a network, installed without an index, and complete."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import autopar
from tests.docs.pages import README, ROOT

TOOLS = ROOT / ".cache" / "build-tools"
pytestmark = [pytest.mark.tier("all"), pytest.mark.together]


class Built(NamedTuple):
    """Where the two files and what is installed from the wheel are."""

    wheel: Path
    sdist: Path
    site: Path


def run(*command: str | Path, cwd: Path, path: Path) -> str:
    """Run Python with these arguments and ``path`` in front of all packages."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel_of(source: Path, folder: Path) -> Path:
    run("-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "-w", folder, cwd=source, path=TOOLS)
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("RECORD")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if not (TOOLS / "hatchling").exists():
        pytest.skip("the build backend is not there: make fetch")
    folder = tmp_path_factory.mktemp("distributions")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", folder / "sdist", cwd=ROOT, path=TOOLS)
    (sdist,) = (folder / "sdist").glob("*.tar.gz")
    wheel = wheel_of(ROOT, folder / "wheel")
    install = ["--no-index", "--no-deps"]
    assert f"pip install {' '.join(install)} dist/*.whl" in README.read_text()
    run("-m", "pip", "install", *install, "--no-compile", "--target", folder / "site", wheel, cwd=folder, path=TOOLS)
    return Built(wheel, sdist, folder / "site")


def test_the_wheel_has_the_package_and_its_policies_alone(built: Built) -> None:
    names = set(contents(built.wheel))
    policies = {path.relative_to(ROOT / "policies").as_posix() for path in (ROOT / "policies").rglob("*.yaml")}
    expected = {f"autopar/_policies/{name}" for name in policies | {"README.md", "GUIDE.md"}}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "autopar").rglob("*.py")}
    assert len(policies) > 200 and expected | modules | {"autopar/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"autopar", f"autopar-{autopar.__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name]


def test_an_installed_wheel_finds_its_policies(built: Built, tmp_path: Path) -> None:
    code = "import autopar; print(autopar.__version__, autopar.__file__)"
    version, file = run("-c", code, cwd=tmp_path, path=built.site).split()
    assert version == autopar.__version__ and Path(file).is_relative_to(built.site)
    listed = run("-m", "autopar", "policy", "list", cwd=tmp_path, path=built.site)
    assert listed == run("-m", "autopar", "policy", "list", cwd=tmp_path, path=ROOT).replace(
        str(ROOT / "policies"), str(built.site / "autopar" / "_policies")
    )
    assert re.search(r"^ *gpt2\b", listed, re.MULTILINE)
    shown = run("-m", "autopar", "policy", "check", "gpt2", "--tp", "2", cwd=tmp_path, path=built.site)
    assert shown.endswith("all checks pass\n")


def test_the_sdist_makes_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {"Makefile", "constraints.txt", "tests", "tutorials", "docs"} <= {path.name for path in source.iterdir()}
    assert contents(wheel_of(source, tmp_path / "wheel")) == contents(built.wheel)
