"""The guide and the model by hand in docs/policies.md, and the commands of docs/verify.md: outputs equal the pages'.

UPDATE_DOCS=1 python -m pytest tests/docs/test_guide.py      writes the outputs into the pages
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from autopar.cli import app
from autopar.policy.files import policy_folder
from autopar.tools.verification.outputs import TOLERANCES
from autopar.tools.verification.small_models import randomise
from autopar.tools.verification.verify import CHECKS
from tests.docs.pages import DOCS, ROOT, Code, codes, section
from tests.harness.worlds import pooled
from tests.parity import check, language_batches
from tests.verification.faults import FAULTS

PAGE = DOCS / "policies.md"
START, END = "## Your first policy in ten minutes", "## From a policy that exists"


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
            (line,) = code.text.splitlines()
            printed = run_line(line).output
            assert "verify" not in line or printed.endswith("all checks pass\n"), printed
        else:
            compared += 1
            found = printed.replace(f"{tmp_path}/", "").replace(f"{policy_folder()}/", "policies/")
            replaced = replaced.replace(f"```text\n{code.text}```", f"```text\n{elided(found, code.text)}```")
            if os.environ.get("UPDATE_DOCS") != "1":
                assert shown(code.text, tmp_path) == shown(elided(printed, code.text), tmp_path)
    assert compared == 3
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


BY_HAND = section(DOCS / "policies.md", "## By hand: grouped queries", "## Modules that are not Hugging Face models")
FILES = {name: (ROOT / "tutorials" / "data" / name).read_text() for name in ("gqa_model.py", "gqa_policy.yaml")}
GQA_POLICY = FILES["gqa_policy.yaml"]
COMMANDS, (VERIFY,) = [code.text.splitlines() for code in codes(BY_HAND, "bash")]
ROWS = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", BY_HAND, re.MULTILINE))  # rows of the tables


def build() -> Any:
    names: dict[str, Any] = {}
    exec(compile(FILES["gqa_model.py"], "gqa_model.py", "exec"), names)
    torch.manual_seed(0)
    return randomise(names["GroupedForCausalLM"](names["GroupedConfig"]()))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "gqa_model", raising=False)
    for name, text in FILES.items():
        Path(name).write_text(text)


def run_line(line: str) -> Any:
    return CliRunner().invoke(app, line.split()[1:])


@pytest.mark.parametrize("line", COMMANDS)
def test_the_policy_is_checked(files: None, line: str) -> None:
    result = run_line(line)
    assert result.exit_code == 0, result.output
    assert result.output.endswith("all checks pass\n")


@pooled(world_size=4)
def test_it_computes_the_same_on_four_ranks() -> None:
    check(build, language_batches(131), 4, policy=GQA_POLICY, first=lambda _, model: holds(model, [2, 1, 2, 1]))


def holds(model: Any, queries: list[int]) -> None:
    """Check the table of the page: the number of query heads, and one KV head, on each rank."""
    attention, mine = model.model.blocks[0].attention, queries[model.mpu.tp.rank]
    assert (attention.heads, attention.kv_heads, attention.groups) == (mine, 1, mine)
    assert attention.qkv.weight.shape[0] == 8 * (mine + 2)
    assert model.model.blocks[0].experts.down.shape == (4, 48, 20 // len(queries))


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (", follows: kv_heads", "", 0, "opens a region sharded by 'kv_heads' that no row closes"),
        ("[heads, kv_heads, kv_heads]", "[heads, heads, kv_heads]", 0, "describes 14 equal parts"),
        ("    attention.heads: heads\n", "", 0, "attributes"),
        (", replicate: true", "", 1, "does not fit GroupedForCausalLM"),
    ],
)
def test_the_table_of_errors(files: None, old: str, new: str, line: int, message: str) -> None:
    assert GQA_POLICY.count(old) == 1
    Path("gqa_policy.yaml").write_text(GQA_POLICY.replace(old, new))
    result = run_line(COMMANDS[line])
    assert result.exit_code != 0 and message in result.output, result.output
    parts = [[part for part in shown.split("...") if part.strip()] for shown in ROWS if "..." in shown]
    assert sum(all(part.strip() in result.output for part in shown) for shown in parts) == 1


@pytest.mark.tier("all")
@pytest.mark.parametrize("right", [True, False])
def test_verify_finds_a_wrong_layout_of_a_fused_weight(files: None, right: bool) -> None:
    Path("gqa_policy.yaml").write_text(GQA_POLICY if right else GQA_POLICY.replace("[ffn, ffn]", "ffn"))
    assert run_line(COMMANDS[0]).exit_code == 0, "the shapes fit either way"
    result = run_line(VERIFY)
    assert result.output.rstrip().endswith("all checks pass" if right else "some checks fail"), result.output
    assert right or re.search(r"first difference: .*model\.blocks\.0\.mlp", result.output), result.output


VERIFY_PAGE = DOCS / "verify.md"


def words(printed: str) -> list[str]:
    """The lines without numbers, which of the tensors is the worst, and the widths of columns."""
    text = re.sub(r"(worst [\w ]+): [\w.]+", r"\1", printed)
    text = re.sub(r"\d+(\.\d+)?(e-\d+)?|equal", "#", re.sub(r"─+", "-", text))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if not line.startswith("all-")]  # what carries collectives depends on the machine


def test_the_commands_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    text = VERIFY_PAGE.read_text()
    (policy,) = codes(text, "yaml")
    assert policy.file
    (tmp_path / policy.file).write_text(policy.text)
    right, wrong = codes(text, "bash")
    for number, (code, status) in enumerate(((right, 0), (wrong, 1))):
        result = CliRunner().invoke(app, shlex.split(code.text)[1:])
        assert result.exit_code == status, result.output
        shown, printed = codes(text, "text")[number].text, result.stdout.replace(f"{tmp_path}/", "")
        if os.environ.get("UPDATE_DOCS"):
            before = f"```bash\n{code.text}```\n\n```text\n"
            text = text.replace(f"{before}{shown}```", f"{before}{printed}```")
            VERIFY_PAGE.write_text(text)
        else:
            assert words(printed) == words(shown)


def test_the_page_lists_every_argument_and_check() -> None:
    command = get_command(app).commands["verify"]  # type: ignore[attr-defined]
    options = {max(parameter.opts, key=len) for parameter in command.params if parameter.name != "model"}
    table = "".join(line for line in VERIFY_PAGE.read_text().splitlines() if line.startswith("| `--"))
    assert set(re.findall(r"`(--[a-z-]+)`", table)) == options
    assert [
        name for name in re.findall(r"^\| `(\w+)` \|", VERIFY_PAGE.read_text(), re.MULTILINE) if name != "MODEL"
    ] == list(CHECKS)


def test_the_numbers_of_the_page() -> None:
    text = " ".join(VERIFY_PAGE.read_text().split())
    assert f"plant {len(FAULTS)} faults," in text
    for dtype, allowed in TOLERANCES.items():
        assert f"{allowed:.0e} in {str(dtype).removeprefix('torch.')}".replace("e-0", "e-") in text
