"""The policy that a caller gives, by an argument or in the configuration: read from where it is, or derived.

Where no policy lists the type of a model, a ``tp_plan`` that transformers ships with it says that somebody shards such
models. It names modules and styles, and nothing of what features are made of. So the policy is derived from what
``forward`` computes, and not read off the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar.errors import tell
from autopar.foreign.transformers import tensor_plan
from autopar.on_demand import tool
from autopar.policy.described_model import base_of, hugging_face_model
from autopar.policy.load import read_user_policy
from autopar.policy.schema import Policy

__all__ = ["DERIVE", "derived_policy", "given_policy", "ships_plan"]

DERIVE = "derive"

_log = logging.getLogger(__name__)


def given_policy(
    model: nn.Module, policy: str | Path | Mapping[str, Any] | Policy | None, configured: str = ""
) -> Policy | None:
    """Return the policy that is given for a model; None if none is. Every rank gets the same.

    Args:
        policy: path, dict, YAML text or a ready one; ``"derive"`` derives one from the model's structure.
        configured: the configuration's ``policy``, which holds where ``policy`` is None.

    Raises:
        PolicyError, UnsupportedModelError: it cannot be read, or derived.
    """
    if policy is None:
        policy = configured or None
    if policy is None:
        return None
    if isinstance(policy, str | Path) and str(policy) == DERIVE:
        _, inner = hugging_face_model(model)
        return derived_policy(inner)
    return read_user_policy(policy)


def derived_policy(model: PreTrainedModel) -> Policy:
    """Derive the policy of a model from one forward without data.

    Raises:
        UnsupportedModelError: nothing of it can be sharded, or it does not run without data.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        kind = type(model).__name__
        tell(_log, f"deriving a policy for {kind}: seconds, or minutes where forward loops in Python")
    tree = tool("verification.policy_of_small").derived_tree(model)
    return read_user_policy(tree, place=f"policy derived from {type(model).__name__}")


def ships_plan(model: PreTrainedModel) -> bool:
    """Return whether transformers ships a ``tp_plan`` with the model: one for more than its head."""
    name, base = base_of(model)
    named = [str(pattern) for pattern in tensor_plan(model)]
    of_base = getattr(getattr(base, "config", None), "base_model_tp_plan", None)
    return bool(of_base) or any(pattern.startswith(f"{name}." if name else "") for pattern in named)
