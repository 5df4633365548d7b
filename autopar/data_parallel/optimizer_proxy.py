"""The object on which the ``step`` of a user's optimizer runs instead of the optimizer itself."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.distributed.digest import sums_of_bits
from autopar.errors import ConfigError

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OptimizerProxy:
    """``optimizer``: of the class of ``plain``, with other tensors in its groups; ``plain`` stays as it is meanwhile.

    Its state is that of ``plain``, under the tensors that are stepped; what lies under any other key
    (``state["global"]``) is the same in both.

    Args:
        stepped: parameter -> the tensor that is stepped instead; parameters that are not in it are left out, and groups
            stay, which may count steps. None: the step is to be skipped, and nothing that it does stays.
        watched: parameter -> its name. An optimizer inside of ``plain``, or a list of its own, does not see the groups
            here and steps parameters themselves, and what stands for them would be written over them.
    """

    def __init__(
        self,
        plain: Any,
        stepped: Mapping[torch.Tensor, torch.Tensor] | None,
        watched: Mapping[torch.Tensor, str] = MappingProxyType({}),
    ) -> None:
        self.plain, self.stepped, self.skips = plain, stepped or {}, stepped is None
        groups = [(g, [self.stepped[p] for p in g["params"] if p in self.stepped]) for g in plain.param_groups]
        self.groups = [(g, {**g, "params": tensors}) for g, tensors in groups if not self.skips]
        self.optimizer = object.__new__(type(plain))
        vars(self.optimizer).update(vars(plain))
        for name in _HOOKS:  # they are running; a step that calls its base class's step would run them again
            setattr(self.optimizer, name, OrderedDict())
        self.optimizer.param_groups = [group for _, group in self.groups]
        self._own = {p for group in plain.param_groups for p in group["params"]}
        self._shares = not self.skips and all(tensor is parameter for parameter, tensor in self.stepped.items())
        if not self._shares:
            self.optimizer.state = self._state()
        self._watched = {p: name for p, name in watched.items() if p.requires_grad}
        self._sums = sums_of_bits(self._watched)
        self._gradients = {p: p.grad for p in self._watched if p.grad is not None and p.grad.dtype != p.dtype}
        for parameter, gradient in self._gradients.items():  # one of fp32 would be torch's error, in its words
            _set_gradient(parameter, gradient.to(parameter.dtype))

    def _state(self) -> defaultdict[Any, Any]:
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, entry in self.plain.state.items():
            if key in self.stepped:
                state[self.stepped[key]] = entry
            elif key not in self._own:
                state[key] = _copied(entry) if self.skips else entry
        return state

    def write_back(self) -> None:
        """Write the step's changes of groups, state and attributes to the user's optimizer.

        Raises:
            ConfigError: it has changed weights of the model that are watched.
        """
        if self.skips:
            return
        for parameter, gradient in self._gradients.items():
            if parameter.grad is not None:
                _set_gradient(parameter, gradient)
        pairs = zip(self._watched.values(), self._sums, sums_of_bits(self._watched), strict=True)
        moved = [name for name, was, now in pairs if was != now]
        if moved:
            kind = type(self.plain).__name__
            raise ConfigError(
                f"{kind}.step() changed weights of the model itself, past those that its groups hold instead.\n  They "
                f"are {len(moved)} of {len(self._watched)}, {moved[0]} first. While it steps, the groups hold fp32 "
                "weights (with\n  precision) or whole matrices (of which tensor-parallel ranks have shards), then "
                "written into the model:\n  what an optimizer inside of it, a list of its own or a hook of the step "
                "wrote there would be lost.\n  Wrap the optimizer after initialize: model, inner = "
                f"autopar.initialize(model, config, optimizer=inner);\n  {kind}(inner). Register hooks of the step "
                "after it, too. Or leave precision out."
            )
        for group, ours in self.groups:
            group.update({key: value for key, value in ours.items() if key != "params"})
        own = ("param_groups", "state", *_HOOKS)
        vars(self.plain).update({key: value for key, value in vars(self.optimizer).items() if key not in own})
        state = self.optimizer.state
        if self._shares:
            self.plain.state = state
        else:
            parameters = {tensor: parameter for parameter, tensor in self.stepped.items()}
            for key in [key for key in self.plain.state if key not in self._own and key not in state]:
                del self.plain.state[key]
            self.plain.state.update({parameters.get(key, key): entry for key, entry in state.items()})


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad_dtype, parameter.grad = None, gradient


def _copied(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
