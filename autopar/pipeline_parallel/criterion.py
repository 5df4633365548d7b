"""The user's own loss of a micro-batch: what it may return, and which weights it may be made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.errors import ConfigError
from autopar.foreign.autograd import next_sequence_number, sequence_number
from autopar.pipeline_parallel.own_loss import loss_in

__all__ = ["LossOf"]


class LossOf:
    """``(outputs, inputs) -> loss`` of a micro-batch: the model's own, or that of the user's ``criterion``.

    Args:
        required: it is going to be differentiated.
        blocks: weights of this stage's blocks, by ``id``, which the criterion may not be made of.
    """

    def __init__(
        self,
        criterion: Callable[..., Any] | None,
        *,
        required: bool,
        blocks: Mapping[int, str] | None = None,
    ) -> None:
        self.criterion, self.required, self._blocks = criterion, required, blocks

    def __call__(self, outputs: Any, inputs: dict[str, Any]) -> Any:
        """Compute it.

        Raises:
            ConfigError: there is none, it is no number, or it is made of weights of blocks.
        """
        loss = loss_in(outputs) if self.criterion is None else self._of_criterion(outputs, inputs)
        if loss is None and self.required:
            raise ConfigError(
                f"execute_pipeline: the outputs ({type(outputs).__name__}) hold no loss: put labels into the batch, or "
                "give criterion=lambda outputs, inputs: ..."
            )
        return loss

    def _of_criterion(self, outputs: Any, inputs: dict[str, Any]) -> Any:
        assert self.criterion is not None
        begin = next_sequence_number()
        loss = self.criterion(outputs, inputs)
        if loss is not None and not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"execute_pipeline: criterion returned a {type(loss).__name__}: it returns one tensor, the mean over a "
                "micro-batch.\n  If that is no mean over labels, such as one with class weights, "
                "execute_pipeline(..., count=lambda inputs: ...)\n  says by how much: the sum of the weights that the "
                "mean is divided by."
            )
        if self._blocks and loss is not None:
            _refuse_penalty(loss, begin, self._blocks)
        return loss


def _refuse_penalty(loss: torch.Tensor, begin: int, blocks: Mapping[int, str]) -> None:
    """Refuse a loss whose nodes from number ``begin`` on, which the criterion made, take in weights of blocks.

    Raises:
        ConfigError: names the first of these weights.
    """
    left, seen, found = [loss.grad_fn], set(), set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions:  # a leaf: AccumulateGrad has the weight
            found |= {blocks[key] for key in [id(getattr(node, "variable", None))] if key in blocks}
        elif sequence_number(node) >= begin:  # else a node of the model's forward
            left += [other for other, _ in node.next_functions]
    if found:
        raise ConfigError(
            f"execute_pipeline: criterion reads {len(found)} weights of blocks, {min(found)} first: it runs on the "
            "last stage, which holds\n  its own blocks only, so a penalty would leave out those of other stages.\n"
            "  Use the optimizer's weight_decay; or add the penalty's gradient to p.grad on every stage when "
            "execute_pipeline has returned.\n  Weights behind the blocks (the head) may be read."
        )
