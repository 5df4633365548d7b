"""Refuse code that would run in the place of sharded layers, or read their weights.

A ``forward`` set on a module object is called instead of its class's. transformers takes a fused kernel from an
installed package (mamba-ssm) where there is one, and its own torch code otherwise: a kernel multiplies by weights
itself and would skip the all-reduce. A policy names such functions under ``without_kernels``.
"""

from __future__ import annotations

import sys

from torch import nn

from autopar.errors import ConfigError, UnsupportedModelError
from autopar.foreign.transformers import has_accelerate_hook
from autopar.plan.plan import Plan
from autopar.policy.schema import Policy


def check_kernels(policy: Policy, model: nn.Module) -> None:
    """Raise UnsupportedModelError if a function that the policy names is not transformers' own torch code."""
    for name in policy.without_kernels:
        function = getattr(sys.modules.get(type(model).__module__), name, None)
        variables = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = getattr(function, "__closure__", None) or ()
        wrapped = dict(zip(variables, (cell.cell_contents for cell in cells), strict=True))  # by transformers
        if wrapped.get("is_new_implementation"):
            raise UnsupportedModelError(
                f"{type(model).__name__} would compute with the kernel '{name}' of an installed package, which "
                "multiplies by weights that tensor parallelism shards and never sums the result.\n"
                "  Uninstall that package (mamba-ssm, causal-conv1d) here, or leave tensor_parallel_size at 1 "
                f"({policy.where})."
            )


_LAYERS = ("column", "row", "embedding")


def check_forwards(model: nn.Module, plan: Plan) -> None:
    """Raise where a layer that the plan shards has a ``forward`` of its own object.

    Python finds an attribute of the object before the method of its class, so the sum over ranks would be left out.

    Raises:
        ConfigError: naming the first such layer, and what sets such attributes.
    """
    if plan.tp == 1:
        return
    found = [
        path
        for path, module in plan.modules.items()
        if module.rule in _LAYERS and _has_another(model.get_submodule(path))
    ]
    if not found:
        return
    first, more = model.get_submodule(found[0]), f", and {len(found) - 1} more" if len(found) > 1 else ""
    if has_accelerate_hook(first):
        cause = (
            "  accelerate's hooks do that (device_map=..., cpu_offload). Take them off before initialize:\n"
            "  accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        )
    else:
        cause = "  Use register_forward_hook or register_forward_pre_hook, or a subclass in the layer's place."
    raise ConfigError(
        f"{found[0]}{more} ({plan.modules[found[0]].rule}, tensor_parallel_size={plan.tp}) has a forward that was set "
        f"on the object: it would be called\n  in the place of the sharded one, and results would be wrong.\n{cause}"
    )


def _has_another(module: nn.Module) -> bool:
    """Return whether a module's own ``forward`` is another one than its class's, which removed hooks leave there."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def drop_plain_forward(module: nn.Module) -> None:
    """Take away a ``forward`` of the object that is its class's: the class is about to be another."""
    if not _has_another(module):
        vars(module).pop("forward", None)
