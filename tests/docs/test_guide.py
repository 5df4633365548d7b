"""The guide in docs/policies.md, followed line by line in an empty folder: the outputs equal those on the page.

UPDATE_DOCS=1 python -m pytest tests/docs/test_guide.py      writes the outputs into the page
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from autopar.cli import app
from autopar.policy.files import policy_folder
from tests.docs.pages import DOCS, Code, codes, section
from tests.tutorials.run_scripts import run_script
from tests.worlds import distributed

PAGE = DOCS / "policies.md"
START, END = "## Your first policy in ten minutes", "## From a policy that exists"


@distributed(world_size=2)
def on_two_ranks(folder: Path, script: str) -> None:
    os.chdir(folder)
    printed = run_script(str(folder / script), [])
    if dist.get_rank() == 0:
        (folder / "printed.txt").write_text(printed)


def command(line: str, folder: Path) -> str:
    """Return the output of a command."""
    name, *arguments = shlex.split(line)
    if name == "autopar":
        return CliRunner().invoke(app, arguments).output
    assert (name, arguments[:2]) == ("torchrun", ["--nproc-per-node", "2"])
    on_two_ranks(folder, arguments[2])
    return (folder / "printed.txt").read_text()


def write(code: Code, folder: Path) -> None:
    """Write the file of a block. A block that begins with ``# FILE, before LINE`` is inserted into the file there."""
    assert code.file
    head, _, text = code.text.partition("\n")
    before = re.search(r", before (\w+)$", head)
    if before is not None:
        old = (folder / code.file).read_text()
        place = re.search(rf"^{before.group(1)}", old, re.MULTILINE)
        assert place is not None
        text = old[: place.start()] + text + old[place.start() :]
    (folder / code.file).write_text(text)


def shown(printed: str, folder: Path) -> str:
    printed = printed.replace(f"{policy_folder()}/", "policies/").replace(f"{folder}/", "")
    return re.sub(r"\d+ model types", "# model types", printed)


def elided(printed: str, like: str) -> str:
    head, dots, tail = (part.splitlines(keepends=True) for part in like.partition("...\n"))
    lines = printed.splitlines(keepends=True)
    return "".join([*lines[: len(head)], *dots, *lines[-len(tail) :]] if dots else lines)


@pytest.mark.tier("all")
def test_the_first_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    text = section(PAGE, START, END)
    printed, compared, replaced = "", 0, text
    for code in codes(text):
        if code.file:
            write(code, tmp_path)
        elif code.language == "bash":
            printed = "".join(command(line, tmp_path) for line in code.text.splitlines())
        else:
            compared += 1
            found = printed.replace(f"{tmp_path}/", "").replace(f"{policy_folder()}/", "policies/")
            replaced = replaced.replace(f"```text\n{code.text}```", f"```text\n{elided(found, code.text)}```")
            if os.environ.get("UPDATE_DOCS") != "1":
                assert shown(code.text, tmp_path) == shown(elided(printed, code.text), tmp_path)
    assert compared == 4
    assert printed.endswith("all checks pass\n") and "pp rank 1" in printed
    assert "policies/my_policy" not in text
    if os.environ.get("UPDATE_DOCS") == "1":
        PAGE.write_text(PAGE.read_text().replace(text, replaced))


def test_the_policy_of_a_renamed_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = [code for code in codes(PAGE.read_text(), "yaml") if code.file == "my_llama.yaml"]
    write(code, tmp_path)
    (tmp_path / "my_code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'my_llama'\n\n"
        "class MyLlama(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    result = CliRunner().invoke(app, ["policy", "check", "my_llama.yaml", "--model", "my_code.py:MyLlama"])
    assert result.exit_code == 0, result.output
