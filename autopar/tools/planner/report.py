"""A search as text and as plain data: the best candidates, why others fall out, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from autopar.errors import listed
from autopar.tools.planner.candidate import Candidate, Estimate, RankMemory, mesh_words
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import Found, Space

_PCIE = 20e9  # bytes a second between a GPU and the CPU's memory, of a PCIe 4 link; all GPUs of a node at a time
_HOST = 4e9  # bytes of state a second that a GPU's share of the CPU steps: AdamW on 4 threads, measured


def needs(memory: RankMemory) -> str:
    """Return what a candidate needs: ``needs 93 GB: activations 61, weights 18, ...``, the largest part first."""
    parts = sorted(memory.parts().items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts if size >= memory.total / 100)
    return f"needs {gigabytes(memory.total)} GB: {shown}"


def gigabytes(size: float) -> str:
    """Return a number of bytes in GB, with a digit where it is small."""
    return f"{size / 1e9:.0f}" if size >= 9.95e9 else f"{size / 1e9:.1f}"


def rejected(estimator: Estimator, found: Found) -> Iterator[str]:
    """Yield a line for each mesh that is not among the best, and why."""
    shown = {_mesh(estimate.candidate) for estimate in found.best}
    for estimate in found.slower:
        mesh = _mesh(estimate.candidate)
        if mesh not in shown and found.best:
            shown.add(mesh)
            slower = estimate.time / found.best[0].time
            yield f"{estimate.candidate}: fits, {slower:.2f} times as long"
    for candidate, least in found.bounded:
        if found.best and _mesh(candidate) not in shown:
            shown.add(_mesh(candidate))
            yield f"{candidate}: fits, at least {least / found.best[0].time:.2f} times as long"
    for candidate, memory in sorted(found.too_large, key=lambda each: each[1].total):
        lever = "" if found.best else _lever(estimator, candidate, memory)
        yield f"{candidate}: {needs(memory)}{lever}"
    reasons: dict[str, list[str]] = {}
    for sizes, reason in found.refused:
        reasons.setdefault(reason, []).append(mesh_words(*sizes))
    for reason, meshes in reasons.items():
        yield f"{listed(meshes, 3)}: {reason}"


class OnHost(NamedTuple):
    """Memory and time of a rank whose shards, or whose optimizer, lie in the CPU's memory.

    Attributes:
        key: of the section ``zero``.
        memory: of the rank that holds most, on its GPU.
        moved: bytes in the CPU's memory.
        seconds: of a step, more than without: what travels, and the step on the CPU.
    """

    key: str
    memory: RankMemory
    moved: int
    seconds: float


def on_host(candidate: Candidate, memory: RankMemory) -> OnHost:
    """Return what moving to the CPU's memory changes: all shards in ZeRO's stages 2 and 3, else the optimizer."""
    least = replace(memory, step=0, optimizer=0)
    if candidate.fully_sharded:  # weights come for each forward and backward, gradients go
        moved = memory.weights + memory.gradients + memory.optimizer
        travel = sum(candidate.exchanges) * memory.weights
        return OnHost("cpu_offload", replace(least, weights=0, gradients=0), moved, travel / _PCIE + moved / _HOST)
    travel = memory.weights + memory.gradients  # gradients go, new weights come
    return OnHost("optimizer_offload", least, memory.optimizer, travel / _PCIE + memory.optimizer / _HOST)


def _lever(estimator: Estimator, candidate: Candidate, memory: RankMemory) -> str:
    """Say what would make a candidate fit, if the CPU's memory does, and what it costs."""
    moved = on_host(candidate, memory)
    if moved.memory.total > estimator.gpu.memory:
        return ""
    return (
        f"; fits with zero.{moved.key}: {gigabytes(moved.memory.total)} GB, {gigabytes(moved.moved)} GB in the CPU's "
        f"memory, and about {moved.seconds:.1f} s more a step"
    )


def _mesh(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.tp, candidate.cp, candidate.pp


def assumptions(estimator: Estimator) -> list[str]:
    """Return what the estimate of the time rests on, and what is left out of the memory."""
    gpu, model = estimator.gpu, estimator.model
    return [
        f"{gpu.name}: products at {gpu.products:.0%} of {gpu.peak(model.precision) / 1e12:.0f} TFLOP/s, other "
        f"operations at {gpu.stream:.0%} of {gpu.bandwidth / 1e12:.2f} TB/s, none below {gpu.launch * 1e6:.0f} us; "
        "not compiled",
        f"network: {gpu.network:.0%} of {gpu.within / 1e9:.0f} GB/s within a node and {gpu.between / 1e9:.0f} GB/s a "
        "GPU between nodes, one way; tp, cp, ep, averaging and the optimizer overlap with nothing, ZeRO-3 with all "
        "products",
        "backward: products twice, attention 2.5 times, the rest 1.5 times as long as forward",
        f"memory: {model.optimizer} given to initialize, steps through execute_pipeline; "
        "work is the largest of any block; no fragmentation",
        "routes of experts are even; text alone reaches a model that also takes images or sound",
    ]


def to_json(estimator: Estimator, space: Space, found: Found) -> dict[str, Any]:
    """Return a search as plain data."""
    model = estimator.model
    return {
        "model": type(model.inner).__name__,
        "parameters": sum(parameter.numel() for parameter in model.model.parameters()),
        "policy": model.policy.name,
        "gpus": space.gpus,
        "gpus_per_node": space.gpus_per_node,
        "gpu": estimator.gpu.name,
        "gpu_memory": estimator.gpu.memory,
        "sequence": model.sequence,
        "global_batch": space.global_batch,
        "precision": model.precision,
        "optimizer": model.optimizer,
        "tried": found.tried,
        "best": [_entry(estimate, model) for estimate in found.best],
        "rejected": list(rejected(estimator, found)),
        "assumptions": assumptions(estimator),
    }


def _entry(estimate: Estimate, model: PlannedModel) -> dict[str, Any]:
    return {**estimate.to_json(), "config": model.sections(estimate.candidate)}


def yaml_of(sections: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Return the file that ``initialize`` reads."""
    import yaml

    text: str = yaml.safe_dump(sections, sort_keys=False)
    return "".join(f"# {line}\n" for line in comments) + text
