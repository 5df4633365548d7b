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


def with_results(text: str, generated: str) -> str:
    """Put the generated part between its marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{generated}\n{END}{after}"


def update(folder: Path = FOLDER, readme: Path = README) -> str:
    """Write charts and the README's part from the results in a folder; returns the part."""
    results = read_all(folder)
    for name, result in results.items():
        if name in CHARTS and result["rows"]:
            (folder / f"{name}.svg").write_text(CHARTS[name](result))
    generated = report(results)
    readme.write_text(with_results(readme.read_text(), generated))
    return generated
