"""Tables in Markdown of all results, and the generated part of ``benchmarks/README.md``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
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
SECTIONS = {  # result -> heading, introduction
    "curves": (
        "Loss curves",
        "A small GPT-2 trains on the text of the tutorials with AdamW. Both runs start with the same weights and see "
        "the same samples.",
    ),
    "step": (
        "Tensor parallelism over 2 ranks",
        "The speedup over one thread is in parentheses. A dash means that the library has no plan for the model, or "
        "that nothing was measured.",
    ),
    "pipeline": (
        "Pipeline schedules over 2 stages",
        "`of the bound` is the speedup divided by its bound, p m / (m + p - 1) for m micro-batches and p stages. "
        "Schedules that split the backward pass, or have several stages on a rank, can exceed it.",
    ),
    "optimizers": (
        "Optimizers that need full matrices",
        "Muon steps each matrix on one rank (`owned`), on every rank (`duplicated`), or in shards (`sharded`). `sent` "
        "is the total of all ranks in a step; `state` is the largest on any rank. torch's Muon computes in bfloat16. "
        "On a CPU without bfloat16 instructions it takes hundreds of times as long as AdamW.",
    ),
    "experts": (
        "Mixture of experts over 2 ranks",
        "All variants train on the same tokens, with two experts for each token. `sent` is the input of a rank's "
        "collectives in a step; `held` is its weights, gradients and optimizer state.",
    ),
    "memory": (
        "Memory of a training step",
        "MiB on the rank with the largest sum. The parts are the tensors alive at the peak. `planned` comes from "
        "`autopar.plan_memory`; `resident` is the growth of the process's resident set.",
    ),
    "loading": (
        "Loading shards",
        "Two ranks load a checkpoint of 970 MiB; a share is half of it. `autopar` is `autopar.from_pretrained`, and "
        "`shards` is the same call for shards that autopar saved. `parallelized` is `model.from_parallelized` into a "
        "lazy model. `initialize` is transformers' `from_pretrained` and then `autopar.initialize`; `transformers` is "
        "its tensor-parallel loading.",
    ),
    "merging": (
        "Merging a checkpoint",
        "`fsync` and `sync` wait until the bytes are on the disk.",
    ),
    "planning": (
        "Planning without weights",
        "One process does the work of rank 0. `autopar plan` compares many such plans.",
    ),
    "replicas": (
        "Replicas and stages on 2 ranks",
        "The speedup is relative to torch's own implementation in the same rows. `in the backward` is "
        "`autopar.average_in_backward`; `pp` runs 1F1B with 8 micro-batches.",
    ),
    "saving": (
        "Saving on 4 ranks",
        "All ranks write the weights and AdamW's state of a Llama (a Mixtral for ep 2). A share is a quarter of the "
        "bytes. The last table compares FSDP2 with `torch.distributed.checkpoint` to autopar with ZeRO 3.",
    ),
}
COLUMNS = {  # result -> the columns on the page, with their headings
    "pipeline": {
        "schedule": "schedule",
        "one process, ms": "one process, ms",
        "pipeline, ms": "pipeline, ms",
        "speedup": "speedup",
        "of textbook": "of the bound",
        "CPU of all stages / of one": "CPU time / one process",
        "activations, MiB a stage": "activations of stages, MiB",
    },
    "replicas": {"row": "", "way": "variant", "ms": "ms", "rival / way": "speedup"},
    "optimizers": {
        "way": "variant",
        "whole step, ms": "training step, ms",
        "step, ms": "optimizer.step(), ms",
        "sent, MiB": "sent, MiB",
        "state, MiB": "state, MiB",
    },
    "experts": {key: key for key in ("experts", "way", "step, ms", "sent, MiB", "held, MiB")} | {"way": "variant"},
    "memory": {"config": "config"}
    | {
        f"{key}, MiB": key
        for key in ("weights", "gradients", "optimizer", "logits", "activations", "sum", "planned", "resident")
    },
    "loading": {
        "variant": "variant",
        "peak / share": "peak / share",
        "read / share": "read / share",
        "s": "s",
        "with a forward, s": "with a forward, s",
    },
    "saving": {
        "mesh": "mesh",
        "s": "s",
        "peak / share": "peak / share",
        "async s": "async, s",
        "async peak / share": "async peak / share",
        "autopar s": "autopar, s",
        "torch / autopar": "torch / autopar",
    },
    "merging": {"variant": "variant", "s": "s", "/ cp": "/ cp", "MB/s": "MB/s", "peak memory, MiB": "peak memory, MiB"},
    "planning": {
        "model": "model",
        "tp x pp x dp": "tp x pp x dp",
        "plan, s": "plan, s",
        "initialize, s": "initialize, s",
        "most memory, MiB": "most memory, MiB",
    },
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
    every = max(len(rows) // 4, 1)
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


def _of_page(name: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Select the rows and columns of a result for docs/performance.md; ``benchmarks/README.md`` has all of them."""
    if name == "memory":
        most = {row["config"]: row for row in sorted(rows, key=lambda row: (row["sum, MiB"], row["resident, MiB"]))}
        rows = [row for row in rows if most[row["config"]] is row]
    titles = COLUMNS.get(name, {})
    kept = [{title: row[key] for key, title in titles.items() if key in row} for row in rows]
    return [row for row in kept if len(row) > 2]  # without facts about a run


def page(results: Mapping[str, Result], digest: str | None = None) -> str:
    """Write the sections of docs/performance.md. A caption below a table also holds for the next tables."""
    parts, last = [], ""
    for name, (title, words) in SECTIONS.items():
        if name in results:
            result = dict(results[name])
            chart = f"![{title}](../benchmarks/results/{name}.svg)\n\n" if name in CHARTS else ""
            write = rivals_table if name == "step" else WRITERS.get(name, plain_table)
            rows = _of_page(name, result["rows"]) if name in COLUMNS else result["rows"]
            table = re.sub(r" ?\| ?", "|", write({"rows": rows}).replace(" --- ", "---"))
            when = caption(result | {"date": result["date"].split()[0]}, digest, load=False)
            parts.append(f"## {title}\n\n{fill(words, 100)}\n\n{chart}{table}")
            parts += [f"{fill(when, 100)}\n"] if when != last else []
            last = when
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
