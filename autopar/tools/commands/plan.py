"""``autopar plan``: find the fastest meshes for a model on a number of GPUs, without weights or a GPU."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.app import Json, Model, Policy, Trust, app, errors, print_json
from autopar.cli.tables import lines, table

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from autopar.tools.planner.estimate import Estimator
    from autopar.tools.planner.search import Found, Space

_SHOWN = 12  # rejected meshes


@app.command(
    short_help="Find the fastest mesh that fits.",
    epilog="Example: autopar plan llama --gpus 16 --sequence 4096 --global-batch 64 -o config.yaml",
)
def plan(
    model: Model,
    gpus: Annotated[int, typer.Option(help="GPUs in all.")],
    global_batch: Annotated[int, typer.Option(help="Samples of a step, of all replicas.")],
    sequence: Annotated[int | None, typer.Option(help="Tokens of each sample.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels, for a diffusion transformer.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels, for a diffusion transformer.")] = None,
    frames: Annotated[int, typer.Option(help="Frames of a video, for a diffusion transformer.")] = 1,
    node: Annotated[
        str, typer.Option(help="dgx-h100, dgx-a100, hgx-pcie, 4xl40s, 2x4090 ...; an unknown one lists all.")
    ] = "dgx-h100",
    gpu: Annotated[str | None, typer.Option(help="h100, a100, l40s, mi300x ...: a node of eight.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of a node; by default of --node.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="GB of a GPU; by default of --node.")] = None,
    tflops: Annotated[float | None, typer.Option(help="TFLOP/s of a GPU's products.")] = None,
    memory_bandwidth: Annotated[float | None, typer.Option(help="GB/s of a GPU's memory.")] = None,
    intra_node_bandwidth: Annotated[float | None, typer.Option(help="GB/s from a GPU to its node, one way.")] = None,
    inter_node_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s from a GPU to other nodes, one way: its share of the network cards.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="Microseconds of a hop between nodes beyond RDMA's; about 20 with TCP.")
    ] = None,
    storage_bandwidth: Annotated[float | None, typer.Option(help="GB/s of a node's storage.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd or sgd-momentum.")] = "adamw",
    lora: Annotated[int | None, typer.Option("--lora", min=1, help="Rank of LoRA; the base is frozen.")] = None,
    quantization: Annotated[str | None, typer.Option(help="nf4, nf4-double, fp4 or int8: of LoRA's base.")] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage 0, 1, 2 or 3; by default any.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Recompute blocks; by default either.")
    ] = None,
    cp: Annotated[
        int | None, typer.Option("--cp", min=1, help="Context-parallel size; by default any that long sequences want.")
    ] = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel", help="By default either.")
    ] = None,
    ep: Annotated[
        int | None, typer.Option("--ep", min=1, help="Expert-parallel size; by default any, in mixtures.")
    ] = None,
    policy: Policy = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the first one's config here.")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Print the five fastest meshes that fit, with memory and time, and why the other meshes are not among them."""
    given = dict(locals())
    with errors(as_json):
        from autopar.config import ParallelConfig
        from autopar.tools.planner.estimate import Estimator
        from autopar.tools.planner.hardware import FIGURES, find_node
        from autopar.tools.planner.planned_model import PlannedModel
        from autopar.tools.planner.search import Space, rehearsed, search

        machine = find_node(gpu or node, gpus_per_node, **{name: given[name] for name in FIGURES})
        built = _model(model, lora, quantization, trust)
        sequence = _tokens(built, sequence, (frames, height, width))
        ParallelConfig(precision=precision, zero_stage=zero or 0)
        options: dict[str, Any] = {"sequence": sequence, "precision": precision, "optimizer": optimizer}
        estimator = Estimator(PlannedModel(built, policy, dry_run=False, **options), machine)
        sizes = (gpus, machine.gpus, global_batch, zero, checkpointing)
        space = Space(*sizes, cp=cp, sequence_parallel=sequence_parallel, ep=ep)
        found = search(estimator, space, progress=False if as_json else None)
        rehearsed(estimator, found)
        _write(estimator, space, found, output)  # first, because a pipe may close during printing
        _show(estimator, space, found, as_json)
        if found.best and output is not None and not as_json and height is None:
            best, counts = found.best[0].candidate, lora is None and quantization is None  # none has adapters
            print("to count its memory and match its collectives:" if counts else "to match its collectives:")
            batch = f"--batch {best.microbatch * best.microbatches} --sequence {sequence}"
            said = f"autopar rehearse {shlex.quote(model)} --gpus {gpus} --config {shlex.quote(str(output))} {batch}"
            said += f" --policy {shlex.quote(str(policy))}" * (policy is not None) + " --trust-remote-code" * trust
            if counts:
                said += f" --optimizer {optimizer}" * (optimizer != "adamw") + f" --gpu {gpu or node}"
                said += f" --gpus-per-node {gpus_per_node}" * (gpus_per_node is not None)
            print(f"  {said}")
        if not found.best:
            raise typer.Exit(1)


def _tokens(model: nn.Module, sequence: int | None, sizes: tuple[int, int | None, int | None]) -> int:
    """Return the tokens of a sample: ``sequence``, or the tokens of a video with these frames, height and width."""
    from autopar.errors import ConfigError
    from autopar.policy.match import library_of

    if sequence is None and None not in sizes and (library := library_of(model)) is not None:
        sequence = library.tokens(model, *sizes)
    if sequence is None or sequence < 1:
        raise ConfigError(f"sequence must be at least 1, not {sequence}")
    return sequence


def _model(source: str, lora: int | None, quantization: str | None, trust: bool) -> nn.Module:
    """Build the model without memory, with optional adapters and quantization."""
    from autopar.errors import ConfigError
    from autopar.tools.commands.models import add_lora, heads, kind_in, kind_of, mark_quantized

    if quantization is not None and lora is None:
        raise ConfigError(
            f"--quantization {quantization}: quantized weights are frozen; add trained weights with --lora 16"
        )
    model = heads(source, trust=trust)[0].build()
    kind, kept = kind_in(model.config)
    asked = kind if quantization is None else kind_of(quantization)
    if kind is not None and asked is not kind:
        raise ConfigError(f"--quantization {quantization}: the weights of {source} are already in {kind.form}")
    if kind is not None and lora is None:
        raise ConfigError(f"{source} is in {kind.form}: such weights are frozen; add trained weights with --lora 16")
    if asked is not None:
        mark_quantized(model, asked, kept)
    return model if lora is None else add_lora(model, lora)


def _write(estimator: Estimator, space: Space, found: Found, output: Path | None) -> None:
    import yaml

    from autopar.tools.planner.search import gigabytes

    if output is None:
        return
    if not found.best:
        print(f"{output} is not written", file=sys.stderr)
        return
    best, model = found.best[0], estimator.model
    comments = [
        f"{type(model.inner).__name__} on {space.gpus} x {estimator.gpu.name}, sequence {model.sequence}, global batch "
        f"{space.global_batch}: data-parallel size {best.candidate.dp}",
        f"planned: {gigabytes(best.peak.total)} GB per GPU, {best.time:.2f} s per step, {best.mfu:.0%} of the peak",
    ]
    text = yaml.safe_dump(model.sections(best.candidate), sort_keys=False)
    output.write_text("".join(f"# {line}\n" for line in comments) + text, encoding="utf-8")


def _show(estimator: Estimator, space: Space, found: Found, as_json: bool) -> None:
    from autopar.stored import StandIn
    from autopar.tools.planner.search import assumptions, gigabytes, rejected, to_json

    if as_json:
        print_json(to_json(estimator, space, found))
        return
    model, gpu = estimator.model, estimator.gpu
    parameters = list(model.model.parameters())
    count, trained = (sum(p.numel() for p in parameters if every or p.requires_grad) for every in (True, False))
    forms = " and ".join(sorted({parameter.kind.form for parameter in parameters if isinstance(parameter, StandIn)}))
    words = f", {trained:,} of them trained" + (f", the rest in {forms}" if forms else "") if trained < count else ""
    print(f"{type(model.inner).__name__}: {count:,} parameters{words}, policy {model.policy.name}")
    tokens = space.global_batch * model.sequence
    print(
        f"{space.gpus} x {gpu.name} with {gigabytes(gpu.memory)} GB, {space.gpus_per_node} per node; sequence "
        f"{model.sequence}, global batch {space.global_batch} ({tokens:,} tokens per step); {model.precision}, "
        f"{model.optimizer}"
    )
    if not found.best:
        print(f"none of {found.tried} candidates fits: use more GPUs, or adapters (LoRA)", file=sys.stderr)
    if found.best:
        print("\n".join(lines(_table(found, space))))
    others = list(rejected(estimator, found))
    if others:
        print(f"{'other' if found.best else 'closest'} meshes ({found.tried} candidates tried):")
        for line in others[:_SHOWN]:
            print(f"  {line}")
        if len(others) > _SHOWN:
            print(f"  ... and {len(others) - _SHOWN} more: --json lists all")
    print("assumptions:")
    for line in assumptions(estimator):
        print(f"  {line}")


def _table(found: Found, space: Space) -> Table:
    """Return a table of sizes, times, memory and traffic, with a column for each mesh."""
    from autopar.tools.planner.search import gigabytes

    shown = table("", *map(str, range(1, len(found.best) + 1)))
    best, chosen = found.best, [estimate.candidate for estimate in found.best]

    def row(title: str, cells: Iterable[Any]) -> None:
        shown.add_row(title, *({True: "yes", False: "-"}[c] if isinstance(c, bool) else str(c) for c in cells))

    axes = {"tp": "tp", "cp": "cp", "sequence_parallel": "sequence parallel", "pp": "pp", "dp": "dp", "ep": "ep"}
    for name, title in axes.items():
        if name in ("tp", "pp", "dp") or any(getattr(c, name) is True or getattr(c, name) > 1 for c in chosen):
            row(title, (getattr(c, name) for c in chosen))
    row("schedule", (f"{c.schedule} {c.chunks or ''}".rstrip() if c.pp > 1 else "-" for c in chosen))
    row("micro-batches", (f"{c.microbatches} x {c.microbatch}" for c in chosen))
    row("ZeRO", (c.zero or "-" for c in chosen))
    row("recompute", (("blocks" if c.every == 1 else f"1 of {c.every}") if c.checkpointing else "-" for c in chosen))
    if any(c.saves for c in chosen):
        row("  keeps", ("\n".join(c.saves) or "-" for c in chosen))
    shown.add_section()
    row("seconds per step", (f"{e.time:.2f}" for e in best))
    row("  likely from", (f"{e.time_range[0]:.2f}" for e in best))
    row("  likely to", (f"{e.time_range[1]:.2f}" for e in best))
    for name, _ in best[0].parts:
        for title, kind in ((name, "parts"), (f"{name}, overlapped", "hidden")):
            seconds = [max(0.0, dict(getattr(e, kind)).get(name, 0.0)) for e in best]
            if any(seconds):
                row(f"  {title}", (f"{spent:.2f}" for spent in seconds))
    row("tokens/s/GPU", (f"{e.tokens_per_second / space.gpus:,.0f}" for e in best))
    row("MFU", (f"{e.mfu:.1%}" for e in best))
    row("  likely", (f"{e.mfu * e.time / e.time_range[1]:.0%}-{e.mfu * e.time / e.time_range[0]:.0%}" for e in best))
    row("bubble", (f"{e.bubble:.1%}" for e in best))
    shown.add_section()
    row("GB per GPU", (gigabytes(e.peak.total) for e in best))
    row("  at most", (gigabytes(e.memory_range[1]) for e in best))
    for name in best[0].peak.parts():
        row(f"  {name}", (gigabytes(e.peak.parts()[name]) for e in best))
    shown.add_section()
    row("seconds to save", (f"{e.save:.1f}" for e in best))
    row("seconds to load", (f"{e.load:.1f}" for e in best))
    for axis, _ in best[0].bytes:
        if any(dict(e.bytes)[axis] for e in best):
            row(f"GB sent over {axis}", (gigabytes(dict(e.bytes)[axis]) for e in best))
    return shown
