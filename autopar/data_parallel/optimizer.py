"""Wrap the ``step`` of the user's optimizer: ZeRO-1, fp32 weights, loss scaling, clipping.

The optimizer stays the same object with the same groups, so a scheduler still drives it. A pre-hook of torch may
replace the arguments of ``step``, including the optimizer itself. So ``step`` runs on a proxy of the same class, whose
groups hold the tensors that this rank steps: parameters that it owns, their fp32 weights, or full parameters. If
``step`` raises, the optimizer and the weights do not change, but gradients are already unscaled and clipped. Without
any of these features there are no hooks.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.compat.tensors import local_part
from autopar.config import ParallelConfig
from autopar.data_parallel.grad_sync import broadcast, set_gradient
from autopar.data_parallel.gradients import clip_factor, tensor_norm
from autopar.data_parallel.optimizer_state import check_group, move_state
from autopar.data_parallel.precision import (
    DTYPES,
    LossScale,
    MasterWeights,
    fp32_gradients,
    not_finite,
    to_fp32,
    to_half,
)
from autopar.data_parallel.whole_parameters import FullParameters, MuonSteps, assign
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gathered
from autopar.distributed.digest import sums_of_bits
from autopar.distributed.failures import FailureLog
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
from autopar.guards.step import forget, listen
from autopar.plan.plan import Plan, TensorPlan

_log = logging.getLogger(__name__)

SHOWN = ("loss_scale", "skipped_steps", "step_was_skipped", "gradient_norm")  # set on the user's optimizer
_LARGEST = 2.0**15  # the largest power of two in fp16


class ParallelStep:
    """``optimizer._autopar``: the owner of each parameter, its fp32 weight, and the hooks around ``optimizer.step()``.

    It sets ``scale_loss(loss)``, ``loss_scale`` (1.0 without fp16), ``skipped_steps``, ``step_was_skipped`` and
    ``gradient_norm`` (None before the first step or without clipping) on the optimizer.

    Args:
        inner: The Hugging Face model in ``model``, whose parameters are converted to ``precision.dtype``.
        counted: The names that this rank counts in the norm, see
            :func:`~autopar.data_parallel.gradients.counted_here`.

    Attributes:
        names: Parameter -> name in the model.
        fp32_gradients: A context in which gradients of half-precision parameters accumulate in fp32.
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module,
        inner: nn.Module,
        plan: Plan,
        mpu: MPU,
        config: ParallelConfig,
        counted: frozenset[str],
        failures: FailureLog,
    ) -> None:
        self.plan, self.mpu, self.counted, self._failures, self._config = plan, mpu, counted, failures, config
        self.whole, self.muon = FullParameters(), MuonSteps()
        self.optimizer, self.model = optimizer, model
        self.sharded = config.zero_stage == 1 and mpu.dp_cp.size > 1  # ZeRO-1: a parameter has one owner
        self.reduces = config.zero_reduce_scatter and self.sharded
        self.names: dict[torch.Tensor, str] = {}
        self._owners: dict[torch.Tensor, int | None] = {}  # None: every replica
        self._loads: dict[tuple[Axis, bool], list[int]] = {}
        self.update()
        self.max_norm = config.gradient_clipping
        self.scale = LossScale(config) if config.precision == "fp16" else None
        offloads = config.zero_optimizer_offload and mpu.device.type != "cpu"
        self.host = torch.device("cpu") if offloads else None  # device of the optimizer's state and step
        self.masters = MasterWeights(self.host) if config.precision != "fp32" and not config.fully_sharded else None
        self.fp32_gradients: Callable[[], AbstractContextManager[None]]
        self.fp32_gradients = nullcontext if self.masters is None else lambda: fp32_gradients(model.parameters())
        self.step_was_skipped = False
        self.gradient_norm: torch.Tensor | None = None
        self._used_scale = 0.0  # the scale that scale_loss used since the last step
        self._running: OptimizerProxy | None = None
        self._weights: dict[torch.Tensor, torch.Tensor] = {}  # parameter -> itself, or the weight stepped instead
        alone = config.precision == "fp32" and not self.whole and self.host is None
        self._looked = alone  # True after the check that a step changes no weights outside of its groups
        self._saved: Mapping[str, Any] = {}
        for parameter in [p for p in optimizer.state if p in self.names and not self.keeps_state(p)]:
            del optimizer.state[parameter]
        if self.masters is not None:
            dtype = DTYPES[config.precision]
            to_half(model, inner, dtype, self.masters, lambda p: p in self.names and p.requires_grad and self.owns(p))
        for parameter in self.names:
            fp32 = self.masters is not None and parameter.dtype in DTYPES.values()
            move_state(optimizer, parameter, self.host, torch.float32 if fp32 else None)
        self._handles = [
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._remember),
            optimizer.register_load_state_dict_post_hook(self._load),
        ]
        self._is_around = False
        self._surround()
        listen(self)
        optimizer._autopar, optimizer.scale_loss = self, self.scale_loss
        self.publish()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelStep:
        return self  # the optimizer does not step a copied model

    def update(self) -> None:
        """Assign owners to new parameters: a replica (ZeRO-1), and for full parameters a tp rank.

        Raises:
            ConfigError: One is not a parameter of the model, or ranks cannot step its group like one process.
        """
        new = [p for group in self.optimizer.param_groups for p in group["params"] if p not in self._owners]
        if not new:
            return
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter in new:
            if parameter not in names:
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)} in {type(self.optimizer).__name__} is not a "
                    f"parameter of {type(self.model).__name__}\n  Make or replace parameters before autopar.initialize."
                )
        plans = {p: self.plan.tensors.get(self.plan.names.get(names[p], names[p])) for p in new}
        groups = [group for group in self.optimizer.param_groups if not plans.keys().isdisjoint(group["params"])]
        ways = [check_group(self.optimizer, group, self._config) for group in groups]
        self.names.update((parameter, names[parameter]) for parameter in new)
        for trained in (True, False):  # frozen ones separately: they have no state yet, but may be unfrozen later
            for axis, theirs in self._by_axis(p for p in new if p.requires_grad is trained).items():
                loads = self._loads.setdefault((axis, trained), [0] * axis.size)
                sizes = [p.numel() if (plan := plans[p]) is None else math.prod(plan.shape) for p in theirs]
                owners = zip(theirs, assign(sizes, axis.size, loads), strict=True)
                self._owners |= dict(owners) if self.sharded and axis.size > 1 else dict.fromkeys(theirs)
        for group, how in zip(groups, ways, strict=True):
            units = {p: plan for p in group["params"] if (plan := plans.get(p)) is not None and plan.layout is not None}
            self._step_whole(units, how)

    def _step_whole(self, units: Mapping[torch.Tensor, TensorPlan], how: str) -> None:
        """Register new sharded parameters that are not stepped as shards."""
        if self._config.optimizer_split_fused:
            self.muon.split(units)
        if how == "parts":
            return
        experts = {p for p, plan in units.items() if plan.name in self.plan.experts}
        for axis, replicas, chosen in (
            (self.mpu.tp, self.mpu.dp_cp, units.keys() - experts),
            (self.mpu.shards, self.mpu.copies, experts),
        ):
            for replica in range(replicas.size if self.sharded else 1) if axis.size > 1 else ():
                mine = {p: plan for p, plan in units.items() if p in chosen and self.owner(p) in (None, replica)}
                whole = self.muon if how == "sharded" else self.whole
                whole.add(mine, axis, replica, duplicated=how == "duplicated")

    def axis_of(self, parameter: torch.Tensor) -> Axis:
        """Return the axis of the ranks that hold the same shard of a parameter."""
        name = self.names[parameter]
        return self.mpu.copies if self.plan.names.get(name, name) in self.plan.experts else self.mpu.dp_cp

    def _by_axis(self, parameters: Iterable[torch.Tensor]) -> dict[Axis, list[torch.Tensor]]:
        found: dict[Axis, list[torch.Tensor]] = {}
        for parameter in parameters:
            found.setdefault(self.axis_of(parameter), []).append(parameter)
        return found

    def owner(self, parameter: torch.Tensor) -> int | None:
        """Return the rank of its axis that owns ``parameter``; None if every replica does (no ZeRO-1)."""
        if parameter not in self._owners:  # its group was added after the last step
            self.update()
        return self._owners[parameter]

    def owners(self) -> dict[torch.Tensor, int]:
        """Return the only ranks that have gradients after averaging; empty without ``zero.reduce_scatter``."""
        self.update()
        return {p: owner for p, owner in self._owners.items() if owner is not None} if self.reduces else {}

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank owns ``parameter``, and so keeps its state and its fp32 weight."""
        return (owner := self.owner(parameter)) is None or owner == self.axis_of(parameter).rank

    @torch.no_grad()
    def broadcast(self) -> None:
        """Broadcast each trained parameter from its owner, in place. A collective of each axis."""
        owned = (p for p, owner in self._owners.items() if p.requires_grad and owner is not None)
        for axis, theirs in self._by_axis(owned).items():
            broadcast([(p.data, self._owners[p] or 0) for p in theirs], axis)

    def keeps_state(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank keeps the optimizer's state of ``parameter``."""
        return self.owns(parameter) and (parameter not in self.whole or self.whole.steps_here(parameter))

    def master(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the fp32 weight that is stepped in place of a parameter that this rank owns, or None."""
        if not self.owns(parameter):
            owner, rank = self.owner(parameter), self.axis_of(parameter).rank
            raise ConfigError(f"{self.names[parameter]} is owned by dp rank {owner}, not by this rank ({rank})")
        return None if self.masters is None else self.masters.of(parameter)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the loss scale, for ``optimizer.scale_loss(loss).backward()``; ``loss`` without fp16.

        An fp16 loss limits the scale to 32768: its gradient is the scale, and 65536 overflows in fp16.
        """
        if self.scale is None:
            return loss
        if loss.dtype == torch.float16:
            self.scale.limit(_LARGEST)
            loss = loss.float()
        self._used_scale = self.scale.scale
        return loss * self._used_scale

    @torch.no_grad()
    def give_back_weights(self) -> None:
        """Write the fp32 weights into the model and convert other half tensors. With ZeRO-1 a collective of dp."""
        if self.masters is not None:
            to_fp32(self.model, {id(p): self.master(p) for p in self.names if p.requires_grad and self.owns(p)})
            self.broadcast()

    def remove(self) -> None:
        """Remove the hooks from the optimizer, which keeps this rank's state."""
        forget(self)
        for handle in self._handles:
            handle.remove()
        for name in ("_autopar", "scale_loss", *SHOWN):
            vars(self.optimizer).pop(name, None)

    def when_new(self, optimizer: Any) -> None:
        """Register parameters that were added to the optimizer, before the next step."""
        if optimizer is self.optimizer:
            self.update()
            self._surround()

    def _surround(self) -> None:
        """Put hooks around the step, unless the optimizer steps the model's parameters as they are."""
        configured = self.sharded or self.max_norm or self.scale or self.masters is not None or self.host
        if not self._is_around and (configured or self.whole or self.muon or self.muon.parts):
            self._handles.append(self.optimizer.register_step_pre_hook(self._before))
            self._handles.append(self.optimizer.register_step_post_hook(self._after))
            self._is_around = True

    @torch.no_grad()
    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.update()
        self._weights, self.muon.taken = {}, {}  # drop the tensors of a step that raised
        with self._together(range(self.mpu.world_size)):
            if self.reduces:
                self._refuse_unreduced()
            overflow = self._agree()
            multiplier = 1.0 if overflow else self._multiplier()
        self._used_scale = 0.0
        self.step_was_skipped = overflow
        if overflow:
            self.gradient_norm = torch.full((), torch.inf, device=self.mpu.device) if self.max_norm else None
            self._running = OptimizerProxy(optimizer, None)
        else:
            stepped = self._weights = self._stepped(multiplier)
            if shards := {p: tensor for p, tensor in stepped.items() if p in self.whole}:
                with self._together(self.mpu.shards.ranks):
                    full = self.whole.gather(shards)
                stepped = {p: tensor for p, tensor in stepped.items() if p not in shards} | full
            names, self._looked = {} if self._looked else self.names, True
            watched = {p: name for p, name in names.items() if self.host or p.itemsize == 2 or p in self.whole}
            self._running = OptimizerProxy(optimizer, self.muon.take(stepped), watched)
        return (self._running.optimizer, *args[1:]), kwargs

    @torch.no_grad()
    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.write_back()
        weights, self._weights = self._weights, {}
        shards = {p: tensor for p, tensor in weights.items() if p in self.whole}
        if shards or self.muon.taken:
            with self._together(self.mpu.shards.ranks):
                if self.muon.taken:
                    self.muon.step(self.optimizer)
                if shards:
                    self.whole.scatter(shards)
        for parameter, tensor in weights.items():
            if tensor is not parameter:
                parameter.data.copy_(tensor)
                tensor.grad = None
        if self.sharded and not self.step_was_skipped:
            with self._together(self.mpu.dp_cp.ranks):
                self.broadcast()
        if self.scale is not None:
            if self.step_was_skipped and self.scale.scale == self.scale.min_scale and self.mpu.rank == 0:
                _log.warning(
                    "gradients overflow in fp16 with the loss scale at precision.min_scale=%g; the step is skipped.\n"
                    "  If this continues, the loss diverges or exceeds the range of fp16; bf16 has the range of fp32.",
                    self.scale.min_scale,
                )
            self.scale.update(self.step_was_skipped)
        self.publish()

    def _refuse_unreduced(self) -> None:
        """Raise ConsistencyError if a rank has a gradient that only its owner has after averaging. A collective."""
        left = [self.names[p] for p in self.owners() if p.grad is not None and not self.owns(p)]
        found = torch.tensor(len(left), device="cpu")  # over gloo, so that the host does not wait for a GPU
        all_reduce(found, dist.ReduceOp.MAX, group=self.mpu.control)
        if found:
            everyone = gathered(left, self.mpu.control)
            rank, names = next((rank, names) for rank, names in enumerate(everyone) if names)
            raise ConsistencyError(
                "gradients were not averaged by autopar; expected only the owner's with zero.reduce_scatter\n"
                f"  Rank {rank} has {len(names)} that it does not own, first of {names[0]}. Average with "
                "autopar.average_in_backward(model)\n  or autopar.average_gradients(model), without a wrapper."
            )

    def _together(self, ranks: Sequence[int]) -> AbstractContextManager[None]:
        """Limit the collectives of ``ranks`` in the block to ``pipeline.timeout``, and name the failed rank."""
        return self._failures.wait("optimizer.step()", ranks)

    def _agree(self) -> bool:
        """Return whether fp16 gradients overflowed on some rank. One collective. An unscaled loss raises."""
        if self.scale is None:
            return False
        locals_ = [local_part(p.grad) for p in self.names if p.grad is not None]
        flags = torch.tensor([False, bool(locals_), self._used_scale], dtype=torch.float64)
        verdict = flags.to(self.mpu.device, non_blocking=True)
        verdict[0] = not_finite(locals_)
        if self.mpu.world_size > 1:
            all_reduce(verdict, op=dist.ReduceOp.MAX)
        overflow, any_gradient, scale = verdict.tolist()
        if scale:
            if scale < self.scale.scale:  # the stage with the loss has limited it
                self.scale.limit(scale)
        elif any_gradient:
            raise ConfigError(
                "precision.dtype=fp16 needs a scaled loss; the loss of this step was not scaled.\n"
                "  Use optimizer.scale_loss(loss).backward(); with stages "
                "model.execute_pipeline(batch, optimizer=optimizer);\n  with get_forward_backward_func, loss_func must "
                "return optimizer.scale_loss(loss)."
            )
        return bool(overflow)

    def _multiplier(self) -> torch.Tensor | float:
        """Return the factor of the gradients: the inverse of the loss scale times the clip factor."""
        scale = 1.0 if self.scale is None else self.scale.scale
        if not self.max_norm:
            return 1 / scale
        gradients = {name: p.grad for p, name in self.names.items() if p.grad is not None}
        owners = {name: self.owner(p) or 0 for p, name in self.names.items()} if self.reduces else None
        self.gradient_norm = tensor_norm(gradients, self.plan, self.mpu, self.counted, 2.0, self.names, owners) / scale
        return clip_factor(self.max_norm, self.gradient_norm) / scale

    def _stepped(self, multiplier: torch.Tensor | float) -> dict[torch.Tensor, torch.Tensor]:
        """Map each parameter of this rank to the tensor that is stepped, itself or its fp32 weight, with a gradient."""
        stepped: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in self.names:
            owned, gradient = self.owns(parameter), parameter.grad
            of_some = parameter in self.whole or parameter in self.muon  # another rank may have a gradient
            used = owned and (of_some or gradient is not None)
            weight = self.masters.of(parameter) if used and self.masters is not None else None
            if gradient is not None and self.masters is not None and gradient.dtype in DTYPES.values():
                gradient = gradient.float() if owned else None  # the gradient of the model's parameter does not change
            if weight is None and owned and self.host is not None and gradient is not None:
                weight = parameter.detach().to(self.host)
            if gradient is not None and not (isinstance(multiplier, float) and multiplier == 1):
                local = local_part(gradient)
                local.mul_(multiplier.to(local.device, local.dtype) if torch.is_tensor(multiplier) else multiplier)
            if weight is not None:
                weight.grad = gradient if gradient is None else gradient.to(weight.device)
            if owned:
                stepped[parameter] = parameter if weight is None else weight
        return stepped

    def publish(self) -> None:
        """Set the attributes for users on the optimizer, :data:`SHOWN`."""
        scale, skipped = (1.0, 0) if self.scale is None else (self.scale.scale, self.scale.skipped)
        shown = (scale, skipped, self.step_was_skipped, self.gradient_norm)
        vars(self.optimizer).update(zip(SHOWN, shown, strict=True))

    def _indexed(self) -> dict[int, torch.Tensor]:
        """Return the parameters by their number in torch's state dict."""
        return dict(enumerate(p for group in self.optimizer.param_groups for p in group["params"]))

    def _save(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        weights = {
            index: weight
            for index, parameter in self._indexed().items()
            if self.owns(parameter) and (weight := self.master(parameter)) is not None
        }
        scale = None if self.scale is None else self.scale.state_dict()
        if weights or scale:
            state_dict["autopar"] = {"masters": weights, "loss_scale": scale}

    def _remember(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        self.update()
        self._saved = state_dict

    @torch.no_grad()
    def _load(self, optimizer: Any) -> None:
        """After torch loaded the state: undo its cast to half precision, and drop state that other ranks own."""
        saved, self._saved = self._saved, {}
        ours = saved.get("autopar") or {}
        for index, parameter in self._indexed().items():
            if not (keeps := self.keeps_state(parameter)):
                optimizer.state.pop(parameter, None)
            weight = self.master(parameter) if self.owns(parameter) else None
            move_state(optimizer, parameter, self.host)
            if weight is None:
                continue
            if index in ours.get("masters", {}):
                weight.copy_(ours["masters"][index])
            for key, value in saved["state"].get(index, {}).items() if keeps else ():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    now = optimizer.state[parameter][key]
                    optimizer.state[parameter][key] = value.to(now.device, torch.float32, copy=True)
        if self.scale is not None and ours.get("loss_scale"):
            self.scale.load_state_dict(ours["loss_scale"])
        self.publish()


# -- the optimizer that ``step`` receives ------------------------------------------------------------------------------

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OptimizerProxy:
    """An optimizer of the class of ``plain`` with replaced tensors in its groups, and their state from ``plain``.

    Args:
        stepped: Parameter -> the tensor to step instead. Parameters that are not in it are left out; empty groups stay.
            None: the step is skipped, and its changes are dropped.
        watched: Parameter -> name, for parameters that must not change: an optimizer inside of ``plain`` may step them.
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
        for name in _HOOKS:  # otherwise a step that calls its base class's step would run them twice
            setattr(self.optimizer, name, OrderedDict())
        self.optimizer.param_groups = [group for _, group in self.groups]
        self._own = {p for group in plain.param_groups for p in group["params"]}
        self._shares = not self.skips and all(tensor is parameter for parameter, tensor in self.stepped.items())
        if not self._shares:
            self.optimizer.state = self._state()
        self._watched = {p: name for p, name in watched.items() if p.requires_grad}
        self._sums = sums_of_bits(self._watched)
        self._gradients = {p: p.grad for p in self._watched if p.grad is not None and p.grad.dtype != p.dtype}
        for parameter, gradient in self._gradients.items():  # torch raises for an fp32 gradient of a half parameter
            set_gradient(parameter, gradient.to(parameter.dtype))

    def _state(self) -> defaultdict[Any, Any]:
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, entry in self.plain.state.items():
            if key in self.stepped:
                state[self.stepped[key]] = entry
            elif key not in self._own:
                state[key] = entry
                if self.skips and isinstance(entry, dict):
                    state[key] = {name: x.clone() if torch.is_tensor(x) else x for name, x in entry.items()}
        return state

    def write_back(self) -> None:
        """Write changes of groups, state and attributes to the user's optimizer. Raise if a watched weight changed."""
        if self.skips:
            return
        for parameter, gradient in self._gradients.items():
            if parameter.grad is not None:
                set_gradient(parameter, gradient)
        pairs = zip(self._watched.values(), self._sums, sums_of_bits(self._watched), strict=True)
        moved = [name for name, was, now in pairs if was != now]
        if moved:
            kind = type(self.plain).__name__
            raise ConfigError(
                f"{kind}.step() changed weights of the model directly, expected only the tensors in its groups\n"
                f"  Changed: {len(moved)} of {len(self._watched)}, first {moved[0]}. The groups hold fp32 weights, or "
                "full matrices of\n  sharded parameters, which are then written into the model. Direct changes, by an "
                "inner optimizer or a hook,\n  would be lost.\n  Wrap the optimizer after initialize: model, inner = "
                f"autopar.initialize(model, config, optimizer=inner);\n  {kind}(inner). Register hooks of the step "
                "after initialize, too. Or leave precision out."
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
