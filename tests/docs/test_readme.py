"""README.md: it is short, both sides of its diff train to the same losses, and its numbers match the results."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks import tables
from benchmarks.results import FOLDER, STALE, read_all
from tests.docs.pages import README, codes
from tests.harness.worlds import distributed
from tests.small import gpt2

WORDS = ("the", "rank", "holds", "a", "shard", "of", "each", "weight", "and", "stages", "pass", "activations", "on")


def loop(sign: str) -> str:
    (diff,) = codes(README.read_text(), "diff")
    return "".join(f"{line[1:]}\n" for line in diff.text.splitlines() if not line or line[0] in (" ", sign))


def prepare(folder: Path) -> None:
    """Make what the script reads: a model and a tokenizer called "gpt2", and lines of different lengths."""
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate([*WORDS, "<eos>"])}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / "gpt2")
    gpt2().save_pretrained(folder / "gpt2")
    lines = [" ".join(WORDS[(row + 3 * place) % len(WORDS)] for place in range(3 + row % 7)) for row in range(24)]
    (folder / "my.txt").write_text("\n".join(lines))


def losses(script: str, folder: Path) -> list[float]:
    """Run the script, and return the losses that it prints."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "train.py", "exec"), {})
    found = re.findall(r"^\d+ ([\d.]+)$", printed.getvalue(), re.MULTILINE)
    return [float(loss) for loss in found]


@distributed(world_size=4)
def run_after(folder: Path, plain: list[float]) -> None:
    found = losses(loop("+"), folder)
    assert found == (pytest.approx(plain, abs=2e-6) if dist.get_rank() == 0 else [])
    replicas = loop("+").replace('{"tp": 2, "pp": 2}', '{"tp": 2}').replace('"trained"', '"replicas"')
    assert len(losses(replicas, folder)) == (len(plain) if dist.get_rank() == 0 else 0)


@distributed(world_size=1)
def run_alone(folder: Path, plain: list[float]) -> None:
    alone = loop("+").replace('{"tp": 2, "pp": 2}', "{}").replace('"trained"', '"alone"')
    assert losses(alone, folder) == pytest.approx(plain, abs=2e-6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the script leaves its file open
@pytest.mark.tier("all")
def test_the_loop_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    plain = losses(loop("-"), tmp_path)
    assert len(plain) == 3 and plain[-1] < plain[0]
    (tmp_path / "trained").rename(tmp_path / "plain")
    run_after(tmp_path, plain)
    run_alone(tmp_path, plain)
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    for name in ("trained", "replicas", "alone"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert AutoTokenizer.from_pretrained(tmp_path / name)("a shard")["input_ids"] == [3, 4]
        assert max(float((found[key] - wanted[key]).abs().max()) for key in wanted) < 2e-5, name


def test_numbers_are_those_of_the_results() -> None:
    assert len(README.read_text().splitlines()) <= 120
    _, _, rest = README.read_text().partition(tables.FRONT_START)
    assert rest.partition(tables.FRONT_END)[0].strip() == tables.front(read_all(FOLDER)).strip()


def test_the_page_on_performance_has_the_tables_of_the_results() -> None:
    _, _, rest = tables.PAGE.read_text().partition(tables.START)
    found, wanted = (" ".join(text.split()) for text in (rest.partition(tables.END)[0], tables.page(read_all(FOLDER))))
    note = f" **{STALE}**"  # which the next change of the code makes true
    assert found.replace(note, "") == wanted.replace(note, "")
