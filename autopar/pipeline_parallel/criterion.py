"""The user's own loss of a micro-batch: what it may return, and which weights it may be made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.distributed.whole_on_read import FACTS, name_of
from autopar.errors import ConfigError
from autopar.foreign.trees import tree_leaves
from autopar.pipeline_parallel.microbatch import own_loss

__all__ = ["LossOf"]

_WITHOUT_GRADIENT = FACTS | {"data", "grad", "detach", "detach_"}


class LossOf:
    """``(outputs, inputs) -> loss`` of a micro-batch: the model's own, or that of the user's ``criterion``.

    Args:
        required: it is going to be differentiated.
        blocks: weights of this stage's blocks, by ``id``, where the criterion may not read them: the first call sees.
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
        loss = own_loss(outputs) if self.criterion is None else self._of_criterion(outputs, inputs)
        if loss is None and self.required:
            raise ConfigError(
                f"execute_pipeline: the outputs ({type(outputs).__name__}) hold no loss: put labels into the batch, or "
                "give criterion=lambda outputs, inputs: ..."
            )
        return loss

    def _of_criterion(self, outputs: Any, inputs: dict[str, Any]) -> Any:
        assert self.criterion is not None
        reads = _Reads(self._blocks) if self._blocks else None
        self._blocks = None
        if reads is None:
            loss = self.criterion(outputs, inputs)
        else:
            with reads:
                loss = self.criterion(outputs, inputs)
        if loss is not None and not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"execute_pipeline: criterion returned a {type(loss).__name__}: it returns one tensor, the mean over a "
                "micro-batch.\n  If that is no mean over labels, such as one with class weights, "
                "execute_pipeline(..., count=lambda inputs: ...)\n  says by how much: the sum of the weights that the "
                "mean is divided by."
            )
        if reads is not None and loss is not None:
            reads.check(loss)
        return loss


class _Reads(TorchFunctionMode):
    """Notes what is made of the weights of blocks, with a gradient."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._nodes: dict[Any, set[str]] = {}  # of the graph

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and name_of(func) not in _WITHOUT_GRADIENT:
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter) and id(x) in self._names]
            made = [x for x in tree_leaves(result) if type(x) is torch.Tensor and x.grad_fn is not None]
            for x in made if read else ():
                self._nodes[x.grad_fn] = {self._names[id(parameter)] for parameter in read}
        return result

    def check(self, loss: torch.Tensor) -> None:
        """Raise ConfigError if the loss is made of such a result."""
        left, seen = [loss.grad_fn] if self._nodes else [], set()
        found: set[str] = set()
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            found |= self._nodes.get(node, set())
            left += [other for other, _ in node.next_functions]
        if found:
            raise ConfigError(
                f"execute_pipeline: criterion reads {len(found)} weights of blocks, {min(found)} first: it runs on the "
                "last stage, which holds\n  its own blocks only, so a penalty would leave out those of other stages.\n"
                "  Use the optimizer's weight_decay; or add the penalty's gradient to p.grad on every stage when "
                "execute_pipeline has returned.\n  Weights behind the blocks (the head) may be read."
            )
