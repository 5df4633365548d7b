"""The object on which the ``step`` of a user's optimizer runs instead of the optimizer itself."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["OptimizerProxy"]

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OptimizerProxy:
    """``optimizer``: of the class of ``plain``, with other tensors in its groups; ``plain`` stays as it is meanwhile.

    Args:
        stepped: parameter -> the tensor that is stepped instead; parameters that are not in it are left out, and groups
            of which nothing is left too.
    """

    def __init__(self, plain: Any, stepped: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self.plain, self.stepped = plain, stepped
        groups = [(g, [stepped[p] for p in g["params"] if p in stepped]) for g in plain.param_groups]
        self.groups = [(g, {**g, "params": tensors}) for g, tensors in groups if tensors]
        self.optimizer = object.__new__(type(plain))
        vars(self.optimizer).update(vars(plain))
        for name in _HOOKS:  # they are running; a step that calls its base class's step would run them again
            setattr(self.optimizer, name, OrderedDict())
        self.optimizer.param_groups = [group for _, group in self.groups]
        self.optimizer.state = defaultdict(dict)
        for parameter, tensor in stepped.items():
            if parameter in plain.state:
                self.optimizer.state[tensor] = plain.state[parameter]

    def write_back(self) -> None:
        """Write what the step has changed to the user's optimizer, and new values of fp32 weights to the model."""
        for group, ours in self.groups:
            group.update({key: value for key, value in ours.items() if key != "params"})
        own = ("param_groups", "state", *_HOOKS)
        vars(self.plain).update({key: value for key, value in vars(self.optimizer).items() if key not in own})
        for parameter, tensor in self.stepped.items():
            if tensor in self.optimizer.state:
                self.plain.state[parameter] = self.optimizer.state[tensor]
            if tensor is not parameter:
                parameter.data.copy_(tensor)
                tensor.grad = None
