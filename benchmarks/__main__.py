"""Run benchmarks, and write their results, tables and charts.

python -m benchmarks                       # the default selection, some minutes: make bench
python -m benchmarks step --rows small --kinds step forward
python -m benchmarks tables                # only README and charts, from benchmarks/results/
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.ranks import prepare

NAMES = (
    "step",
    "memory",
    "scaling",
    "planning",
    "pipeline",
    "replicas",
    "checks",
    "loading",
    "merging",
    "saving",
    "curves",
    "optimizers",
    "experts",
)
# What a run of all of them changes in the defaults of each, so that it takes minutes.
SHORT: dict[str, list[str]] = {
    "step": ["--rows", "llama", "small", "--kinds", "step", "decode", "--rounds", "5", "--decode-rounds", "2"],
    "scaling": ["--rounds", "2", "--what", "ranks", "types"],
    "planning": ["--rounds", "1", "--models", "405b"],
    "pipeline": ["--rounds", "2"],
    "replicas": ["--rounds", "3"],
    "checks": ["--rounds", "20", "--rows", "small"],
    "loading": ["--rounds", "1", "--layers", "4", "--meshes", "dp 4, ZeRO 3"],
    "merging": ["--rounds", "2", "--gigabytes", "0.3"],
    "saving": ["--rounds", "1", "--megabytes", "30"],
    "curves": ["--steps", "40"],
    "optimizers": ["--rows", "small", "--rounds", "3", "--ranks", "2"],
    "experts": ["--experts", "8", "--rounds", "3"],
}
OUT = results.ROOT / "benchmarks" / "out"


def run(name: str, arguments: list[str], folder: Path) -> dict[str, Any]:
    """Measure, write the result, print its table."""
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    options = vars(parser.parse_args(arguments))
    prepare()
    start = time.perf_counter()
    rows = module.measure(options)
    result = results.make(name, options, rows, time.perf_counter() - start)
    path = results.write(result, folder)
    print(f"{tables.section(result)}{path}: {result['seconds']} s\n", flush=True)
    return result


def main(arguments: list[str]) -> int:
    """Run what the first argument names with the others, or all shortly."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=["all", *NAMES, "tables"], default="all")
    parser.add_argument("--folder", type=Path, help="of the results")
    parser.add_argument("--full", action="store_true", help="all with their own defaults")
    chosen, rest = parser.parse_known_args(arguments)
    failed = []
    short = chosen.name == "all" and not chosen.full
    folder = chosen.folder or (OUT if short else results.FOLDER)
    if chosen.name == "all" and rest:
        parser.error(f"{rest[0]} belongs to one benchmark: name it")
    for name in {"all": NAMES, "tables": ()}.get(chosen.name, (chosen.name,)):
        try:
            run(name, SHORT.get(name, []) if short else rest, folder)
        except Exception as error:  # the others are measured all the same
            if chosen.name != "all":
                raise
            failed.append(name)
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
    if folder == results.FOLDER:
        tables.update()
    kept = chosen.folder or results.FOLDER
    for name, result in results.read_all(kept).items():
        if results.is_stale(result):
            print(f"{kept / name}.json of {result['date']} is {results.STALE}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
