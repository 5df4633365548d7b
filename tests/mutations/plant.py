"""Plant the faults of ``faults.yaml`` one by one in a copy of the tree, and see whether the test named there fails.

    python -m tests.mutations.plant                       # all of them
    python -m tests.mutations.plant 3 7-9 "bias"          # by number, or by a part of the name or mechanism
    python -m tests.mutations.plant 3 --with tests/test_layout.py tests/features/experts/test_experts.py

It ends with code 1 if a fault is not caught.
"""

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness.tiers import TIERS
from tests.mutations.faults import ROOT, Fault, problems, read, tiers_of

_LINKED = (".venv", ".cache")  # large, and no fault is planted there
_counter = itertools.count(1)
_LEFT_OUT = shutil.ignore_patterns(".git", ".pytest_cache", ".mypy_cache", ".ruff_cache", *_LINKED)


@contextlib.contextmanager
def copied(root: Path = ROOT) -> Iterator[Path]:
    """Copy the tree into a temporary folder, with links to what no fault is planted in."""
    with tempfile.TemporaryDirectory(prefix="autopar-faults-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(root, tree, ignore=_LEFT_OUT, symlinks=True)
        for name in _LINKED:
            if (root / name).exists():
                (tree / name).symlink_to((root / name).resolve())
        yield tree


@contextlib.contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    """Plant a fault in the copy, and put the file back."""
    path = tree / fault.file
    text, times = path.read_text(), path.stat()
    path.write_text(fault.planted(text))
    when = times.st_mtime + 10 * next(_counter)  # compiled files go by seconds: none of another fault is taken for it
    os.utime(path, (when, when))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def run(tests: Sequence[str], tree: Path, timeout: float, *, first: bool = True) -> tuple[int | None, str]:
    """Run tests in the copy.

    Args:
        first: stop at the first failure.

    Returns:
        pytest's exit code, None if it took too long; and its output.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    command += ["-x"] if first else []
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # ranks too
        return None, process.communicate()[0]


def wanted(faults: list[Fault], words: Sequence[str]) -> list[tuple[int, Fault]]:
    """Return the faults that are asked for, with their numbers; all of them without words."""
    numbered = list(enumerate(faults, 1))
    if not words:
        return numbered
    numbers: set[int] = set()
    for word in words:
        if re.fullmatch(r"\d+(-\d+)?", word):
            start, _, stop = word.partition("-")
            numbers.update(range(int(start), int(stop or start) + 1))
        else:
            numbers.update(n for n, fault in numbered if word in fault.name or word in (fault.mechanism, fault.file))
    return [(number, fault) for number, fault in numbered if number in numbers]


def table(faults: Sequence[Fault], tiers: Sequence[str]) -> str:
    """Return the list as a table of Markdown."""
    rows = ["| fault | where | caught by | in |", "|---|---|---|---|"]
    for fault, tier in zip(faults, tiers, strict=True):
        test = fault.caught_by.removeprefix("tests/").replace("::", " ")
        rows.append(f"| {fault.name} | `{fault.file}` | `{test}` | `{TIERS[tier].command}` |")
    return "\n".join(rows)


def verdict(code: int | None, output: str) -> str:
    """Say what pytest's exit code and output mean for a fault."""
    if code is None:
        return "NOT CAUGHT (too slow)"
    if "forkserver.py" in output and re.search(r"^E +EOFError", output, re.MULTILINE):
        return "NOT CAUGHT (no rank could start: the fork server plans a model, which fails)"
    return {0: "NOT CAUGHT", 1: "caught"}.get(code, f"NOT CAUGHT (pytest ended with {code}: no test ran)")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.plant", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("faults", nargs="*", help="numbers, ranges of them, or parts of names; all without any")
    parser.add_argument("--with", dest="tests", nargs="+", metavar="TEST", help="other tests than the one listed")
    parser.add_argument("--unplanted", action="store_true", help="plant nothing: the tests must pass then")
    parser.add_argument("--markdown", action="store_true", help="print the list as a table, and run nothing")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for each fault (%(default)g)")
    parser.add_argument("--show", action="store_true", help="print what pytest says")
    options = parser.parse_args()
    faults = read()
    if options.markdown:
        print(table(faults, tiers_of(faults)))
        return 0
    if wrong := problems(faults):
        print("\n".join(wrong))
        return 1
    listed = wanted(faults, options.faults)
    verdicts = Counter[str]()
    with copied() as tree:
        if options.unplanted:
            tests = options.tests or sorted({fault.caught_by for _, fault in listed})
            code, output = run(tests, tree, options.timeout * len(tests), first=False)
            print(output)
            return 1 if code is None else code
        for number, fault in listed:
            start = time.monotonic()
            with planted(fault, tree):
                code, output = run(options.tests or [fault.caught_by], tree, options.timeout, first=not options.tests)
            said = verdict(code, output)
            verdicts[said.partition(" (")[0]] += 1
            print(f"{number:3} {said:10} {time.monotonic() - start:5.1f} s  {fault.name}", flush=True)
            if options.show or code not in (0, 1):
                print("\n".join(output.splitlines()[-60:]), flush=True)
            elif options.tests:
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                print("".join(f"      failed: {name}\n" for name in failed), end="", flush=True)
    print(", ".join(f"{count} {said}" for said, count in sorted(verdicts.items())) or "no fault is called so")
    return 0 if set(verdicts) == {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())
