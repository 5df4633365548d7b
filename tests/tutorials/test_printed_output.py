"""The outputs printed in tutorials/README.md are those of the scripts there, run as the README says.

Two are run by torchrun, one of them with its restarts, and one by plain Python. The others run on as many ranks of the
fork server, which have torch and transformers imported: torchrun's processes would import them for longer than most
scripts run.
"""

import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.deepspeed_package import need_deepspeed, put_on_path
from tests.fetched_packages import import_package, need_package
from tests.tutorials.run_scripts import start_script
from tests.worlds import spawn

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\d.]*\d)")
BY_TORCHRUN = ("02", "17")
TIME = re.compile(r"in \d+\.\d+ s$|[\d,]+ tokens/s$")


def documented() -> dict[str, tuple[str, str]]:
    """Script -> the first command that runs it, and the output printed below."""
    text = (ROOT / "tutorials" / "README.md").read_text(encoding="utf-8")
    found = re.findall(
        r"```bash\n((?:torchrun|python) [^\n]*tutorials/(\w+)\.py[^\n]*)\n[^`]*```\n\n```text\n(.*?)```", text, re.S
    )
    return {script: (command, output) for command, script, output in found}


def difference(printed: str, run: str) -> str | None:
    """How a line of the README differs from that of a run by more than another machine could explain; None if it does
    not. Whole numbers are equal, others to a thousandth, and what is zero but for rounding stays so.
    """
    if TIME.search(printed) and TIME.search(run):
        printed, run = TIME.sub("", printed), TIME.sub("", run)
    if NUMBER.sub("#", printed) != NUMBER.sub("#", run):
        return "other words"
    for one, other in zip(NUMBER.findall(printed), NUMBER.findall(run), strict=True):
        a, b = (float(number.replace(",", "")) for number in (one, other))
        whole = re.fullmatch(r"[\d,]+", one) and re.fullmatch(r"[\d,]+", other)
        tiny = max(abs(a), abs(b)) < 1e-2 and "e" in one + other  # largest differences
        if a != b if whole else not tiny and abs(a - b) > 1e-3 * max(abs(a), abs(b)):
            return f"{one} and {other}"
    return None


def test_every_tutorial_prints_something_in_the_readme() -> None:
    scripts = {path.stem for path in (ROOT / "tutorials").glob("[0-9]*.py")}
    assert set(documented()) == scripts and len(scripts) == 26


def test_every_tutorial_has_its_page_with_a_command_and_an_output() -> None:
    sections = re.split(r"^## ", (ROOT / "tutorials" / "README.md").read_text(), flags=re.MULTILINE)
    for script in sorted((ROOT / "tutorials").glob("[0-9]*.py")):
        (section,) = [part for part in sections if f"({script.name})" in part]
        assert re.search(rf"^(torchrun|python) .*{re.escape(script.name)}", section, re.MULTILINE)
        assert "```text\n" in section


@pytest.mark.parametrize(
    ("printed", "run", "expected"),
    [
        ("loss 7.645693 -> 6.520081", "loss 7.645690 -> 6.520099", None),
        ("loss 5.689842 -> 5.183790", "loss 7.645693 -> 6.520081", "5.689842 and 7.645693"),
        ("resumed at step 4, loss 6.520081", "resumed at step 10, loss 6.520081", "4 and 10"),
        ("differ by 4.77e-07", "differ by 0.00e+00", None),
        ("differ by 4.77e-07", "differ by 1.94e+00", "4.77e-07 and 1.94e+00"),
        ("model-tp0-pp0.safetensors (1,356,976 bytes)", "model-tp0-pp0.safetensors (1,356,984 bytes)", "1,356,976"),
        ("generated 20 tokens in 0.40 s", "generated 20 tokens in 3.10 s", None),
        ("at most 6.82 MiB, 1,317 tokens/s", "at most 6.82 MiB, 940 tokens/s", None),
        ("at most 6.82 MiB, 1,317 tokens/s", "at most 13.27 MiB, 1,317 tokens/s", "6.82 and 13.27"),
        ("[0.0, 1.0] | [2.0, 3.0]", "[0.0, 1.0] | [2.0, 3.5]", "3.0 and 3.5"),
        ("same tokens: True", "same tokens: False", "other words"),
    ],
)
def test_lines_are_compared_by_their_words_and_numbers(printed: str, run: str, expected: str | None) -> None:
    found = difference(printed, run)
    assert found is None if expected is None else found is not None and found.startswith(expected)


# Each is run with other words than here by tests/tutorials/test_tutorials.py.
IN_EVERY_RUN = {*("01", "02", "05", "09", "15", "18")}


def _kept(script: str) -> object:
    return script if script[:2] in IN_EVERY_RUN else pytest.param(script, marks=pytest.mark.tier("sweep"))


def by_torchrun(arguments: list[str], folder: Path) -> str:
    """What all ranks print."""
    return by_python(["-m", "torch.distributed.run", "--standalone", *arguments], folder)


def by_python(arguments: list[str], folder: Path) -> str:
    """What a process prints, and those that it starts."""
    settings = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **settings},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_this_rank(command: list[str], folder: Path) -> None:
    """Run a script on a rank of a world, with the environment that torchrun makes.

    What the rank and the processes that it starts print goes to a file.
    """
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, CUDA_VISIBLE_DEVICES="")
    if "deepspeed" in command[0]:
        put_on_path()
    if "grpo" in command[0]:
        import_package("trl")
    os.chdir(folder)
    with (folder / f"printed-{rank}").open("w") as printed:
        os.dup2(printed.fileno(), 1)
    with open(1, "w", buffering=1, closefd=False) as sys.stdout:
        start_script(command[0], command[1:])


@pytest.mark.tier("all")
@pytest.mark.parametrize("script", [_kept(script) for script in sorted(documented())])
def test_the_readme_prints_what_the_script_prints(script: str, tmp_path: Path) -> None:
    if script == "16_deepspeed":
        need_deepspeed()
    if script == "26_grpo":
        need_package("trl")
    command, output = documented()[script]
    if command.startswith("python "):
        run = by_python([str(ROOT / command.split()[1]), "--output", str(tmp_path / "out")], tmp_path)
        assert [difference(*lines) for lines in zip_longest(output.splitlines(), run.splitlines(), fillvalue="")] == [
            None for _ in output.splitlines()
        ]
        return
    pattern = r"torchrun --nproc-per-node (\d+) (--max-restarts \d+ )?(\S+) ?(.*)"
    processes, restarts, path, options = re.fullmatch(pattern, command).groups(default="")  # type: ignore[union-attr]
    arguments = [str(ROOT / path), *options.split(), "--output", str(tmp_path / "tutorials" / "out")]
    if script[:2] in BY_TORCHRUN:
        run = by_torchrun(["--nproc-per-node", processes, *restarts.split(), *arguments], tmp_path)
    else:
        assert not restarts
        spawn(__name__, "on_this_rank", int(processes), timeout=900, args=(arguments, tmp_path))
        run = "".join(file.read_text() for file in sorted(tmp_path.glob("printed-*")))
    different = [
        f"{printed!r} in the README, {line!r} in this run: {what}"
        for printed, line in zip_longest(output.splitlines(), run.splitlines(), fillvalue="")
        if (what := difference(printed, line))
    ]
    assert not different, "\n".join(different)
