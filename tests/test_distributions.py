"""The wheel and the sdist: built without a network, installed without an index, complete, typed, and used."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import autopar
from tests.docs.pages import README, ROOT
from tests.docs.test_readme import loop, prepare

TOOLS = ROOT / ".cache" / "build-tools"
INSTALL = ("install", "--no-index", "--no-deps")
pytestmark = pytest.mark.tier("all")


def run(*command: str | Path, cwd: Path, path: Path | None = None, code: int = 0) -> str:
    """Run a command without an index, and with ``path`` as the only path in front of all packages."""
    environment = {**os.environ, "PYTHONPATH": str(path or ""), "PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    options = ("--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, *arguments, *options, cwd=TOOLS, path=TOOLS)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("RECORD")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the files into a folder, and install each into an environment, which sees the dependencies afterwards."""
    if not (TOOLS / "build").exists():
        pytest.skip("the build tools are not there: make fetch")
    folder = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--no-isolation", "-o", folder, ROOT, cwd=folder, path=TOOLS)
    assert f"pip {' '.join(INSTALL)} dist/*.whl" in README.read_text()
    for name, pattern in {"wheel": "*.whl", "sdist": "*.tar.gz"}.items():
        run(sys.executable, "-m", "venv", "--without-pip", folder / name, cwd=folder)
        pip(*INSTALL, *folder.glob(pattern), python=folder / name / "bin" / "python")
        (site,) = (folder / name).glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def test_the_wheel_has_the_package_and_its_policies_alone(built: Path) -> None:
    names = set(contents(*built.glob("*.whl")))
    policies = {path.relative_to(ROOT / "policies").as_posix() for path in (ROOT / "policies").rglob("*.yaml")}
    expected = {f"autopar/_policies/{name}" for name in policies | {"README.md", "GUIDE.md"}}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "autopar").rglob("*.py*") if path.suffix != ".pyc"}
    assert len(policies) > 200 and expected | modules | {"autopar/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"autopar", f"autopar-{autopar.__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name]


def test_the_sdist_makes_the_wheel_of_the_source_tree(built: Path, tmp_path: Path) -> None:
    pip("wheel", "--no-deps", "-w", tmp_path, ROOT)  # build has made its wheel from the sdist
    assert contents(*tmp_path.glob("*.whl")) == contents(*built.glob("*.whl"))
    with tarfile.open(*built.glob("*.tar.gz")) as file:
        names = {name.split("/")[1] for name in file.getnames()}
    assert {"Makefile", "constraints.txt", "tests", "tutorials", "docs", "CITATION.cff"} <= names


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_installed_finds_its_policies(built: Path, tmp_path: Path, kind: str) -> None:
    bin = built / kind / "bin"
    code = "import autopar; print(autopar.__version__, autopar.__file__)"
    version, file = run(bin / "python", "-c", code, cwd=tmp_path).split()
    assert version == autopar.__version__ and Path(file).is_relative_to(bin.parent / "lib")
    listed = run(bin / "autopar", "policy", "list", cwd=tmp_path)
    assert listed == run(sys.executable, "-m", "autopar", "policy", "list", cwd=tmp_path, path=ROOT).replace(
        str(ROOT / "policies"), str(Path(file).parent / "_policies")
    )
    assert re.search(r"^ *gpt2\b", listed, re.MULTILINE)
    plan = ("plan", "gpt2", "--gpus", "4", "--sequence", "512", "--global-batch", "8", "-o", "config.yaml")
    run(bin / "autopar", *plan, cwd=tmp_path)
    assert autopar.ParallelConfig.parse(tmp_path / "config.yaml", 4)


def test_the_script_of_the_readme_runs_and_its_shards_merge(built: Path, tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "train.py").write_text(loop("+") + 'model.save_parallelized("shards")\n')
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "train.py")
    printed = run(built / "wheel" / "bin" / "python", *launch, cwd=tmp_path)
    assert len(re.findall(r"^\d+ [\d.]+$", printed, re.MULTILINE)) == 3
    run(built / "wheel" / "bin" / "autopar", "merge", "shards", "merged", cwd=tmp_path)
    merged, trained = (tmp_path / name / "model.safetensors" for name in ("merged", "trained"))
    assert merged.read_bytes() == trained.read_bytes()


def test_a_typed_script_of_a_user_runs_and_mypy_finds_mistakes(built: Path, tmp_path: Path) -> None:
    text, python = (ROOT / "tests" / "user_script.py").read_text(), built / "wheel" / "bin" / "python"
    (tmp_path / "script.py").write_text(text)
    assert "2 torch.Size([4, 4])" in run(python, "script.py", cwd=tmp_path)
    assert (tmp_path / "merged" / "model.safetensors").exists() and (tmp_path / "run.csv").exists()
    options = [
        "--strict",
        "--config-file=",
        "--cache-dir",
        ROOT / ".mypy_cache" / "user",
        "--python-executable",
        python,
    ]
    said = run(sys.executable, "-m", "mypy", *options, "script.py", cwd=tmp_path, code=1)
    found = [int(line) for line in re.findall(r"^script\.py:(\d+): error", said, re.MULTILINE)]
    start, end = (text[: text.index(mark)].count("\n") for mark in ("def mistakes", "\n\nmain("))
    assert found == [*range(start + 2, end + 1)] and len(found) == 8, said
