"""The optimizer steps that stages of one replica have made, compared when a micro-batch passes between them.

Which optimizers there are may differ by stage: one that holds weights of a single stage may exist on that stage only,
and one for each weight steps as often as there are weights. So passes are counted, those that a step of any optimizer
with weights of the model came after, on whichever stage they are; and a stage that has never stepped may have nothing
to step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from autopar.call_site import warn_user
from autopar.data_parallel.process_hooks import listen
from autopar.errors import ConfigError, ConsistencyError

__all__ = ["StepCount", "check_steps"]

_STEPS = "passes that a step came after"
_NOTHING = "weights that no optimizer steps"


class StepCount:
    """Counts the training passes of this rank that an optimizer step came after.

    Args:
        model: with the weights of this rank's stages.
        released: ``id`` of those of other stages, whose objects an optimizer may hold, too.

    Attributes:
        expected: whether the optimizer that ``initialize`` was given steps weights of this rank's stages.
    """

    def __init__(self, model: nn.Module, released: Collection[int] = ()) -> None:
        self.expected = False
        self._model, self._released = model, released
        self._count, self._counted, self._running = 0, False, 0
        self._trained: str | None = None  # weights with a gradient after the first pass
        listen(self)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the first step behind a pass: called by torch before that of any optimizer.

        Raises:
            ConfigError: a hook steps weights of the model inside of a pass.
        """
        if self._counted and not self._running:
            return
        held = {id(p) for p in self._model.parameters()}
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self._running and not stepped.isdisjoint(held):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() inside of execute_pipeline: the gradients are those of some of its "
                f"{self._running} micro-batches,\n  and the others use the weights as they were. Step when "
                "execute_pipeline has returned: an optimizer in the backward (a hook of\n  "
                "register_post_accumulate_grad_hook) needs pipeline_parallel_size: 1."
            )
        if not self._counted and not stepped.isdisjoint(held.union(self._released)):
            self._count, self._counted = self._count + 1, True

    def begin_pass(self, microbatches: int) -> dict[str, str]:
        """Return what another stage compares. ``microbatches``: that are differentiated."""
        if microbatches:
            self._counted, self._running = False, microbatches
        found = {_STEPS: str(self._count)}
        return found if self._count or self.expected else {**found, _NOTHING: self._trained or ""}

    def end_pass(self) -> None:
        """End it, also one that failed; note which weights have got a gradient."""
        trained, self._running = self._running, 0
        if self._trained is None and trained:
            names = [name for name, p in self._model.named_parameters() if p.grad is not None]
            self._trained = f"{len(names)} weights, {names[0]} first" if names else ""


def check_steps(said: Mapping[int, dict[str, str]]) -> None:
    """Compare what :meth:`StepCount.begin_pass` returned on two stages, by rank; it leaves the rest of the digests.

    A stage that has never stepped is told, if weights of it have gradients.

    Raises:
        ConsistencyError: they have stepped behind other numbers of passes.
    """
    counts = {rank: digests.pop(_STEPS, "") for rank, digests in said.items()}
    nothing = {rank: digests.pop(_NOTHING) for rank, digests in said.items() if _NOTHING in digests}
    if len(set(counts.values())) < 2:
        return
    ranks = " and ".join(map(str, counts))
    if not nothing:
        raise ConsistencyError(
            f"two stages of one model replica (ranks {ranks}) have made different numbers of optimizer steps:\n"
            f"  optimizer steps so far: {', '.join(f'rank {rank}: {count}' for rank, count in counts.items())}\n"
            "  Every rank steps after the same execute_pipeline: put no rank's optimizer.step() behind an if.\n"
            "  consistency_check: {enable: false} turns this check off."
        )
    for rank, trained in nothing.items():
        if trained:
            warn_user(
                f"rank {rank} has stepped no optimizer, and other stages of its replica have: {trained}, have "
                "gradients there and stay as they are. If they are not to be trained, requires_grad_(False) says so; "
                "else make the optimizer on every rank, and step it there."
            )
