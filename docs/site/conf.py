"""Settings of Sphinx for the site that `make docs` builds: the pages of the repository, and the API from docstrings.

Sphinx reads the pages in place, so links work on the site and in the repository. A code file that a page links to, such
as a tutorial or a policy, becomes a page that shows the file.
"""

from __future__ import annotations

import json
import re
import sys
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import autopar  # noqa: E402
from autopar.checkpoint import methods as checkpoint_methods  # noqa: E402
from autopar.pipeline_parallel import pipeline as pipeline_methods  # noqa: E402

project, author, copyright = "autopar", "the authors of autopar", "the authors of autopar, Apache-2.0"
version = release = autopar.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"

LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".slurm": "bash", ".jinja": "jinja"}
_LINK = re.compile(r"\]\(([^)#\s]+)")


def linked(start: list[Path]) -> list[Path]:
    """Return pages, the pages that they link to, and files that can be shown, by paths in the repository."""
    found: dict[Path, None] = {}
    queue = list(start)
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found[path] = None
        if path.suffix == ".md":
            targets = [(path.parent / target).resolve() for target in _LINK.findall(path.read_text())]
            queue += [each for each in targets if each.suffix in {".md", *LANGUAGES} and each.is_file()]
    return [path.relative_to(ROOT) for path in found]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md"))]
include_patterns = [str(path) for path in linked(PAGES)]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4
myst_enable_extensions: list[str] = []
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_use_ivar = True
nitpicky = False  # roles in docstrings also name private objects, which have no page
suppress_warnings = ["myst.header"]  # headings that skip a level

html_theme = "furo"
html_title = f"autopar {release}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["site.css", "search.js"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_readme.html"}
templates_path = ["templates"]

REFERENCE = ("autopar", "model", "integrations", "checkpoint", "tensor_parallel", "megatron", "public")
CONTENTS = {
    "Start": ["docs/start", "tutorials/README", "docs/coming-from"],
    "Guides": [
        "docs/training",
        "docs/trainer",
        "docs/reinforcement",
        "docs/peft",
        "docs/quantized",
        "docs/diffusion",
        "docs/long-sequences",
        "docs/experts",
        "docs/attention-kernels",
        "docs/own-code",
        "docs/checkpoints",
        "docs/inference",
        "docs/serving",
        "docs/launching",
        "docs/planner",
        "docs/rehearsal",
        "docs/policies",
        "docs/verify",
        "docs/nan",
        "docs/troubleshooting",
    ],
    "Concepts": ["docs/memory", "docs/performance", "docs/sequence-parallel", "docs/limitations", "docs/design"],
    "Reference": [
        "docs/configuration",
        "docs/models",
        "docs/compatibility",
        "policies/README",
        *(f"docs/reference/{name}" for name in REFERENCE),
    ],
    "Project": ["CHANGELOG", "docs/contributing", "tests/README", "benchmarks/README"],
}


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the table of contents to the first page, and remove links to folders."""
    folder = (ROOT / docname).parent
    source[0] = re.sub(
        r"\[([^]]+)\]\(([^)#\s]+)\)",
        lambda link: link[1] if (folder / link[2]).is_dir() else link[0],
        source[0],
    )
    if not docname.startswith("docs/") and all(docname not in pages for pages in CONTENTS.values()):
        app.env.metadata[docname]["orphan"] = ""
    if docname == root_doc:
        for caption, pages in CONTENTS.items():
            listed = "\n".join(page for page in pages if (ROOT / f"{page}.md").exists())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


class FileParser(Parser):
    """Show a code file as a page: its path as the heading, then its text. The search skips it."""

    supported = ("shown_file",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        path = Path(document["source"])
        section = nodes.section("", nodes.title("", str(path.relative_to(ROOT))), ids=["file"])
        section += nodes.literal_block(inputstring, inputstring, language=LANGUAGES[path.suffix])
        document += section
        env = document.settings.env
        env.metadata[env.current_document.docname] |= {"orphan": "", "nosearch": ""}


def inline_drawings(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put SVG images into the page, where they take the colors of its style."""
    for image in list(doctree.findall(nodes.image)):
        path = ROOT / image["uri"]
        if path.suffix == ".svg" and app.builder.format == "html":
            label = escape(image.get("alt", ""))
            html = f'<span class="drawing" role="img" aria-label="{label}">{path.read_text()}</span>'
            image.replace_self(nodes.raw("", html, format="html"))


def write_sections(app: Sphinx, error: Exception | None) -> None:
    """Write heading, anchor and words of each section: the search page finds the heading of a hit with them."""
    pages = {}
    if error is None and app.builder.format == "html":
        for name in app.env.found_docs:
            if "nosearch" not in app.env.metadata[name]:
                sections = app.env.get_doctree(name).findall(nodes.section)
                pages[name] = [(section[0].astext(), section["ids"][0], words(section)) for section in sections]
        (Path(app.outdir) / "_static" / "sections.js").write_text(f"const SECTIONS = {json.dumps(pages)};\n")


def words(section: nodes.section) -> str:
    """Return the words of a section, without its subsections."""
    text = " ".join(part.astext() for part in section if not isinstance(part, nodes.section))
    return " ".join(sorted(set(re.findall(r"\w+", text.lower()))))


def model_without_self(_: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, returns: str) -> Any:
    """Show methods of the model without ``self``."""
    if what == "function" and name.startswith("model."):
        return re.sub(r"^\(self[^,)]*,? ?", "(", arguments), returns
    return None


def setup(app: Sphinx) -> None:
    # initialize gives these methods to the model; the reference shows them as model.save_parallelized and so on.
    model = sys.modules["model"] = ModuleType("model")
    for methods, names in {
        checkpoint_methods: ("save_parallelized", "from_parallelized", "wait_for_save"),
        pipeline_methods: ("execute_pipeline", "no_sync"),
    }.items():
        for name in names:
            setattr(model, name, getattr(methods, name))
    app.connect("source-read", prepare)
    app.connect("doctree-resolved", inline_drawings)
    app.connect("build-finished", write_sections)
    app.connect("autodoc-process-signature", model_without_self)
    for suffix in LANGUAGES:
        app.add_source_suffix(suffix, "shown_file")
    app.add_source_parser(FileParser)
