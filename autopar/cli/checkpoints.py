"""The commands ``autopar merge | split | reshard | inspect | check``, in one process, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.app import Json, Policy, app, errors, print_json
from autopar.cli.tables import filled, lines, shape, size
from autopar.errors import listed

if TYPE_CHECKING:
    from autopar.checkpoint import Manifest
    from autopar.checkpoint.format import FileRecord
    from autopar.layout import Layout

_Source = Annotated[Path, typer.Argument(help="Folder that save_parallelized wrote.")]
_Target = Annotated[Path, typer.Argument(help="Folder to make; it appears when it is complete.")]
_Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel size of the new shards.")]
_Pp = Annotated[int, typer.Option("--pp", help="Pipeline-parallel size of the new shards.")]
_Force = Annotated[bool, typer.Option("--force", help="Replace a checkpoint in DESTINATION.")]


def _report(verb: str, result: dict[str, Any], destination: Path, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    total = sum(result["files"].values())
    print(
        f"{verb} {result['tensors']} tensors ({result['parameters']:,} parameters, {size(total)}) "
        f"into {destination}: {listed(list(result['files']), 8)}"
    )


@app.command(short_help="Convert shards to a Hugging Face folder.", epilog="Example: autopar merge checkpoint merged")
def merge(
    source: _Source,
    destination: _Target,
    max_shard_size: Annotated[str, typer.Option(help="Split the weights into files of at most this size.")] = "5GB",
    format: Annotated[str, typer.Option(help="safetensors or bin.")] = "safetensors",
    dtype: Annotated[str | None, typer.Option(help="Convert the weights, for example to bfloat16.")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare checksums.")] = False,
    force: _Force = False,
    as_json: Json = False,
) -> None:
    """Merge a sharded checkpoint into a Hugging Face checkpoint, one tensor at a time."""
    with errors(as_json):
        from autopar.checkpoint.offline import merge_checkpoint

        result = merge_checkpoint(
            source,
            destination,
            max_shard_size=max_shard_size,
            format=format,
            dtype=dtype,
            force=force,
            verify=not no_verify,
            progress=False if as_json else None,
        )
    _report("merged", result, destination, as_json)


@app.command(
    short_help="Convert a Hugging Face folder to shards.", epilog="Example: autopar split gpt2-folder sharded --tp 2"
)
def split(
    source: Annotated[Path, typer.Argument(help="Hugging Face checkpoint: a folder with config.json and weights.")],
    destination: _Target,
    tp: _Tp = 1,
    pp: _Pp = 1,
    policy: Policy = None,
    dtype: Annotated[str | None, typer.Option(help="Convert the weights, for example to bfloat16.")] = None,
    force: _Force = False,
    as_json: Json = False,
) -> None:
    """Split a Hugging Face checkpoint into the shards of a mesh, one tensor at a time."""
    with errors(as_json):
        from autopar.cli.split import split_checkpoint

        result = split_checkpoint(
            source, destination, tp=tp, pp=pp, policy=policy, dtype=dtype, force=force,
            progress=False if as_json else None,
        )  # fmt: skip
    _report("split", result, destination, as_json)


@app.command(short_help="Make shards for another mesh.", epilog="Example: autopar reshard checkpoint sharded-4 --tp 4")
def reshard(
    source: _Source,
    destination: _Target,
    tp: _Tp = 1,
    pp: _Pp = 1,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Leave the optimizer's state out.")] = False,
    force: _Force = False,
    as_json: Json = False,
) -> None:
    """Write a sharded checkpoint for another mesh. Loading does not need it: any mesh loads any checkpoint."""
    with errors(as_json):
        from autopar.checkpoint.offline import reshard_checkpoint

        result = reshard_checkpoint(
            source, destination, tp=tp, pp=pp, optimizer=not no_optimizer, force=force,
            progress=False if as_json else None,
        )  # fmt: skip
    _report("resharded", result, destination, as_json)


@app.command(short_help="Read shards from end to end, list all damage.", epilog="Example: autopar check checkpoint")
def check(directory: _Source, as_json: Json = False) -> None:
    """Read a sharded checkpoint from end to end and list all problems; exit with code 1 if there are any."""
    with errors(as_json):
        from autopar.checkpoint.shards import check_checkpoint

        result = check_checkpoint(directory, progress=False if as_json else None)
    problems = result["problems"]
    if as_json:
        print_json(result)
    elif not problems:
        print(
            f"{directory} is complete: {result['files']} files, {result['tensors']} tensors, {size(result['bytes'])}, "
            "all checksums match, every element in one place"
        )
    else:
        for problem in problems:
            print("error: " + " ".join(problem.split()), file=sys.stderr)
    if problems:
        raise typer.Exit(1)


@app.command(short_help="Show mesh, files and tensors of shards.", epilog="Example: autopar inspect checkpoint")
def inspect(directory: _Source, as_json: Json = False) -> None:
    """Show the contents of a sharded checkpoint: mesh, files, tensors and their layouts."""
    with errors(as_json):
        from autopar.checkpoint import Manifest

        manifest = Manifest.read(directory)
        files = [_file(directory / name, record) for name, record in manifest.files.items()]
    if as_json:
        print_json(_summary(manifest, files))
    else:
        _show(manifest, files, directory)


def _file(path: Path, record: FileRecord) -> dict[str, Any]:
    actual = path.stat().st_size if path.is_file() else None
    state = "ok" if actual == record.bytes else "missing" if actual is None else f"{actual} bytes on disk"
    place = {"tp": record.tp, "pp": record.pp, "dp": record.dp}
    return {"name": path.name, "bytes": record.bytes, "state": state, **place, "tensors": len(record.checksums)}


def _mesh(manifest: Manifest) -> dict[str, int]:
    """Return the sizes of the saved mesh; cp if above 1, ep if above tp."""
    shards, pp, copies, _ = manifest.sizes
    replicas = copies * manifest.experts // manifest.cp
    sizes = {"tensor": manifest.tp, "pipeline": pp, "data": replicas}
    sizes |= {"context": manifest.cp} if manifest.cp > 1 else {}
    sizes |= {"expert": shards} if manifest.experts > 1 else {}
    return {f"{axis}_parallel_size": size for axis, size in sizes.items()}


def _summary(manifest: Manifest, files: list[dict[str, Any]]) -> dict[str, Any]:
    mesh = _mesh(manifest)
    return {
        "model_type": manifest.model_type,
        "policy": manifest.policy,
        "mesh": mesh,
        "parameters": manifest.total_parameters(),
        "save_id": manifest.save_id,
        "versions": dict(manifest.versions),
        "training_state": sorted(manifest.training),
        "files": files,
        "tensors": [
            {
                "part": part.name,
                "name": name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "layout": in_words(tensor.layout),
                "saved_as": tensor.saved_as,
                "pieces": manifest.pieces_with[name] if part.name == "model" else [],
                "aliases": list(tensor.aliases),
                "held_by": [
                    {"file": file, "tp": record.tp, "rows": record.rows.get(name), "shape": list(record.shape(tensor))}
                    for file, record in part.files.items()
                    if name in record.checksums
                ],
            }
            for part in manifest.parts.values()
            for name, tensor in part.tensors.items()
        ],
    }


def in_words(layout: Layout | None) -> str:
    """Return the units of each block per rank and the elements per unit: ``dim 0: heads 4+4 | kv_heads 1+1 (x 64)``."""
    if layout is None:
        return "full on every rank"
    blocks = []
    for block in layout.blocks:
        counts = [stop - start for start, stop in block.ranges]
        shown = f"{counts[0]} on each of {len(counts)}" if len(set(counts)) == 1 else "+".join(map(str, counts))
        blocks.append(f"{block.unit} {shown}" + (f" (x {block.width})" if block.width > 1 else ""))
    note = ", some on several ranks" if layout.replicated else ""
    return f"dim {layout.dim}: " + " | ".join(blocks) + note


def _show(manifest: Manifest, files: list[dict[str, Any]], directory: Path) -> None:
    tp, pp, *others = (f"{name} {size}" for name, size in _mesh(manifest).items())
    print(f"{directory}: {manifest.model_type}, {manifest.total_parameters():,} parameters")
    print(f"{tp}, {pp}, saved with {', '.join(others)}")
    print(f"policy {manifest.policy}; {', '.join(f'{k} {v}' for k, v in manifest.versions.items())}")
    if manifest.training:
        print(f"to continue training: {', '.join(sorted(manifest.training))}")
    sizes = [[file["name"], size(file["bytes"]), str(file["tensors"]), file["state"]] for file in files]
    tensors = ("tensor", "shape", "dtype", "layout", "saved in", "merged as"), list(_tensors(manifest))
    for heads, cells in ((("file", "size", "tensors", "state"), sizes), tensors):
        print("\n".join(lines(filled(heads, cells))))


def _tensors(manifest: Manifest) -> Iterator[list[str]]:
    """Yield a row for each tensor; tensors that differ only in the numbers of blocks share a row."""
    from autopar.plan.plan import rows

    held = manifest.parts["model"].files
    found = []
    for name, tensor in manifest.tensors.items():
        merged = {None: "not saved", name: ""}.get(tensor.saved_as, tensor.saved_as)
        if tensor.saved_as is None and (pieces := manifest.pieces_with[name]):
            merged = f"in {pieces[0]}" if len(pieces) == 1 else f"{len(pieces)} parts, {pieces[0]} ..."
        files = [file for file, record in held.items() if name in record.checksums]
        saved = (
            files[0].removeprefix("model-").removesuffix(".safetensors") if len(files) == 1 else f"{len(files)} files"
        )
        cells = (shape(tensor.shape), tensor.dtype, in_words(tensor.layout), saved, merged)
        found.append({"name": name, "cells": list(map(str, cells))})
    for name, row in rows(found):
        yield [name, *row["cells"]]
