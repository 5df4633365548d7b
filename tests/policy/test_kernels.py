"""A fused kernel that goes around the layers is refused, transformers' own torch code is not."""

import sys
from collections.abc import Callable

import pytest
from transformers.models.mamba import modeling_mamba

from autopar.errors import UnsupportedModelError
from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from tests.random_models import Case, build


def _wrapped(is_new_implementation: bool) -> Callable[[], bool]:
    """What transformers puts in place of a function that a package may replace."""
    return lambda: is_new_implementation


@pytest.mark.parametrize("foreign", [False, True])
def test_a_kernel_that_multiplies_by_cut_weights_is_refused(foreign: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[modeling_mamba.__name__], "mamba_inner_fn", _wrapped(foreign))
    model = build(Case("mamba", "MambaForCausalLM"), 4, 4)
    policy = find_policy(model)
    make_plan(model, policy, 1)  # nothing is cut
    if not foreign:
        make_plan(model, policy, 2)
        return
    with pytest.raises(UnsupportedModelError, match="kernel 'mamba_inner_fn' of an installed package"):
        make_plan(model, policy, 2)
