"""Run all that needs a GPU, tests and benchmarks, and write one report: ``make gpu``, less than 9 minutes.

    python -m benchmarks.gpu                            # on the GPU: benchmarks/results/gpu.md and gpu.json
    python -m benchmarks.gpu --device cpu               # the same sections with tiny models, without a GPU
    python -m benchmarks.gpu --sections overhead loss

Needs no network. A section that fails or hangs is in the report with its traceback; the others run all the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import results
from benchmarks.gpu.report import BUDGET, SECTIONS, run
from benchmarks.ranks import prepare


def main(arguments: list[str]) -> int:
    """Run the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--folder", type=Path, default=results.FOLDER, help="where the report is written")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all sections")
    chosen = parser.parse_args(arguments)
    prepare()
    from benchmarks.machine import gpu_facts

    gpu = gpu_facts()
    if chosen.device == "cuda" and not gpu["available"]:
        print("torch sees no GPU here; the sections run with tiny models and --device cpu", file=sys.stderr)
        print(f"nvidia-smi: {gpu['nvidia_smi']}", file=sys.stderr)
        return 2
    options = {"device": chosen.device, "tiny": chosen.device == "cpu", "budget": chosen.budget}
    result = run(options, chosen.sections, chosen.folder, gpu)
    print(f"{chosen.folder}/{result['benchmark']}.md")
    return 0 if all(section["status"] in ("ok", "no tests") for section in result["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
