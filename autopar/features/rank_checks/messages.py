"""Error messages for values that differ between ranks, or that must differ and are identical."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import listed

_TURN_OFF = "  consistency_check: {enable: false} turns this check off."


def different(everyone: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the values that differ between ranks."""
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    return [name for name in names if len({theirs.get(name, "missing") for theirs in everyone}) > 1]


def explanation(everyone: Sequence[Mapping[str, str]], ranks: Sequence[int], kind: str = "tensor-parallel") -> str:
    """Return the message for values that differ between ranks with the same batch, and the usual cause."""
    unlike = different(everyone)
    weights = [name for name in unlike if name.startswith("weight ")]
    states = [name for name in unlike if name.startswith("random state")]
    calls = [name for name in unlike if name not in weights and name not in states][:5]
    lines = []
    for name in [*calls, *states, *weights[:3]]:
        seen = ", ".join(f"rank {r}: {t.get(name, 'missing')}" for r, t in zip(ranks, everyone, strict=True))
        lines.append(f"  {name}: {seen}")
    if len(weights) > 3:
        lines.append(f"  and {len(weights) - 3} more weights")
    group = f"the ranks {list(ranks)} of one {kind} group"
    if "call" in unlike:
        head, lines = f"{group} are in different calls:", lines[:1]
        hint = (
            "  Run every forward and every generate on all ranks of a group, and print on one of them (mpu.is_master)."
        )
    elif any(name.startswith("requires_grad of") for name in unlike):
        head = f"{group} train different weights:"
        hint = "  Freeze and unfreeze the same weights on all ranks of a group."
    elif "optimizer settings" in unlike and not weights:
        head = f"{group} stepped with different settings of the optimizer:"
        hint = "  Use identical learning rates and settings on all ranks of a group. Restart from the last checkpoint."
    elif weights or "optimizer steps so far" in unlike:
        head = f"{group} have drifted apart: replicated weights differ ({len(weights)}):"
        if not weights:
            head = f"{group} have made different numbers of optimizer steps:"
        hint = (
            "  A rank skipped an optimizer step, stepped with other settings, drew other random numbers, or changed\n"
            "  its weights. Or user code computed a norm, a dot product or noise from local shards\n"
            "  (torch.nn.utils.get_total_norm is correct). Restart from the last checkpoint."
        )
        if "context" in kind:
            hint += (
                "\n  Or gradients of torch.autograd.grad were used before averaging: each rank has only those of its "
                "rows\n  (docs/long-sequences.md, Averaging)."
            )
    elif states and not calls:
        head = f"{group} have different random states ({len(states)}):"
        hint = (
            "  The model draws from these generators. Seed all ranks of a group identically, and use a separate\n"
            "  torch.Generator for numbers that only some ranks draw."
        )
    else:
        head = f"{group} got different inputs ({len(calls)} argument{'s' if len(calls) != 1 else ''}):"
        hint = (
            "  They share one model replica and need the same batch. Shard the data by mpu.dp.rank, or use\n"
            "  autopar.prepare_dataloader(dataset, ..., mpu=model.mpu). Replace transformers' Trainer with\n"
            "  autopar.integrations.ParallelTrainer."
        )
    return "\n".join([head, *lines, hint, _TURN_OFF])


def same_shard(ranks: Sequence[int], group: str, names: Sequence[str]) -> str:
    """Return the message for tensor-parallel ranks that hold the same shard of weights."""
    return (
        f"the ranks {list(ranks)} of one tensor-parallel group hold the same shard of the weights {listed(names, 3)}.\n"
        "  DistributedDataParallel over all ranks copies the shard of rank 0 to the other ranks: pass\n"
        f"  process_group={group}, and initialize the model again. Or weights were drawn after "
        "autopar.initialize,\n  which gives all shards the same numbers: draw them before."
    )


def same_gradient(ranks: Sequence[int], name: str, group: str) -> str:
    """Return the message for tensor-parallel ranks that stepped with one gradient or moment of a sharded weight."""
    return (
        f"the ranks {list(ranks)} of one tensor-parallel group stepped with the same numbers for {name},\n"
        "  of which each rank holds a different shard. If its gradient was summed over all ranks, average it over\n"
        "  the data-parallel replicas only (autopar.average_gradients(model), or all_reduce(..., group=\n"
        f"  {group})). If all ranks loaded the optimizer state of one rank, load the state\n"
        "  of each rank, or use save_parallelized and from_parallelized(..., optimizer=optimizer).\n"
        "  Restart from the last checkpoint."
    )


def unlike_weights(replicas: str, place: str, pair: Sequence[int], weights: Mapping[str, tuple[int, int]]) -> str:
    """Return the message for weights that differ; ``weights``: name -> digests on both ranks of ``pair``."""
    digests = {name: [f"{it & (1 << 64) - 1:016x}"[:12] for it in both] for name, both in list(weights.items())[:3]}
    lines = [f"    {name}: rank {pair[0]}: {one}, rank {pair[1]}: {two}\n" for name, (one, two) in digests.items()]
    return (
        f"the weights of the {replicas} differ: they have drifted apart.\n{place}: {listed(list(weights), 3)}.\n"
        f"{''.join(lines)}  One rank skipped a step, or stepped with other gradients or settings. Restart from the "
        f"last checkpoint.\n{_TURN_OFF}"
    )


def unlike_gradients(replicas: str, place: str, names: Sequence[str], group: str) -> str:
    """Return the message for gradients that differ; ``group``: the call that returns DDP's process group."""
    return (
        f"the gradients of the {replicas} differ: they were not averaged, so the "
        f"replicas would drift apart.\n{place}: {listed(names, 3)}.\n"
        f"  Call the model through DistributedDataParallel(model, process_group={group}), or average before step():\n"
        f"  autopar.average_gradients(model). Also check whether one rank has skipped a step.\n{_TURN_OFF}"
    )
