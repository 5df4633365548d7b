"""torch's tensors: writes, views, subclasses without memory; operators and modes; and the walk through containers."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch._dynamo.eval_frame import skip_code as leave_alone  # code runs as it is, also in what is compiled
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types as _stepped_by_foreach
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._foreach_utils import _foreach_supported_types as _taken_by_foreach
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_in_torch_dispatch_mode,
)
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import (
    SequenceKey,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_map_with_path,
    tree_unflatten,
)

__all__ = [
    "FOREACH_TYPES",
    "GROUPED_MM",
    "ITEM",
    "RANDOM",
    "TO_COPY",
    "UNSAFE_VIEW",
    "WRITES",
    "SequenceKey",
    "TorchDispatchMode",
    "TreeSpec",
    "assert_soon",
    "base_of",
    "disabled_torch_function",
    "dispatch_modes",
    "function_modes",
    "is_in_torch_dispatch_mode",
    "keystr",
    "leave_alone",
    "let_foreach_take",
    "local_part",
    "name_of_operator",
    "no_dispatch_modes",
    "no_overrides",
    "operator_of",
    "operators_of_dtensors",
    "safe_softmax",
    "schema_of",
    "storage_id",
    "swap_implementation",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_map_with_path",
    "tree_unflatten",
    "version_of",
    "wrapper_subclass",
    "writes_into",
]


no_overrides = torch._C.DisableTorchFunctionSubclass  # inside of it no subclass sees functions
disabled_torch_function = torch._C._disabled_torch_function_impl  # the __torch_function__ of a class that wants none


ITEM = torch.ops.aten._local_scalar_dense.default  # reads a number
GROUPED_MM = torch.ops.aten._grouped_mm.default
_aten = torch.ops.aten
RANDOM = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.rand_like.default,
          _aten.randn_like.default)  # fmt: skip
WRITES = (_aten.zero_.default, _aten.fill_.Scalar, _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.add_.Tensor,
          _aten.add_.Scalar, _aten.sub_.Tensor, _aten.div_.Tensor, _aten.copy_.default, _aten.clamp_.default,
          _aten.lerp_.Scalar, _aten.masked_fill_.Scalar, _aten.sub_.Scalar, _aten.div_.Scalar, _aten.pow_.Scalar,
          _aten.neg_.default)  # fmt: skip
TO_COPY = torch.ops.aten._to_copy
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
safe_softmax = torch.ops.aten._safe_softmax  # zeros where all scores are masked


def schema_of(func: Any) -> Any:
    """Return an operator's schema: ``name``, ``arguments``, ``returns``, ``is_mutable``."""
    return func._schema


def name_of_operator(func: Any) -> str:
    """Return the name of an operator: ``normal_``."""
    return str(operator_of(func).__name__)


def operators_of_dtensors() -> dict[Any, Any]:
    """Return the table of operators that DTensors leave to a function: ``(operator, args, kwargs) -> result``."""
    found: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return found


def operator_of(func: Any) -> Any:
    """Return the operator of which ``func`` is one overload."""
    return func._overloadpacket


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor that FSDP may have sharded over the replicas."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_VERSION = operator.attrgetter("_version")  # without a call of Python for each tensor
wrapper_subclass = torch.Tensor._make_wrapper_subclass  # (class, shape, dtype=, device=): a tensor without memory
assert_soon = torch._assert_async  # raises on the device, without waiting for it
swap_implementation = torch._C._swap_tensor_impl  # two tensors change places, their Python objects do not


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or what it shares memory with, was written into; ``.data`` does not count.

    0 for one of inference mode, of which torch does not count it.
    """
    return 0 if tensor.is_inference() else tensor._version


def writes_into(tensors: Iterable[torch.Tensor]) -> int:
    """Return how often tensors were written into, all together; 0 if one of them is of inference mode."""
    try:
        return sum(map(_VERSION, tensors))
    except RuntimeError:
        return 0


FOREACH_TYPES = (_stepped_by_foreach, _taken_by_foreach)  # classes of tensors that many-tensor kernels take


def let_foreach_take(kinds: Iterable[type]) -> None:
    """Let torch's optimizers step many tensors of these classes at once, as torch itself does for its DTensor."""
    known: Any
    for known in FOREACH_TYPES:
        known.extend(kind for kind in kinds if kind not in known)


def base_of(tensor: Any) -> Any:
    """Return what a tensor is a view of; None if it is not a view."""
    return tensor._base


def storage_id(storage: Any) -> int:
    """Return a number that tells storages apart as long as they live."""
    return cast("int", storage._cdata)
