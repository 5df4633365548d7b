"""Private names of torch: modules, tensors, containers, operators, dispatch modes, autograd and Muon."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn.modules import batchnorm, conv, dropout, module as torch_modules
from torch.optim import _muon, optimizer as _optimizer
from torch.utils import _foreach_utils, _python_dispatch, _pytree

leave_alone = eval_frame.skip_code  # (code): dynamo does not compile it
BatchNorm = batchnorm._BatchNorm
Convolution = conv._ConvNd
Dropout = dropout._DropoutNd
TorchDispatchMode = _python_dispatch.TorchDispatchMode
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
no_dispatch_modes = _python_dispatch._disable_current_modes
is_in_torch_dispatch_mode = _python_dispatch.is_in_torch_dispatch_mode
function_modes = torch.overrides._get_current_function_mode_stack
SequenceKey = _pytree.SequenceKey
keystr = _pytree.keystr
tree_flatten = _pytree.tree_flatten
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_map_with_path = _pytree.tree_map_with_path
tree_unflatten = _pytree.tree_unflatten
no_overrides = torch._C.DisableTorchFunctionSubclass  # context that disables __torch_function__ of subclasses
disabled_torch_function = torch._C._disabled_torch_function_impl  # a __torch_function__ that does nothing


ITEM = torch.ops.aten._local_scalar_dense.default  # tensor.item()
GROUPED_MM = torch.ops.aten._grouped_mm.default
_aten = torch.ops.aten
RANDOM = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.rand_like.default,
          _aten.randn_like.default)  # fmt: skip
TO_COPY = torch.ops.aten._to_copy
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

schema_of = attrgetter("_schema")  # of an operator: name, arguments, returns, is_mutable
operator_of = attrgetter("_overloadpacket")  # of an overload: its operator
name_of_operator = attrgetter("_overloadpacket.__name__")  # of an overload: "normal_"

base_of = attrgetter("_base")  # of a view: the tensor that it views, or None
storage_id = attrgetter("_cdata")  # a number that identifies a storage during its lifetime


def shares_memory(x: torch.Tensor) -> bool:
    """Return whether another tensor uses the storage of ``x``, as gradients of the terms of a sum may do."""
    return torch._C._storage_Use_Count(storage_id(x.untyped_storage())) > 2  # x, and the storage as a Python object


def operators_of_dtensors() -> dict[Any, Any]:
    """Return DTensor's table of custom operator handlers: ``(operator, args, kwargs) -> result``."""
    return DTensor._op_dispatcher._custom_op_handlers


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor that FSDP may have sharded over replicas."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


wrapper_subclass = torch.Tensor._make_wrapper_subclass  # (class, shape, dtype=, device=): a tensor without memory
assert_soon = torch._assert_async  # raises on the device, without waiting for it
is_view = torch.Tensor._is_view  # whether a tensor is a view of another one
swap_implementation = torch._C._swap_tensor_impl  # swaps the contents of two tensors; Python objects stay


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor or its memory was changed, except through ``.data``; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


PLAIN = {torch.Tensor, nn.Parameter}
"""Tensor classes that are saved and compared like torch's own. A feature may add classes."""
# Tensor classes that foreach kernels support.
FOREACH_TYPES = (_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)


def let_foreach_take(kinds: Iterable[type]) -> None:
    """Let torch's optimizers use foreach kernels for these tensor classes, as torch does for DTensor."""
    known: Any
    for known in FOREACH_TYPES:
        known.extend(kind for kind in kinds if kind not in known)


PROFILER_RUNS = "_is_profiler_enabled"  # attribute of torch.autograd.profiler: True while a profiler runs


forward_class = attrgetter("_forward_cls")  # the torch.autograd.Function of a node
input_metadata = attrgetter("_input_metadata")  # shape, dtype and device of the gradients of a node
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")  # of a node: its creation order
next_sequence_number = torch._C._autograd._get_sequence_nr  # () -> number of the next node of the graph
after_backward = torch.autograd.Variable._execution_engine.queue_callback  # calls a function after the pass
current_backward = torch._C._current_graph_task_id  # () -> number of this thread's backward pass, or -1
compiling = torch._guards.CompileContext.try_get  # () -> None unless dynamo compiles in this thread


def unpack_hook(node: Any, name: str) -> Any:
    """Return the hook that restores a saved tensor of a node; None without one. Some hooks may run only once."""
    return getattr(node, f"_raw_saved_{name}").unpack_hook


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has hooks that run when its gradient is made or added."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def run_backward(
    roots: torch.Tensor | Sequence[torch.Tensor],
    gradients: Any = None,
    keep_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = (),
) -> None:
    """Run ``torch.autograd.backward`` with function modes enabled, which torch would disable."""
    tensors = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
    given = (gradients,) if gradients is None or isinstance(gradients, torch.Tensor) else tuple(gradients)
    given = given if len(given) == len(tensors) else (None,) * len(tensors)
    given = tuple(torch.ones_like(x) if g is None else g for x, g in zip(tensors, given, strict=True))
    wanted = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    keep = create_graph if keep_graph is None else keep_graph
    torch.autograd.graph._engine_run_backward(
        tensors, given, keep, create_graph, wanted, allow_unreachable=True, accumulate_grad=True
    )


is_functorch_active = torch._C._are_functorch_transforms_active  # () -> whether a transform of torch.func runs


def is_transformed() -> bool:
    """Return whether a torch.func transform (grad, vmap, jvp) or forward mode runs, so that tensors may be wrapped."""
    return not torch.compiler.is_compiling() and (is_functorch_active() or forward_ad._current_level >= 0)


def newton_schulz(direction: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return Muon's nearly orthogonal matrix for an update direction, in bfloat16."""
    return _muon._zeropower_via_newtonschulz(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])


def muon_rates(group: Mapping[str, Any], shape: Sequence[int]) -> tuple[Any, Any]:
    """Return the weight-decay factor and the step length of Muon for a matrix of ``shape``."""
    rate: Any = group["lr"].squeeze() if isinstance(group["lr"], torch.Tensor) else group["lr"]
    return 1 - rate * group["weight_decay"], _muon._adjust_lr(rate, group["adjust_lr_fn"], torch.Size(shape))


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


# Of a module: the dict or set itself, so callers may change it. An absent parameter (bias=False) is None.
own_parameters = attrgetter("_parameters")
own_buffers = attrgetter("_buffers")
own_modules = attrgetter("_modules")
unsaved_buffers = attrgetter("_non_persistent_buffers_set")  # names that a state dict omits
steps_of = attrgetter("_step_count")  # of a learning-rate scheduler

HOOKS = ("forward", "forward_pre", "backward", "backward_pre")  # kinds of hooks on a module


def hooks_of(module: nn.Module, kind: str) -> dict[int, Any]:
    """Return the hooks of a module of one kind in :data:`HOOKS`."""
    return cast("dict[int, Any]", vars(module)[f"_{kind}_hooks"])


def hooks_with_kwargs(module: nn.Module, kind: str) -> set[int]:
    """Return the keys of a module's hooks of one kind that also get keyword arguments."""
    return set(vars(module).get(f"_{kind}_hooks_with_kwargs", ()))


def hooks_of_all(kind: str) -> tuple[dict[int, Any], set[int]]:
    """Return the global hooks of one kind, and the keys of the hooks that also get keyword arguments."""
    with_kwargs = vars(torch_modules).get(f"_global_{kind}_hooks_with_kwargs", ())
    return vars(torch_modules)[f"_global_{kind}_hooks"], set(with_kwargs)


def forward_hooks(module: nn.Module) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """Yield the hooks around a module's forward as (dict that holds the hook, key, hook)."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            yield hooks, key, hook


def remove_forward_hooks(module: nn.Module, kinds: type | tuple[type, ...]) -> None:
    """Remove hooks of these classes around a module's forward."""
    for hooks, key, hook in forward_hooks(module):
        if isinstance(hook, kinds):
            hooks.pop(key)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def add_state_dict_hook(module: nn.Module, hook: _Hook) -> None:
    """Register ``hook(module, state_dict, prefix, metadata)``, which runs before public hooks."""
    module._register_state_dict_hook(hook)


def state_dict_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks on saving a module's state, and the hooks before loading it."""
    return module._state_dict_hooks, module._load_state_dict_pre_hooks


def convolve(module: Any, x: Any, weight: Any, bias: Any) -> Any:
    """Run a convolution module of torch with another weight and bias."""
    return module._conv_forward(x, weight, bias)


@contextlib.contextmanager
def called_instead(functions: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace calls of modules inside ``with``: each calls its function instead of forward and hooks.

    A function gets the original call of the module, and the arguments.
    """
    name, before = "_compiled_call_impl", list[tuple[dict[str, Any], Any]]()
    try:
        for module, function in functions:
            own = vars(module)
            before.append((own, own.get(name)))
            own[name] = functools.partial(function, own.get(name) or module._call_impl)
        yield
    finally:
        for own, earlier in reversed(before):
            if earlier is None:
                own.pop(name, None)
            else:
                own[name] = earlier
