"""The policy that a caller gives, by an argument or in the configuration: read from where it is, or derived."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from autopar.on_demand import tool
from autopar.policy.described_model import hugging_face_model
from autopar.policy.load import read_user_policy
from autopar.policy.schema import Policy

__all__ = ["DERIVE", "given_policy"]

DERIVE = "derive"


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
        return read_user_policy(tool("derivation.derive").derive(inner).tree)
    return read_user_policy(policy)
