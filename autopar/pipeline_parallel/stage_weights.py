"""Release the weights of other stages, reload them for ``deparallelize``, and sum gradients of tied weights.

A parameter of another stage is replaced by a placeholder without memory (:class:`Placeholder`), so that the model's
code before the blocks runs with the right shapes. Its results are NaN and are replaced by the stage's input
(:mod:`~autopar.pipeline_parallel.outputs` checks this).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar.compat.tensors import local_part, no_overrides, own_buffers, own_parameters, tree_map_only
from autopar.data_parallel.grad_sync import Alike, runs_of, sum_gradients
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gathered
from autopar.distributed.digest import sum_of_bits
from autopar.distributed.mesh import MPU, new_pipeline_group
from autopar.errors import UnsupportedModelError
from autopar.plan.stages import StagePlan
from autopar.stored import stored_weight
from autopar.swap import replace_storage, swap, unswap
from autopar.tensor_tracking import storage_key

DRAWS = {
    *("normal", "uniform", "bernoulli", "exponential", "cauchy", "log_normal", "geometric", "random", "rand_like"),
    *("randn_like", "randint_like", "multinomial", "poisson", "dropout", "alpha_dropout"),
    *("kaiming_uniform", "kaiming_normal"),
}
"""Functions that draw random numbers, by name without underscores: ``normal`` for ``normal_``."""


class ReleasedWeights:
    """The released tensors of a model on this rank, with the data to restore them.

    Attributes:
        parameters: The parameters by id, empty while they are released.
        orders: The modules with all their original parameters, in order.
        buffers: The buffers as ``(module, name in it, full name, tensor)``.
        emptied: The Hugging Face models, or modules outside of blocks of other models, without remaining parameters.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, nn.Parameter] = {}
        self.placeholders: dict[str, Placeholder] = {}
        self.orders: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
        self.buffers: list[tuple[nn.Module, str, str, torch.Tensor]] = []
        self.emptied: list[nn.Module] = []
        self.dtype: torch.dtype | None = None  # the dtype of this stage's tensors at the last call; None if mixed

    def __deepcopy__(self, memo: dict[int, Any]) -> ReleasedWeights:
        """Return the released weights of a copied model, by the ids in the copy."""
        copied = memo[id(self)] = ReleasedWeights()
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied.parameters = {id(parameter): parameter for parameter in copied.parameters.values()}
        return copied

    def halve(self, dtype: torch.dtype, stays_fp32: Callable[[str], bool]) -> None:
        """Convert placeholders to the dtype of the tensors on their stages.

        Tensors that the model derives from them (rotary tables, masks) then have the dtype of the full model.
        """
        floating = [name for name, placeholder in self.placeholders.items() if placeholder.is_floating_point()]
        self._retype({name: torch.float32 if stays_fp32(name) else dtype for name in floating}, dtype)
        self.dtype = None

    def follow(self, model: nn.Module) -> None:
        """Convert placeholders to the current dtype of this stage's tensors, after ``model.to``."""
        before, now = self.dtype, _dtype_of(model)
        if before is None or now is None or now == before:
            return
        self.dtype = now
        self._retype({name: now for name, old in self.placeholders.items() if old.dtype == before}, now)

    def _retype(self, dtypes: dict[str, torch.dtype], of_models: torch.dtype) -> None:
        for name, dtype in dtypes.items():
            placeholder = self.placeholders[name]
            with no_overrides():
                placeholder.data = scalar_placeholder(dtype, placeholder.device).expand(placeholder.shape)
        for module in self.emptied:
            like: Any = module._autopar_like
            module._autopar_like = scalar_placeholder(of_models, like.device)


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first floating-point parameter that the module holds."""
    return next((p.dtype for p in nn.Module.parameters(model) if p.is_floating_point()), None)


class _Emptied:
    """A mixin before the class of a module without parameters, for the dtype of its first parameter."""

    _autopar_like: torch.Tensor

    def parameters(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yield an untrained tensor with the dtype and device of the original parameters."""
        yield self._autopar_like


@torch.no_grad()
def release(model: nn.Module, plan: StagePlan, rank: int, device: torch.device) -> ReleasedWeights:
    """Free every parameter, and every buffer of a block, that place ``rank`` of the axis does not hold.

    Parameter objects are kept, empty and without gradients, so an optimizer skips them.
    """
    released = ReleasedWeights()
    foreign = {name for name in plan.tensors if rank not in plan.holders(name)}
    blocks = [f"{path}." for place, path in enumerate(plan.elements) if place != plan.encoder]
    hugging_face = any(isinstance(module, PreTrainedModel) for module in model.modules())
    models = [  # code before the blocks may read the dtype of a module's first parameter
        module
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel) or not (hugging_face or f"{path}.".startswith(tuple(blocks)))
    ]
    dtypes = [next((p.dtype for p in module.parameters() if p.is_floating_point()), None) for module in models]
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        gone = [name for name in own_parameters(module) if start + name in foreign]
        if gone:
            released.orders.append((module, dict(own_parameters(module))))
        stored = stored_weight(module) if "weight" in gone else None
        for name in gone:
            parameter = own_parameters(module).pop(name)
            if parameter is not None:
                released.parameters[id(parameter)] = parameter
                placeholder = make_placeholder(parameter, start + name, device)
                module.__dict__[name] = released.placeholders[start + name] = placeholder
        if stored is not None:
            stored.drop()
        for name, buffer in list(own_buffers(module).items()):
            if buffer is not None and start + name in foreign and any(map(start.startswith, blocks)):
                released.buffers.append((module, name, start + name, buffer))
                own_buffers(module)[name] = None
    for parameter in released.parameters.values():
        if parameter.numel():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = None
    for module, dtype in zip(models, dtypes, strict=True):
        if dtype is not None and not any(parameter.is_floating_point() for parameter in module.parameters()):
            swap(module, _Emptied, _autopar_like=scalar_placeholder(dtype, device))
            released.emptied.append(module)
    released.dtype = _dtype_of(model)
    return released


@torch.no_grad()
def reload(model: nn.Module, plan: StagePlan, released: ReleasedWeights, mpu: MPU) -> None:
    """Undo :func:`release`: restore all tensors, gradients too, on every stage. Collective over the pipeline axis."""
    for module in released.emptied:
        unswap(module, _Emptied, "_autopar_like")
    shapes = put_back(model, released)
    for module, key, _, buffer in released.buffers:
        own_buffers(module)[key] = torch.empty_like(buffer, device=mpu.device) if buffer.is_meta else buffer
    gone = {*shapes, *(name for _, _, name, _ in released.buffers)}
    held: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    held |= dict(model.named_buffers(remove_duplicate=False))
    dtypes = {
        name: (held[name].dtype, None if held[name].grad is None else held[name].grad.dtype)
        for name in plan.tensors
        if name in held and name not in gone
    }
    everyone = gathered(dtypes, mpu.pp.group)
    done: set[int] = set()
    for name, holders in {name: plan.holders(name) for name in plan.tensors}.items():
        if name not in held or len(holders) == mpu.pp.size or id(held[name]) in done:
            continue
        tensor = held[name]
        dtype, of_gradient = everyone[holders[0]][name]  # which precision may have changed on the holders
        if isinstance(tensor, nn.Parameter):
            done.add(id(tensor))
        if name in shapes:
            empty = torch.empty(shapes[name], dtype=dtype, device=mpu.device)
            if tensor.is_meta:  # the model was built without memory
                replace_storage(tensor, empty)
            else:
                tensor.data = empty
        elif name in gone:
            tensor.data = tensor.data.to(dtype)
        _broadcast(tensor.data, holders[0], mpu)
        if of_gradient is not None:
            if tensor.grad is None:
                if of_gradient != dtype:
                    tensor.grad_dtype = None
                tensor.grad = torch.zeros_like(tensor, dtype=of_gradient)
            _broadcast(tensor.grad, holders[0], mpu)


def put_back(model: nn.Module, released: ReleasedWeights) -> dict[str, torch.Size]:
    """Put the empty parameters back into their modules; return their names and shapes."""
    shapes: dict[str, torch.Size] = {}
    paths = {id(module): path for path, module in model.named_modules()}
    for module, order in released.orders:
        for name, parameter in order.items():
            if parameter is not None and id(parameter) in released.parameters:
                shapes[f"{paths[id(module)]}.{name}".lstrip(".")] = module.__dict__.pop(name).shape
        own_parameters(module).clear()
        own_parameters(module).update(order)
    return shapes


def _broadcast(tensor: torch.Tensor, source: int, mpu: MPU) -> None:
    """Broadcast from place ``source`` of the pipeline axis."""
    staged = tensor.to(mpu.device, copy=True, memory_format=torch.contiguous_format)
    dist.broadcast(staged.view(-1).view(torch.uint8), src=mpu.pp.ranks[source], group=mpu.pp.group)
    tensor.copy_(staged)


# -- placeholders -----------------------------------------------------------------------------------------------------

_NAMES = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_OPERATORS = frozenset(f"__i{name}__" for name in _NAMES)


class Placeholder(torch.Tensor):
    """An expanded tensor of one number. Views of it are placeholders too; computed tensors are not.

    Code before the blocks, and user code outside of a forward, runs on all stages. If it writes into weights in place
    (rescales or draws them), the stage that holds them writes too, so a write into a placeholder is skipped. Random
    numbers are drawn and discarded, so that generators stay identical on all stages.

    Attributes:
        weight_name: The name of the weight.
        in_front: A function that returns whether code before the blocks runs now; None outside of a stage's forward.
    """

    weight_name: str
    in_front: Callable[[], bool | None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skip a write into a placeholder; raise UnsupportedModelError if code after a block writes."""
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("tensor")  # nn.init passes it by name
        if isinstance(first, Placeholder) and _writes(func):
            if first.in_front() is False:
                raise UnsupportedModelError(
                    "this model is not supported with pipeline stages: its code after the first block writes in place "
                    f"into {first.weight_name}, which another stage holds.\n  Use pipeline_parallel_size=1."
                )
            if func.__name__.strip("_") in DRAWS and first.in_front() is None:
                # Draw the same numbers as the stage that holds the weight, and discard them.
                with no_overrides():
                    nothing = torch.empty(first.shape, dtype=first.dtype, device=first.device)
                    args, kwargs = tree_map_only(Placeholder, lambda x: nothing if x is first else x, (args, kwargs))
                    func(*args, **kwargs)
            return None if func.__name__ in ("__setitem__", "__set__") else first
        with no_overrides():
            result = func(*args, **kwargs)
            if type(result) is torch.Tensor and isinstance(first, Placeholder):
                key = storage_key(result)
                if key is not None and key == storage_key(first):
                    return _like(result, first)
        return result

    def __deepcopy__(self, memo: Any) -> Placeholder:
        """Copy it, without memory."""
        return _like(copy.deepcopy(self.as_subclass(torch.Tensor), memo), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as an ordinary tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def make_placeholder(parameter: torch.Tensor, name: str, device: torch.device) -> Placeholder:
    """Return a placeholder with the shape and dtype of a weight, filled with NaN."""
    placeholder = scalar_placeholder(parameter.dtype, device).expand(parameter.shape).as_subclass(Placeholder)
    placeholder.weight_name, placeholder.in_front = name, type(None)
    return placeholder


def scalar_placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a scalar of NaN; 0 for integers."""
    if device.type == "meta":
        return torch.empty((), dtype=dtype, device=device)
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)


def _like(tensor: torch.Tensor, placeholder: Placeholder) -> Placeholder:
    made = tensor.as_subclass(Placeholder)
    made.weight_name, made.in_front = placeholder.weight_name, placeholder.in_front
    return made


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or name in _OPERATORS or func == _SET_DATA
    return bool(name.endswith("_")) and name not in ("requires_grad_", "detach_", "rename_")


class TiedWeights:
    """The parameters that several ranks of the pipeline hold, by holders.

    Their gradient is the sum over these ranks. Gradients of earlier passes are kept separately, because they are summed
    already.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, mpu: MPU) -> None:
        self._sets: list[tuple[Axis, list[nn.Parameter]]] = []
        by_holders: dict[tuple[int, ...], list[nn.Parameter]] = {}
        own = dict(model.named_parameters())
        names: dict[tuple[int, ...], None] = {}
        for name in plan.tensors:
            holders = plan.holders(name)
            if len(holders) > 1:
                names[holders] = None
                if name in own and mpu.pp.rank in holders:
                    by_holders.setdefault(holders, []).append(own[name])
        for holders in names:  # identical on all ranks, because all of them must create each group
            everywhere = len(holders) == mpu.pp.size
            group: Any = mpu.pp.group if everywhere else new_pipeline_group(mpu, "tied weights", holders)
            if holders in by_holders:
                self._sets.append((Axis.of(group, "pp"), by_holders[holders]))
        self._names = {id(parameter): name for name, parameter in own.items()}
        self._earlier: list[torch.Tensor | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TiedWeights:
        copied = TiedWeights.__new__(TiedWeights)
        memo[id(self)] = copied
        copied._sets = [(axis, [memo.get(id(p), p) for p in parameters]) for axis, parameters in self._sets]
        copied._earlier = []
        copied._names = {id(memo[key]) if key in memo else key: name for key, name in self._names.items()}
        return copied

    def rebind(self, model: nn.Module) -> None:
        """Use the model's current parameters, because ``fully_shard`` replaced them."""
        now = dict(model.named_parameters())
        self._sets = [(axis, [now[self._names[id(p)]] for p in parameters]) for axis, parameters in self._sets]
        self._names = {id(parameter): name for name, parameter in now.items()}

    def digests(self) -> dict[str, str]:
        """Digest each weight that other ranks also hold."""
        sums = {
            self._names[id(p)]: int(sum_of_bits(local_part(p.detach()))) for p in self._parameters() if not p.is_meta
        }
        return {name: f"{value & (1 << 64) - 1:016x}"[:12] for name, value in sums.items()}

    def _parameters(self) -> Iterator[nn.Parameter]:
        for _, parameters in self._sets:
            yield from parameters

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Set earlier gradients aside for a pass, because they are summed already; restore them on an error."""
        self._earlier = [parameter.grad for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, earlier in zip(self._parameters(), self._earlier, strict=False):  # empty after sum()
                parameter.grad = earlier
            raise
        finally:
            self._earlier = []

    def sum(self, alike: Alike) -> None:
        """Sum the pass's gradients over the holders, and add the earlier ones, at the end of :meth:`apart`."""
        for axis, parameters in self._sets:
            sum_gradients(runs_of([parameters], alike), axis)
        for parameter, earlier in zip(self._parameters(), self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = []
