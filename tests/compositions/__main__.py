"""Repeat the compositions of some seeds: ``python -m tests.compositions 17 --ranks 4``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.compositions.draw import draw
from tests.compositions.worlds import check


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a composition fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.compositions", description=__doc__)
    parser.add_argument("seeds", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--until", action="store_true", help="all seeds from the first to the second one")
    options = parser.parse_args(arguments)
    seeds = range(options.seeds[0], options.seeds[-1] + 1) if options.until else options.seeds
    failed = 0
    for seed in seeds:
        print(f"seed {seed}: {draw(seed, options.ranks)}", flush=True)
        try:
            check(seed, options.ranks)
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
    print(f"{len(seeds) - failed} of {len(seeds)} are right, or refused on all ranks alike")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
