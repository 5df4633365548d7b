"""The API reference has every public name, the site is built, and the page on the config names every key."""

import importlib
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import autopar
from autopar import ParallelModel
from autopar.config.sections import PLAIN, SECTIONS, SHORT, PipelineConfig
from tests.docs.pages import DOCS, ROOT, codes, same
from tests.scripts import printed

MODULES = {
    "autopar": "autopar.md",
    "autopar.integrations": "integrations.md",
    "autopar.checkpoint": "checkpoint.md",
    "autopar.tensor_parallel": "tensor_parallel.md",
    "autopar.features.megatron.schedules": "megatron.md",
}
PUBLIC = DOCS / "reference" / "public.md"
LISTED = dict(re.findall(r"^### ([\w.]+)\n\n```text\n(.*?)\n```$", PUBLIC.read_text(), re.MULTILINE | re.DOTALL))
METHODS = set(LISTED["model"].split())
SPHINX = ROOT / ".cache" / "docs"


def named(page: str) -> list[str]:
    text = (DOCS / "reference" / page).read_text()
    return re.findall(r"^\.\. (?:auto|py:)(?:function|class|exception|data|type):: ([\w.]+)$", text, re.MULTILINE)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_listed_and_has_one_entry(module: str) -> None:
    public = sorted(importlib.import_module(module).__all__)
    text = "\n".join(textwrap.wrap(" ".join(public), 100))
    same(PUBLIC, PUBLIC.read_text().replace(LISTED[module], text))
    assert sorted(named(MODULES[module])) == [f"{module}.{name}" for name in public if name != "MPU"]


@pytest.mark.parametrize("module", ["autopar", "autopar.tensor_parallel"])
def test_the_stubs_have_the_public_names(module: str) -> None:
    found: dict[str, object] = {}
    exec((ROOT / module.replace(".", "/") / "__init__.pyi").read_text(), found)
    names = {*found.get("__annotations__", ()), *found} - {"__annotations__", "__builtins__", "__doc__"}  # type: ignore
    assert sorted(name for name in names if not isinstance(found.get(name), ModuleType)) == LISTED[module].split()


def test_the_methods_of_a_model_and_its_mesh_have_entries() -> None:
    entries = named("model.md")
    assert {f"model.{name}" for name in METHODS} | {"autopar.MPU"} <= set(entries)
    assert len(entries) == len(set(entries))
    assert {name for name in vars(ParallelModel) if not name.startswith("_")} == METHODS


@pytest.mark.tier("sweep")
def test_the_site_is_built_without_warnings_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    if not (SPHINX / ".installed").exists():
        pytest.skip("Sphinx is not there: make docs, or make fetch")
    options = ["-q", "-W", "--keep-going", "-c", "docs/site", "-d", str(tmp_path / "cache")]
    printed("-m", "sphinx", *options, ".", tmp_path / "site", folder=ROOT, PYTHONPATH=str(SPHINX))
    pages = {path: path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    for path, text in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"([^\"]+)", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=\"([^\"]+)", text)
        for target in loaded:
            assert not re.match(r"(https?:)?//", target), f"{path}: {target}"
            if not target.startswith("data:"):
                assert (path.parent / target.split("?")[0].split("#")[0]).exists(), f"{path}: {target}"
    assert '<span class="drawing"' in pages[tmp_path / "site" / "docs" / "performance.html"]
    assert '"docs/start": [["Start", ' in (tmp_path / "site" / "_static" / "sections.js").read_text()
    styles = "".join(path.read_text() for path in (tmp_path / "site" / "_static").rglob("*.css"))
    assert not re.search(r"url\([\"']?(https?:)?//", styles) and "@import" not in styles
    shown = {name for text in pages.values() for name in re.findall(r"\bid=\"([\w.]+)\"", text)}
    assert {name for page in MODULES.values() for name in named(page)} | set(named("model.md")) <= shown


def test_the_configuration_is_documented_whole() -> None:
    text = (DOCS / "configuration.md").read_text()
    (example,) = codes(text, "yaml")
    content = yaml.safe_load(example.text)
    config = autopar.ParallelConfig.parse(content)
    # What the example sets; everything else in it is the default.
    assert config == autopar.ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        pipeline=PipelineConfig(microbatch_size=1, layers_per_stage=(6, 6)),
        zero_stage=1,
        precision="fp16",
        gradient_clipping=1.0,
    )
    known = {*PLAIN, *(f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys)}
    shown = {
        f"{section}.{key}" if key else section
        for section, keys in content.items()
        for key in (keys if isinstance(keys, dict) else [""])
    }
    assert shown == known - {"pipeline.num_microbatches", *SHORT}  # microbatch_size and the long names are there
    assert set(re.findall(r"^\| `(\w+(?:\.\w+)?)` \|", text, re.MULTILINE)) == known
