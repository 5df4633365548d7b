"""Error texts: values that differ between ranks and must be identical, or are identical and must differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import listed

_TURN_OFF = "  consistency_check: {enable: false} turns this check off."


def different(everyone: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the values that some ranks have differently."""
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    return [name for name in names if len({theirs.get(name, "missing") for theirs in everyone}) > 1]


def explanation(everyone: Sequence[Mapping[str, str]], ranks: Sequence[int], kind: str = "tensor-parallel") -> str:
    """Describe what differs in the values of each rank, of those that have one batch, and the usual cause."""
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
            "  Every rank of a group makes every forward and every generate: evaluate and generate on all of them,\n"
            "  and print on one (mpu.is_master)."
        )
    elif any(name.startswith("requires_grad of") for name in unlike):
        head = f"{group} train different weights:"
        hint = "  Freeze and unfreeze weights on all ranks of a group alike."
    elif "optimizer settings" in unlike and not weights:
        head = f"{group} stepped with different settings of the optimizer:"
        hint = "  Learning rates and the like must be the same on all ranks of a group. Go on from the last checkpoint."
    elif weights or "optimizer steps so far" in unlike:
        head = f"{group} have drifted apart: replicated weights differ ({len(weights)}):"
        if not weights:
            head = f"{group} have made different numbers of optimizer steps:"
        hint = (
            "  A rank skipped an optimizer step, stepped with other settings, drew other random numbers, or wrote\n"
            "  into its weights. Or numbers were made of its shards: a norm of its own (torch.nn.utils.get_total_norm\n"
            "  is right), a dot product, noise. Go on from the last checkpoint."
        )
        if "context" in kind:
            hint += (
                "\n  Or gradients of torch.autograd.grad were used before their average: each rank has those of its "
                "rows\n  (docs/long-sequences.md, Averaging)."
            )
    elif states and not calls:
        head = f"{group} have different random states ({len(states)}):"
        hint = (
            "  The model draws from these: seed all ranks of a group alike, and draw numbers of your own from a\n"
            "  torch.Generator of your own where not all ranks draw them."
        )
    else:
        head = f"{group} got different inputs ({len(calls)} argument{'s' if len(calls) != 1 else ''}):"
        hint = (
            "  They share one model replica and need the same batch: shard the data by mpu.dp.rank\n"
            "  or use autopar.prepare_dataloader(dataset, ..., mpu=model.mpu); instead of transformers' Trainer\n"
            "  autopar.integrations.ParallelTrainer."
        )
    return "\n".join([head, *lines, hint, _TURN_OFF])


def same_shard(ranks: Sequence[int], group: str, names: Sequence[str]) -> str:
    """Describe that tensor-parallel ranks hold the same shard of weights."""
    return (
        f"the ranks {list(ranks)} of one tensor-parallel group hold the same shard of the weights {listed(names, 3)}.\n"
        "  DistributedDataParallel over all ranks copies rank 0's shard over the others: give it\n"
        f"  process_group={group}, and initialize the model again. (Drawing weights anew "
        "after\n  initialize fills every shard with the same numbers, too: draw before it.)"
    )


def same_gradient(ranks: Sequence[int], name: str, group: str) -> str:
    """Describe that tensor-parallel ranks stepped with the same gradient, or moments, of a sharded weight."""
    return (
        f"the ranks {list(ranks)} of one tensor-parallel group stepped with the same numbers for {name},\n"
        "  of which each holds another part. Its gradient was summed over all ranks: average it over the\n"
        "  data-parallel replicas only (autopar.average_gradients(model), or all_reduce(..., group=\n"
        f"  {group})). Or all ranks loaded the optimizer state of one: each loads its own,\n"
        "  or save and load it with save_parallelized and from_parallelized(..., optimizer=optimizer).\n"
        "  Go on from the last checkpoint."
    )


def unlike_weights(replicas: str, place: str, pair: Sequence[int], weights: Mapping[str, tuple[int, int]]) -> str:
    """Describe that ``weights`` differ: name -> digests on both ranks of ``pair``."""
    digests = {name: [f"{it & (1 << 64) - 1:016x}"[:12] for it in both] for name, both in list(weights.items())[:3]}
    lines = [f"    {name}: rank {pair[0]}: {one}, rank {pair[1]}: {two}\n" for name, (one, two) in digests.items()]
    return (
        f"the weights of the {replicas} differ: they have drifted apart.\n{place}: {listed(list(weights), 3)}.\n"
        f"{''.join(lines)}  One of them skipped a step, or stepped with gradients or settings of its own. Go on from "
        f"the last checkpoint.\n{_TURN_OFF}"
    )


def unlike_gradients(replicas: str, place: str, names: Sequence[str], group: str) -> str:
    """Describe that gradients differ; ``group``: the call that returns the group for DistributedDataParallel."""
    return (
        f"the gradients of the {replicas} differ: nothing has averaged them, and the "
        f"replicas would drift apart.\n{place}: {listed(names, 3)}.\n"
        f"  Call the model through DistributedDataParallel(model, process_group={group}), or average before step():\n"
        f"  autopar.average_gradients(model). (Or one of them has skipped a step.)\n{_TURN_OFF}"
    )
