"""Error texts: what the replicas of a model have differently at a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["unlike_gradients", "unlike_weights"]

_TURN_OFF = "  consistency_check: {enable: false} turns this check off."


def unlike_weights(
    replicas: str, place: str, pair: Sequence[int], weights: Mapping[str, tuple[int, int]], *, own: bool
) -> str:
    """Describe that weights differ.

    Args:
        replicas: how many there are, and of which kind.
        place: the two ranks, and the step.
        weights: name -> digests on both ranks of ``pair``.
        own: no torch optimizer has made the update.
    """
    text = f"the weights of the {replicas} differ: they have drifted apart.\n{place}: {_listed(list(weights))}.\n"
    for name, (one, two) in list(weights.items())[:3]:
        text += f"    {name}: rank {pair[0]}: {_hex(one)}, rank {pair[1]}: {_hex(two)}\n"
    if own:
        text += (
            "  Average the gradients before you change weights yourself: autopar.average_gradients(model), after\n"
            "  the backward of each step. Noise must be drawn alike on all of them. (Replicas that change weights for\n"
            "  some forwards only, or before different ones, may be right nevertheless.)\n"
        )
    else:
        text += (
            "  One of them skipped a step, or stepped with gradients or settings of its own. Go on from the last "
            "checkpoint.\n"
        )
    return text + _TURN_OFF


def unlike_gradients(replicas: str, place: str, names: Sequence[str], group: str) -> str:
    """Describe that gradients differ; ``group``: what DistributedDataParallel has to be given."""
    return (
        f"the gradients of the {replicas} differ: nothing has averaged them, and the "
        f"replicas would drift apart.\n{place}: {_listed(names)}.\n"
        f"  Call the model through DistributedDataParallel(model, process_group={group}), or average before step():\n"
        f"  autopar.average_gradients(model). (Or one of them has skipped a step.)\n{_TURN_OFF}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _hex(digest: int) -> str:
    return f"{digest & (1 << 64) - 1:016x}"[:12]
