"""The version ranges in the policies are true at their lower end.

``make test-all`` runs this a second time, with the oldest supported transformers: one policy of each structure plans
and rehearses the main head of each of its model types whose range begins there (``make sweep``: all policies), and a
few families are compared with the plain model over two ranks. With another version there is nothing to do.
"""

from __future__ import annotations

import functools

import pytest
import transformers
from packaging.specifiers import SpecifierSet
from transformers import CONFIG_MAPPING

from autopar.dry_run.tensor_parallel import check_plan
from autopar.plan.make_plan import make_plan
from autopar.policy.load import own_policies
from autopar.policy.match import find_policy, supported_model_types
from tests.pool import pooled
from tests.random_models import build
from tests.representatives import first_policies, one_of_each_structure
from tests.test_every_policy import _main, _run

OLDEST = "5.20.2"
FAMILIES = [
    "gpt2",
    "llama",
    "qwen3",
    "mixtral",
    "deepseek_v3",
    "olmo2",
    "bert",
    "t5",
    "bart",
    "bloom",
    "vit",
    "whisper",
]

# Model types whose config was another one then, so that the small models of the tests cannot be made.
CANNOT_BUILD = {"cohere_compass_text"}

pytestmark = [
    pytest.mark.tier("all"),
    pytest.mark.skipif(transformers.__version__ != OLDEST, reason=f"make test-all runs it with transformers {OLDEST}"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # its own calls of torch
]


@functools.cache
def _holding() -> dict[str, list[str]]:
    """Policy -> those of its model types whose range includes the oldest version."""
    found = {
        name: [kind for kind in policy.model_types if SpecifierSet(policy.range_of(kind)).contains(OLDEST)]
        for name, policy in own_policies().items()
    }
    return {name: kinds for name, kinds in found.items() if kinds}


def test_most_policies_hold_for_the_oldest() -> None:
    assert len(_holding()) > 200


@pytest.mark.parametrize(
    "name", first_policies(one_of_each_structure(supported_model_types()), list(_holding()), later="sweep")
)
def test_a_policy_plans_and_rehearses(name: str) -> None:
    for model_type in _holding()[name]:
        if model_type not in CONFIG_MAPPING or model_type in CANNOT_BUILD:
            continue  # a newer model type of an old structure
        for case in _main(model_type)[:1]:
            model = build(case, 6, 3)
            check_plan(model, "", make_plan(model, find_policy(model), 2))


@pytest.mark.parametrize("model_type", FAMILIES)
@pooled(world_size=2)
def test_a_family_is_exact(model_type: str) -> None:
    _run(_main(model_type)[:1], 2)
