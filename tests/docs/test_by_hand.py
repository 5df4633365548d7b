"""The model of docs/policies.md with grouped queries, fused weights and experts, and its policy by hand."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from autopar.cli import app
from autopar.tools.verification.small_models import randomise
from tests.docs.pages import DOCS, ROOT, codes, section
from tests.parity import check, language_batches
from tests.pool import pooled

TEXT = section(DOCS / "policies.md", "## By hand: grouped queries", "## Modules that are not Hugging Face models")
FILES = {name: (ROOT / "tutorials" / "data" / name).read_text() for name in ("gqa_model.py", "gqa_policy.yaml")}
POLICY = FILES["gqa_policy.yaml"]
COMMANDS, (VERIFY,) = [code.text.splitlines() for code in codes(TEXT, "bash")]
ROWS = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", TEXT, re.MULTILINE))  # rows of the tables


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


def run(line: str) -> Any:
    return CliRunner().invoke(app, line.split()[1:])


@pytest.mark.parametrize("line", COMMANDS)
def test_the_policy_is_checked(files: None, line: str) -> None:
    result = run(line)
    assert result.exit_code == 0, result.output
    assert result.output.endswith("all checks pass\n")


@pooled(world_size=4)
def test_it_computes_the_same_on_four_ranks() -> None:
    check(build, language_batches(131), 4, policy=POLICY, first=lambda _, model: holds(model, [2, 1, 2, 1]))


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
    assert POLICY.count(old) == 1
    Path("gqa_policy.yaml").write_text(POLICY.replace(old, new))
    result = run(COMMANDS[line])
    assert result.exit_code != 0 and message in result.output, result.output
    parts = [[part for part in shown.split("...") if part.strip()] for shown in ROWS if "..." in shown]
    assert sum(all(part.strip() in result.output for part in shown) for shown in parts) == 1


@pytest.mark.tier("all")
@pytest.mark.parametrize("right", [True, False])
def test_verify_finds_a_wrong_layout_of_a_fused_weight(files: None, right: bool) -> None:
    Path("gqa_policy.yaml").write_text(POLICY if right else POLICY.replace("[ffn, ffn]", "ffn"))
    assert run(COMMANDS[0]).exit_code == 0, "the shapes fit either way"
    result = run(VERIFY)
    assert result.output.rstrip().endswith("all checks pass" if right else "some checks fail"), result.output
    assert right or re.search(r"first difference: .*model\.blocks\.0\.mlp", result.output), result.output
