"""Tables in Markdown of all results, and the generated part of ``benchmarks/README.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import bar_chart, line_chart
from benchmarks.machine import ROOT
from benchmarks.results import FOLDER, caption, read_all

README = ROOT / "benchmarks" / "README.md"
START, END = "<!-- results: written by python -m benchmarks tables -->", "<!-- end of results -->"
Result = Mapping[str, Any]

FRONT = ROOT / "README.md"
FRONT_START, FRONT_END = "<!-- numbers: written by python -m benchmarks tables -->", "<!-- end of numbers -->"

PAGE = ROOT / "docs" / "performance.md"
SECTIONS = {
    "curves": (
        "Loss curves",
        "A GPT-2 of two blocks learns the text of the tutorials. Both runs begin with the same weights, take the same "
        "samples, and step with AdamW.",
    ),
    "step": (
        "Tensor parallelism over 2 ranks",
        "The parentheses say how many times as fast as one thread a variant is. A dash stands for a library that has "
        "no plan for the model, or for what was not measured.",
    ),
    "pipeline": (
        "Schedules of a pipeline over 2 stages",
        "The textbook's share is m / (m + p - 1) for m micro-batches and p stages. A schedule that splits backwards "
        "may reach more than it.",
    ),
    "replicas": (
        "Data-parallel replicas over 2 ranks",
        "The rivals are torch's own; above 1 a way is faster than its rival. `in the backward` is "
        "`autopar.average_in_backward`.",
    ),
    "optimizers": (
        "Optimizers that look at whole matrices",
        "Muon's matrices are stepped on one rank each (`owned`), on all (`duplicated`), or in shards "
        "(`sharded`). All ranks together send `sent` in a step, and the fullest rank keeps `state`. torch's Muon "
        "computes in bfloat16: a CPU without instructions for it takes hundreds of times as long as for AdamW.",
    ),
    "experts": (
        "A mixture over 2 ranks",
        "All ways train on the same tokens; each token chooses two experts. `sent` is what a rank's collectives are "
        "given in a step, `held` its weights, gradients and states.",
    ),
    "memory": (
        "Memory of a training step",
        "The parts are the tensors that live when most do. `planned` is what `autopar.plan_memory` says, of the rank "
        "that holds most; `resident` is the growth of the whole process.",
    ),
    "loading": (
        "Loading shards",
        "`autopar` is `autopar.from_pretrained` on 2 ranks, `initialize` is transformers' `from_pretrained` with "
        "`autopar.initialize` behind it.",
    ),
    "saving": (
        "Saving on 4 ranks",
        "The weights and AdamW's state of a Llama (experts: a Mixtral), written by all ranks. A share is all bytes "
        "divided by 4. `torch` is FSDP2 with `torch.distributed.checkpoint`, in turns with autopar's ZeRO 3.",
    ),
    "merging": (
        "Merging a checkpoint",
        "`fsync` and `sync` wait until the bytes are on the disk.",
    ),
    "planning": (
        "Planning without weights",
        "One process does the work of rank 0. This is the plan of `initialize`; `autopar plan` searches over many.",
    ),
}


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


def curves_table(result: Result) -> str:
    """Write both losses at some steps, and the largest difference of all."""
    rows = result["rows"]
    every = max(len(rows) // 8, 1)
    found = [(step, one, mesh, abs(mesh - one)) for step, one, mesh in map(dict.values, rows)]
    lines = [[step, f"{one:.6f}", f"{mesh:.6f}", f"{apart:.1e}"] for step, one, mesh, apart in found]
    most, at = max((apart, step) for step, _, _, apart in found)
    table = markdown([*rows[0], "difference"], [lines[0], *lines[every - 1 :: every]])
    return f"{table}\nThe largest difference of {len(rows)} steps is {most:.1e}, in step {at}.\n"


WRITERS: dict[str, Callable[[Result], str]] = {"step": step_table, "curves": curves_table}


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
    groups = {
        row["schedule"]: {"of m / (m + p - 1)": row["of textbook"]} for row in result["rows"] if "of textbook" in row
    }
    return bar_chart("Pipeline over 2 ranks", groups, "share of the textbook's m / (m + p - 1)", 1.0)


def curves_chart(result: Result) -> str:
    """Draw both losses over the steps."""
    lines = {name: [row[name] for row in result["rows"]] for name in list(result["rows"][0])[1:]}
    return line_chart("Loss of one process, and of 4 with autopar", lines, "nats per token, over training steps")


CHARTS: dict[str, Callable[[Result], str]] = {"step": step_chart, "pipeline": pipeline_chart, "curves": curves_chart}


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
    first = next(iter(rows))[0]
    shown = [kind for kind in KINDS if kind != "prefill"]
    lines: list[list[Any]] = [[KINDS[kind], *_beside(rows[first, kind])] for kind in shown]
    merge, copy = (next(r for r in results["merging"]["rows"] if r.get("variant") == v) for v in MERGED)
    lines.append(
        [f"merge a checkpoint of {merge['written, MB']} MB, s", f"{copy['s']} (`cp -r`)", None, None, merge["s"]]
    )
    size = f"{rows[first, 'step']['parameters'] / 1e6:.0f} M parameters, 2 CPU cores"
    return markdown([size, *RIVALS.values()], lines)


RIVALS = {
    "plain": "plain, one thread",
    "DTensor": "DTensor, tp 2",
    "transformers": "transformers' `tp_plan`, tp 2",
    "autopar": "**autopar, tp 2**",
}
KINDS = {
    "step": "training step, ms",
    "forward": "forward, ms",
    "prefill": "prefill, ms",
    "decode": "decoding, tokens/s",
}


def _beside(row: Mapping[str, Any]) -> list[str | None]:
    """One cell for each rival: the time, or tokens a second, and how many times as fast as one thread that is."""
    found = [(name, row["variants"].get(name)) for name in RIVALS]
    return [
        one
        and (f"{one['tokens_per_s']:.1f}" if row["kind"] == "decode" else f"{one['ms']:.0f}")
        + (f" ({one['speedup']:.2f} x)" if name != "plain" else "")
        for name, one in found
    ]


def rivals_table(result: Result) -> str:
    """Write what each kind of work takes beside its rivals, for all models."""
    lines = [[f"{row['row']}, {KINDS[row['kind']]}", *_beside(row)] for row in result["rows"]]
    return markdown(["", *RIVALS.values()], lines)


def page(results: Mapping[str, Result], digest: str | None = None) -> str:
    """Write the sections of docs/performance.md."""
    parts = []
    for name, (title, words) in SECTIONS.items():
        if name in results:
            chart = f"![{title}](../benchmarks/results/{name}.svg)\n\n" if name in CHARTS else ""
            table = rivals_table if name == "step" else WRITERS.get(name, plain_table)
            when = caption(dict(results[name]), digest)
            parts.append(f"## {title}\n\n{words}\n\n{chart}{table(results[name])}\n{when}\n")
    return "\n".join(parts)


MERGED = ("merge, fsync", "cp -r, sync")


def between(text: str, start: str, end: str, generated: str) -> str:
    """Put the generated part between its marks."""
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{generated}\n{end}{after}"


def update(folder: Path = FOLDER, readme: Path = README, project: Path | None = FRONT) -> str:
    """Write charts and the parts of the pages from the results in a folder; returns that of the benchmarks."""
    results = read_all(folder)
    if project is not None and {"step", "merging"} <= results.keys():
        project.write_text(between(project.read_text(), FRONT_START, FRONT_END, front(results)))
        PAGE.write_text(between(PAGE.read_text(), START, END, page(results)))
    for name, result in results.items():
        if name in CHARTS and result["rows"]:
            (folder / f"{name}.svg").write_text(CHARTS[name](result))
    generated = report(results)
    readme.write_text(between(readme.read_text(), START, END, generated))
    return generated
