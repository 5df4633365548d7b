"""The policy of a large model, from a small one of its class: how features meet does not depend on how many they are.

Following each feature of a model of billions takes minutes. So the policy is derived from the class with a config of
small sizes, and tried on the model itself in a dry run, which takes a second.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from autopar.distributed.rng import kept
from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import AutoparError
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.tools.derivation.derive import derive
from autopar.tools.verification.measured_loss import losses_of
from autopar.tools.verification.small_models import build_small

__all__ = ["derived_tree"]

_LARGE = 1 << 24  # parameters


def derived_tree(model: PreTrainedModel) -> dict[str, Any]:
    """Return the derived policy of a model as plain data. The model is only read.

    Raises:
        UnsupportedModelError: as :func:`~autopar.tools.derivation.derive.derive`.
    """
    tree, losses = _tree(model), losses_of(model)
    return {**tree, "loss": losses} if losses else tree


def _tree(model: PreTrainedModel) -> dict[str, Any]:
    if sum(parameter.numel() for parameter in model.parameters()) < _LARGE:
        return derive(model).tree
    try:
        with kept():
            tree = derive(build_small(type(model), model.config)).tree
        check_plan(model, "", make_plan(model, read_user_policy(tree), 2))
    except AutoparError:  # it cannot be small, or is another one then
        return derive(model).tree
    return tree
