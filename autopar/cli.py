"""The command line: ``autopar merge`` and ``autopar inspect``. One process, no GPU, no model code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.checkpoint import Manifest
    from autopar.layout import Layout

__all__ = ["app"]

app = typer.Typer(
    name="autopar",
    help="Work with the checkpoints of models that autopar has parallelized.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _main() -> None:
    """Makes typer keep the names of the commands even when there is only one."""


@contextmanager
def _errors() -> Iterator[None]:
    """One line on stderr and exit code 1, no traceback, for what the user can mend."""
    try:
        yield
    except (AutoparError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(1) from None


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


@app.command()
def merge(
    source: Annotated[Path, typer.Argument(help="Folder that save_parallelized wrote.")],
    destination: Annotated[Path, typer.Argument(help="Folder to make; from_pretrained reads it.")],
    max_shard_size: Annotated[str, typer.Option(help="Split the weights into files of at most this size.")] = "5GB",
    format: Annotated[str, typer.Option(help="safetensors or bin.")] = "safetensors",
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint in DESTINATION.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, without a progress bar.")] = False,
) -> None:
    """Merge a sharded checkpoint into a Hugging Face checkpoint, one tensor at a time."""
    with _errors():
        from autopar.checkpoint.merge import merge_checkpoint

        result = merge_checkpoint(
            source,
            destination,
            max_shard_size=max_shard_size,
            format=format,
            force=force,
            progress=False if as_json else None,
        )
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        total = sum(result["files"].values())
        print(
            f"merged {result['tensors']} tensors ({result['parameters']:,} parameters, {_size(total)}) "
            f"into {destination}: {', '.join(result['files'])}"
        )


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="Folder that save_parallelized wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a sharded checkpoint holds: mesh, files, tensors and how they are shared out."""
    with _errors():
        from autopar.checkpoint import Manifest

        manifest = Manifest.read(directory)
        files = [_file(directory / name, record.bytes) for name, record in manifest.files.items()]
    if as_json:
        print(json.dumps(_summary(manifest, files), indent=1))
    else:
        _show(manifest, files, directory)


def _file(path: Path, expected: int) -> dict[str, Any]:
    actual = path.stat().st_size if path.is_file() else None
    state = "ok" if actual == expected else "missing" if actual is None else f"{actual} bytes on disk"
    return {"name": path.name, "bytes": expected, "state": state}


def _summary(manifest: Manifest, files: list[dict[str, Any]]) -> dict[str, Any]:
    mesh = zip(("tensor", "pipeline", "data"), manifest.sizes, strict=True)
    return {
        "model_type": manifest.model_type,
        "policy": manifest.policy,
        "mesh": {f"{axis}_parallel_size": size for axis, size in mesh},
        "parameters": manifest.total_parameters(),
        "save_id": manifest.save_id,
        "versions": dict(manifest.versions),
        "files": files,
        "tensors": [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "shared_out": in_words(tensor.layout),
                "saved_as": tensor.saved_as,
                "pieces": [piece.name for piece in tensor.pieces],
                "aliases": list(tensor.aliases),
            }
            for name, tensor in manifest.tensors.items()
        ],
    }


def in_words(layout: Layout | None) -> str:
    """``dim 0: heads 4+4 | kv_heads 1+1 (x 64)``: units of each block on each rank, and elements per unit."""
    if layout is None:
        return "whole on every rank"
    blocks = []
    for block in layout.blocks:
        counts = [stop - start for start, stop in block.shares]
        shown = f"{counts[0]} on each of {len(counts)}" if len(set(counts)) == 1 else "+".join(map(str, counts))
        blocks.append(f"{block.unit} {shown}" + (f" (x {block.width})" if block.width > 1 else ""))
    note = ", some on several ranks" if layout.replicated else ""
    return f"dim {layout.dim}: " + " | ".join(blocks) + note


def _show(manifest: Manifest, files: list[dict[str, Any]], directory: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    tp, pp, dp = manifest.sizes
    console.print(
        f"[bold]{escape(str(directory))}[/]: {escape(manifest.model_type)}, {manifest.total_parameters():,} parameters"
    )
    console.print(f"tensor_parallel_size {tp}, pipeline_parallel_size {pp}, saved with data_parallel_size {dp}")
    console.print(f"policy {escape(manifest.policy)}; {', '.join(f'{k} {v}' for k, v in manifest.versions.items())}")
    table = Table("file", "size", "state")
    for file in files:
        table.add_row(escape(file["name"]), _size(file["bytes"]), escape(file["state"]))
    console.print(table)
    table = Table("tensor", "shape", "dtype", "shared out", "merged as")
    for name, tensor in manifest.tensors.items():
        merged = {None: "not saved", name: ""}.get(tensor.saved_as, tensor.saved_as)
        if tensor.pieces and tensor.saved_as is None:
            merged = f"{len(tensor.pieces)} parts, {tensor.pieces[0].name} ..."
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(*(escape(str(c)) for c in (name, shape, tensor.dtype, in_words(tensor.layout), merged)))
    console.print(table)


if __name__ == "__main__":
    app()
