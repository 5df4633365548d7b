"""Track which tensors of a forward are replicated or sharded, and which carry a gradient.

Every tensor has one kind:

* *constant*: made from constants only,
* *input*: made from the model's inputs only (masks, positions, pixels); no gradient flows through it,
* *parameter*: made from replicated parameters and inputs; the kind names the parameters,
* *replicated*: an activation that is identical on all ranks, with a full gradient,
* *sharded*: an activation inside a region; a local shard, or a tensor with a partial gradient.

The result of an operation on a sharded tensor is sharded. There, a replicated parameter gets a partial gradient, which
must be summed. A replicated activation gets a partial gradient too, which is never summed, so that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.compat.tensors import base_of, own_parameters
from autopar.dry_run.operators import CONSTANT, ValuelessTracking, name_of
from autopar.errors import PolicyError
from autopar.plan.plan import ModulePlan, Plan
from autopar.tensor_parallel.region_modules import RegionModule
from autopar.tensor_tracking import tensors_in


class Kind(NamedTuple):
    """The kind of a tensor."""

    name: str  # input, parameter, replicated, sharded
    parameters: frozenset[str] = frozenset()  # "+name" for a parameter with a summed gradient


_INPUT, _REPLICATED, _SHARDED = Kind("input"), Kind("replicated"), Kind("sharded")


class ActivationTracking(ValuelessTracking):
    """A dispatch mode that gives each tensor its kind.

    Args:
        mixed: Function called where a replicated activation with a gradient meets a sharded activation.

    Attributes:
        operands: Arguments of the current operation.
        partial: Names of replicated parameters with partial gradients that are not summed.
        summed_inside, summed_outside: Names of parameters with summed gradients, inside and outside regions.
    """

    def __init__(self, mixed: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._kinds = WeakTensorKeyDictionary()
        self._names: dict[int, str] = {}
        self._makers = WeakTensorKeyDictionary()  # number of the call, paths
        self._calls = 0
        self._mixed = mixed
        self.operands: Any = ()
        self.partial: set[str] = set()
        self.summed_inside: set[str] = set()
        self.summed_outside: set[str] = set()

    def mark_parameters(self, shard: nn.Module, plan: Plan) -> None:
        """Mark all parameters of a shard according to their layouts in the plan."""
        for name, parameter in shard.named_parameters():
            if plan.tensors[plan.canonical(name)].layout is None:
                self._kinds[parameter] = Kind("parameter", frozenset([name]))
                self._names[id(parameter)] = name
            else:
                self._kinds[parameter] = _SHARDED

    def mark(self, value: Any, kind: Kind) -> Any:
        """Give every tensor in ``value`` a kind; return ``value``."""
        for tensor in tensors_in(value):
            self._kinds[tensor] = kind
        return value

    def mark_inputs(self, values: Any) -> None:
        """Mark the model's inputs."""
        self.mark(values, _INPUT)

    def mark_sharded(self, value: Any) -> Any:
        """Mark every tensor in ``value`` as sharded; return ``value``."""
        return self.mark(value, _SHARDED)

    def mark_replicated(self, value: Any) -> Any:
        """Mark every tensor in ``value`` as replicated; return ``value``."""
        return self.mark(value, _REPLICATED)

    def mark_summed(self, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return a new tensor for a parameter, marked as having a summed gradient."""
        used = torch.empty_like(x)
        name = self._names.get(id(parameter))
        if name is not None:
            self._kinds[used] = Kind("parameter", frozenset(["+" + name]))
        return used

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new tensor for ``x``, marked as sharded."""
        return self.mark_sharded(torch.empty_like(x))

    def is_sharded(self, value: Any) -> bool:
        """Return whether any tensor in ``value`` is sharded."""
        return any(self._kinds.get(tensor) == _SHARDED for tensor in tensors_in(value))

    def is_replicated(self, value: Any) -> bool:
        """Return whether any tensor in ``value`` is replicated and carries a gradient."""
        kinds = (self._kinds.get(tensor) for tensor in tensors_in(value))
        return any(kind is not None and kind.name in ("replicated", "parameter") for kind in kinds)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        kinds = [kind for tensor in tensors_in((args, kwargs)) if (kind := self._kinds.get(tensor)) is not None]
        if kinds and name_of(func) not in CONSTANT:
            self.operands = (args, kwargs)
            kind = self._combine(kinds)
            maker = self._last_maker(self.operands, kind.name)
            for tensor in tensors_in(result):
                self._set(tensor, kind)
                if maker is not None:
                    self._makers[tensor] = maker

    def note_maker(self, value: Any, path: str, args: Any, *, layer: bool, norm: bool) -> None:
        """Record that the module at ``path`` returned ``value``.

        Args:
            args: Arguments of the module.
            layer: True for a module with parameters or a rule; other modules are recorded only where no maker is known.
            norm: True if all parameters are vectors. Then a sibling layer whose output it reads is recorded too.
        """
        self._calls += 1
        before = self._last_maker(args, "replicated") if norm else None
        parents = [(each, each.rpartition(".")[0]) for each in (before[1] if before else ()) if each != path]
        next_to_it = [each for each, parent in parents if parent == path.rpartition(".")[0]]
        for tensor in tensors_in(value):
            if layer or tensor not in self._makers:
                self._makers[tensor] = (self._calls, (*next_to_it, path))

    def makers_of(self, value: Any, kind: str = "replicated") -> tuple[str, ...]:
        """Return the path of the last layer that made a tensor of this kind in ``value``, and of a norm after it."""
        maker = self._last_maker(value, kind)
        return () if maker is None else maker[1]

    def _last_maker(self, value: Any, kind: str) -> tuple[int, tuple[str, ...]] | None:
        of_kind = (x for x in tensors_in(value) if (known := self._kinds.get(x)) is not None and known.name == kind)
        return max((maker for x in of_kind if (maker := self._makers.get(x)) is not None), default=None)

    def _combine(self, kinds: list[Kind]) -> Kind:
        parameters = frozenset().union(*(kind.parameters for kind in kinds))
        names = {kind.name for kind in kinds}
        summed = {name[1:] for name in parameters if name.startswith("+")}
        if "sharded" in names:
            self.partial |= {name for name in parameters if not name.startswith("+")}
            self.summed_inside |= summed
            if "replicated" in names:
                self._mixed()
            return _SHARDED
        if "replicated" in names:
            self.summed_outside |= summed
            return _REPLICATED
        return Kind("parameter", parameters) if "parameter" in names else _INPUT

    def _set(self, tensor: torch.Tensor, kind: Kind) -> None:
        if kind.name in ("replicated", "parameter") and not tensor.is_floating_point():
            kind = _INPUT
        self._kinds[tensor] = kind
        base = base_of(tensor)
        if base is not None and kind == _SHARDED and self._kinds.get(base) is None:
            self._kinds[base] = kind  # the operation wrote into a slice of a new tensor


MADE_BY = "\n  The activation was made by "
"""Start of the last line of an error about an activation."""


def track_modules(shard: nn.Module, plan: Plan, tracking: ActivationTracking, stack: list[str]) -> None:
    """Register hooks on a copy that track running modules, check inputs of layers and mark their outputs.

    Raises:
        PolicyError: In the forward, if a layer reads a sharded activation and needs a replicated one, or vice versa.
    """
    for path, module in shard.named_modules():

        def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            stack.append(path)
            rule = plan.modules.get(path)
            if rule is not None:
                _check_input(rule, module, (args, kwargs), tracking, plan)

        def after(module: nn.Module, args: Any, out: Any, path: str = path) -> None:
            stack.pop()
            rule = plan.modules.get(path)
            own = [parameter for parameter in own_parameters(module).values() if parameter is not None]
            ruled = rule is not None and rule.rule != ""
            norm = bool(own) and all(parameter.ndim < 2 for parameter in own)
            tracking.note_maker(out, path, args, layer=ruled or bool(own), norm=norm)
            if rule is None:
                return
            if rule.rule in ("sharded", "norm_over"):
                tracking.mark_sharded(out)
            elif _ends_replicated(module):
                tracking.mark_replicated(out)
            elif rule.rule in ("column", "row", "embedding"):
                sharded = rule.enter_output or (rule.rule == "column" and not rule.gather_output)
                (tracking.mark_sharded if sharded else tracking.mark_replicated)(out)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def _ends_replicated(module: nn.Module) -> bool:
    return isinstance(module, RegionModule) and module.replicated_ends


def _check_input(rule: ModulePlan, module: nn.Module, values: Any, tracking: ActivationTracking, plan: Plan) -> None:
    kind, sharded, wrong = rule.rule, tracking.is_sharded(values), ""
    inside = kind == "column" and rule.inside
    if sharded and not rule.closes and not inside:
        if kind in ("column", "embedding", "region") or rule.split_input or _ends_replicated(module):
            wrong = f"is a {kind}, but its input is already sharded"
    elif not sharded:
        if kind == "row" and not rule.split_input:
            wrong = "is a row, but its input is replicated: no column feeds it"
        elif rule.closes:
            wrong = "closes a region, but its input is replicated"
        elif inside:
            wrong = "is a column inside a region, but its input is replicated"
        elif kind in ("norm_over", "gathered"):
            wrong = f"is {kind}, but its input is replicated"
        elif kind == "sharded" and tracking.is_replicated(values):
            wrong = "is sharded, but its input is replicated and needs a gradient\n  Use a column rule here or earlier."
    if wrong:
        makers = tracking.makers_of(values, "sharded" if sharded else "replicated")
        raise PolicyError(f"{rule.path} {wrong}{made_by(plan, makers)}", rule.where)


def made_by(plan: Plan, makers: Sequence[str]) -> str:
    """Return the error line that names the modules that made an activation, with the lines of their rules."""
    shown = [f"{path} ({where})" if (where := line_of(plan, path)) else path for path in makers]
    return f"{MADE_BY}{', then '.join(shown)}" if shown else ""


def line_of(plan: Plan, path: str) -> str:
    """Return ``file:line`` of the rule of a module or of its parameters; empty if it has no rule."""
    rule = plan.modules.get(path)
    if rule is not None and rule.rule:
        return str(rule.where)
    own = (tensor for name, tensor in plan.tensors.items() if name.rpartition(".")[0] == path)
    return next((tensor.where for tensor in own if tensor.where), "")
