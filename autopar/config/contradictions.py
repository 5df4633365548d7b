"""Values of a configuration that are right one by one and do not go together, or do not fit the world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.config.pipeline import SPLIT_BACKWARD
from autopar.config.sections import FULLY_SHARDED, SAVED
from autopar.errors import clip, nearest


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """List what is wrong with values that are right one by one."""
    problems: list[str] = []
    low, first, high = values["min_scale"], values["initial_scale"], values["max_scale"]
    if not low <= first <= high:
        problems.append(f"precision.initial_scale={first:g} must lie between min_scale={low:g} and max_scale={high:g}")
    if values["growth_factor"] <= 1:
        problems.append(f"precision.growth_factor must be above 1, not {values['growth_factor']:g}")
    if values["backoff_factor"] >= 1:
        problems.append(f"precision.backoff_factor must be below 1, not {values['backoff_factor']:g}")
    problems += _of_zero(values)
    if values["loss_chunk"] and values["loss_gather_logits"] == "always":
        chunk = values["loss_chunk"]
        problems.append(f"loss.chunk={chunk} makes no whole logits, which loss.gather_logits=always would gather")
    if values["compile_mode"] != "default" and values["compile_backend"] != "inductor":
        mode, backend = values["compile_mode"], values["compile_backend"]
        problems.append(f"compile.mode={mode} is one of the backend inductor, not of {backend}")
    if values["compile"] and values["cpu_transport"] == "shm":
        problems.append("cpu_transport=shm does not go with compile: graphs use the process group. Leave one out")
    if values["context_parallel_size"] > 1:
        cp = f"context_parallel_size={values['context_parallel_size']}"
        if values["compile"]:
            problems.append(f"{cp} does not go with compile: which rows a block gets is decided in Python")
    if values["compile"] and values["sequence_parallel"]:
        problems.append(
            "sequence_parallel does not go with compile: blocks that are graphs keep whole sequences. Leave one out"
        )
    if values["cpu_checkpointing"] and not values["activation_checkpointing"]:
        problems.append("cpu_checkpointing=True needs activation_checkpointing=True")
    saves, every = values["checkpoint_saves"], values["checkpoint_every"]
    if (saves or every > 1) and not values["activation_checkpointing"]:
        problems.append("checkpoint_saves and checkpoint_every need activation_checkpointing=True")
    for name in saves:
        if name not in SAVED:
            problems.append(
                f"activation_checkpointing.save lists {clip(repr(name))}.{nearest(str(name), SAVED)} Known: "
                f"{', '.join(SAVED)}"
            )
    if saves and values["compile"]:
        problems.append(
            f"activation_checkpointing.save={list(saves)} does not go with compile, whose graphs choose by themselves "
            "what they keep. Leave one out"
        )
    return problems


def _of_zero(values: Mapping[str, Any]) -> list[str]:
    """List what does not go together with a stage of ZeRO."""
    stage, sharded = values["zero_stage"], values["zero_stage"] in FULLY_SHARDED
    problems = []
    for key in ("shard_size", "cpu_offload"):
        if values[f"zero_{key}"] and not sharded:
            problems.append(f"zero.{key} needs zero.stage 2 or 3, not {stage}")
    if values["zero_optimizer_offload"] and sharded:
        problems.append(f"zero.optimizer_offload needs zero.stage 0 or 1, not {stage}, which has zero.cpu_offload")
    schedule = values["pipeline"].schedule
    if stage == 3 and values["pipeline_parallel_size"] > 1 and schedule in SPLIT_BACKWARD:
        problems.append(
            f"zero.stage=3 does not go with pipeline.schedule={schedule}: between the two halves of a block's backward "
            "its weights would be gone.\n  Use zero.stage 2, which gathers weights once a step, or the schedule 1f1b."
        )
    if values["zero_shard_size"] and values["expert_parallel_size"] > values["tensor_parallel_size"]:
        problems.append(
            f"zero.shard_size={values['zero_shard_size']} does not go with expert_parallel_size="
            f"{values['expert_parallel_size']} above tensor_parallel_size={values['tensor_parallel_size']}: experts "
            "are sharded over the replicas already. Leave it out"
        )
    if sharded and values["optimizer_split_fused"]:
        problems.append(
            f"zero.stage={stage} does not go with optimizer.split_fused: torch's FSDP2 has rows of the fused matrices. "
            "Use zero.stage 1."
        )
    return problems


def unfit(values: Mapping[str, Any], world_size: int | None) -> list[str]:
    """List what keeps ``initialize`` from these sizes in a world of that size, if that is known."""
    tp, cp, pp, ep = (values[f"{kind}_parallel_size"] for kind in ("tensor", "context", "pipeline", "expert"))
    problems = []
    divides = world_size is None or world_size % (tp * cp * pp) == 0
    if not divides:
        problems.append(does_not_divide(tp, cp, pp, world_size or 0))
    replicas = world_size // (tp * cp * pp) if world_size is not None and divides else None
    if ep != 1 and (ep % tp or (replicas is not None and replicas % (ep // tp))):
        problems.append(_misfit_of_experts(ep, tp, replicas))
    if values["zero_shard_size"] and replicas is not None and (replicas * cp) % values["zero_shard_size"]:
        problems.append(_misfit_of_zero(values["zero_shard_size"], replicas, cp))
    return problems


def _misfit_of_zero(size: int, replicas: int, cp: int) -> str:
    """Say over how many ranks FSDP2 can shard."""
    fitting = [each for each in range(1, replicas * cp + 1) if replicas * cp % each == 0]
    ranks = f"{replicas} replicas" + (f" x context_parallel_size={cp}" if cp > 1 else "")
    return f"zero.shard_size={size} must divide the {ranks}: {', '.join(map(str, fitting))} fit here"


def _misfit_of_experts(ep: int, tp: int, replicas: int | None) -> str:
    """Say which expert-parallel sizes fit; ``replicas``: None if the world is not known."""
    rule = f"expert_parallel_size={ep} must be 1 or a multiple of tensor_parallel_size={tp}"
    if replicas is None:
        return f"{rule}: the ranks that hold a model's other layers, and replicas of them, hold its experts"
    fitting = sorted({1, *(tp * inner for inner in range(1, replicas + 1) if replicas % inner == 0)})
    return (
        f"{rule} that divides {tp} x {replicas} replicas = {tp * replicas}: {', '.join(map(str, fitting))} "
        f"{'fit' if len(fitting) > 1 else 'fits'} here"
    )


def does_not_divide(tp: int, cp: int, pp: int, world_size: int) -> str:
    """Say that these sizes do not divide a world, and which would."""
    others = f"context_parallel_size={cp} x pipeline_parallel_size={pp}" if cp > 1 else f"pipeline_parallel_size={pp}"
    product = tp * cp * pp
    fitting = [size for size in range(1, world_size + 1) if world_size % (size * cp * pp) == 0]
    return (
        f"tensor_parallel_size={tp} x {others} = {product} does not divide "
        f"the world of {world_size} processes.\n"
        f"  {world_size} / {product} must be whole: it is the data-parallel size.\n"
        + (
            f"  With {world_size} processes tensor_parallel_size can be {', '.join(map(str, fitting))}"
            if fitting
            else f"  With {world_size} processes no tensor_parallel_size fits {others}"
        )
        + f"; or start a multiple of {product} processes (torchrun --nproc-per-node {product})."
    )
