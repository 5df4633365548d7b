"""Tables in Markdown of all results, and the generated part of ``benchmarks/README.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import bar_chart
from benchmarks.machine import ROOT
from benchmarks.results import FOLDER, caption, read_all

README = ROOT / "benchmarks" / "README.md"
START, END = "<!-- results: written by python -m benchmarks tables -->", "<!-- end of results -->"
Result = Mapping[str, Any]

FRONT = ROOT / "README.md"
FRONT_START, FRONT_END = "<!-- numbers: written by python -m benchmarks tables -->", "<!-- end of numbers -->"


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Make a table; numbers keep four digits."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell(entry) for entry in row) + " |" for row in lines) + "\n"


def cell(value: Any) -> str:
    """Write a cell: four significant digits, ``-`` for None, no bars of its own."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def step_table(result: Result) -> str:
    """Write one table for each row and kind, and the reasons of what is missing."""
    parts = []
    for row in result["rows"]:
        size = ", ".join(f"{key} {value}" for key, value in row["size"].items())
        parts.append(f"**{row['row']}, {row['kind']}** ({size}; {row['parameters'] / 1e6:.1f} M parameters)\n\n")
        header = ["variant", "ms", "p10", "CPU ms a rank", "plain / variant", "of the limit"]
        limit = row["variants"].get("limit", {}).get("speedup")
        lines = []
        for name, found in row["variants"].items():
            alone = name.startswith("collectives")
            share = found["speedup"] / limit if limit and not alone and name != "plain" else None
            speedup = None if alone else found["speedup"]
            lines.append([name, found["ms"], found["p10_ms"], found["cpu_ms"], speedup, share])
            lines[-1] += [found["tokens_per_s"] if not alone else None] if row["kind"] == "decode" else []
        parts.append(markdown(header + (["tokens/s"] if row["kind"] == "decode" else []), lines) + "\n")
        parts += [f"`{name}`: {reason}\\\n" for name, reason in row["missing"].items()]
        parts.append(f"Collectives: {row['collectives']}.\n\n")
    return "".join(parts)


def plain_table(result: Result) -> str:
    """Write the rows of a benchmark as they are; rows with other keys begin another table."""
    parts: list[str] = []
    open_rows: list[Mapping[str, Any]] = []
    for row in [*result["rows"], {}]:
        if open_rows and list(row) != list(open_rows[0]):
            header = list(open_rows[0])
            parts.append(markdown(header, [[entry[key] for key in header] for entry in open_rows]))
            open_rows = []
        open_rows.append(row)
    return "\n".join(parts)


WRITERS: dict[str, Callable[[Result], str]] = {"step": step_table}


def step_chart(result: Result) -> str:
    """Draw how many times as fast as one thread each variant is."""
    groups = {
        f"{row['row']}, {row['kind']}": {
            name: found["speedup"]
            for name, found in row["variants"].items()
            if name != "plain" and not name.startswith("collectives")
        }
        for row in result["rows"]
    }
    return bar_chart("Tensor parallelism over 2 ranks", groups, "times as fast as one process with one thread", 1.0)


def pipeline_chart(result: Result) -> str:
    """Draw the share of the textbook's efficiency that each schedule reaches."""
    groups = {row["schedule"]: {"of m / (m + p - 1)": row["of textbook"]} for row in result["rows"]}
    return bar_chart("Pipeline over 2 ranks", groups, "share of the textbook's m / (m + p - 1)", 1.0)


CHARTS: dict[str, Callable[[Result], str]] = {"step": step_chart, "pipeline": pipeline_chart}


def section(result: Result, digest: str | None = None) -> str:
    """Write all that a result says: heading, where and when, chart, table."""
    name = result["benchmark"]
    chart = f"![{name}](results/{name}.svg)\n\n" if name in CHARTS and result["rows"] else ""
    table = WRITERS.get(name, plain_table)(result)
    return f"### {name}\n\n{caption(dict(result), digest)}\n\n{chart}{table}\n"


def report(results: Mapping[str, Result], digest: str | None = None) -> str:
    """Write all sections."""
    return "".join(section(result, digest) for result in results.values()) or "No results yet.\n"


def front(results: Mapping[str, Result]) -> str:
    """Write the table of the project's README: the first model of ``step`` beside its rivals, and a merge."""
    rows = {(row["row"], row["kind"]): row for row in results["step"]["rows"]}
    rivals = ("plain", "DTensor", "transformers", "autopar")
    first = next(iter(rows))[0]
    lines = []
    for kind, words in {"step": "training step, ms", "forward": "forward, ms", "decode": "decoding, tokens/s"}.items():
        found = rows[first, kind]["variants"]
        cells = [
            (f"{one['tokens_per_s']:.1f}" if kind == "decode" else f"{one['ms']:.0f}")
            + (f" ({one['speedup']:.2f} x)" if name != "plain" else "")
            for name, one in ((name, found[name]) for name in rivals)
        ]
        lines.append([words, *cells])
    merge, copy = (next(r for r in results["merging"]["rows"] if r.get("variant") == v) for v in MERGED)
    lines.append(
        [f"merge a checkpoint of {merge['written, MB']} MB, s", f"{copy['s']} (`cp -r`)", None, None, merge["s"]]
    )
    size = f"{rows[first, 'step']['parameters'] / 1e6:.0f} M parameters, 2 CPU cores"
    heads = [size, "plain, one thread", "DTensor, tp 2", "transformers' `tp_plan`, tp 2", "**autopar, tp 2**"]
    return markdown(heads, lines)


MERGED = ("merge, fsync", "cp -r, sync")


def between(text: str, start: str, end: str, generated: str) -> str:
    """Put the generated part between its marks."""
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{generated}\n{end}{after}"


def update(folder: Path = FOLDER, readme: Path = README, project: Path | None = FRONT) -> str:
    """Write charts and the parts of both READMEs from the results in a folder; returns that of the benchmarks."""
    results = read_all(folder)
    if project is not None and {"step", "merging"} <= results.keys():
        project.write_text(between(project.read_text(), FRONT_START, FRONT_END, front(results)))
    for name, result in results.items():
        if name in CHARTS and result["rows"]:
            (folder / f"{name}.svg").write_text(CHARTS[name](result))
    generated = report(results)
    readme.write_text(between(readme.read_text(), START, END, generated))
    return generated
