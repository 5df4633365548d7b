"""The version ranges in the policies, and what autopar knows of forwards, are true at both ends of the range.

``make test-all`` runs this a second time, with the oldest supported transformers, and ``make newest`` with the newest
versions that ``pyproject.toml`` admits: one policy of each structure plans and rehearses the main head of each of its
model types whose range has that version (``make sweep``: all policies), and a few families are compared with the plain
model over two ranks. With the environment's own transformers there is nothing to do.
"""

import functools
import inspect
import re
import sys
from pathlib import Path

import pytest
import transformers
from packaging.specifiers import SpecifierSet
from torch import nn
from transformers import CONFIG_MAPPING

from autopar.compat.transformers import CACHES
from autopar.dry_run.tensor_parallel import check_plan
from autopar.features.sequence_parallel import setup as sequence_parallel
from autopar.plan import stages
from autopar.plan.make_plan import make_plan
from autopar.policy.load import own_policies
from autopar.policy.match import find_policy, supported_model_types
from tests.harness.worlds import pooled
from tests.probes import PROBES
from tests.random_models import build, heads_of
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

HERE = transformers.__version__
# Model types whose config was another one then, so that the small models of the tests cannot be made.
CANNOT_BUILD = {"cohere_compass_text"}

# Arguments that forwards had before 5.24, and one that they take as a keyword.
_GONE = {"cache_position", "head_mask", "layer_head_mask", "num_items_in_batch"}

pytestmark = [
    pytest.mark.tier("all"),
    pytest.mark.skipif(".cache" not in Path(transformers.__file__).parts, reason="make test-all, make newest"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # its own calls of torch
]


@functools.cache
def _holding() -> dict[str, list[str]]:
    """Policy -> those of its model types whose range includes the version."""
    found = {
        name: [kind for kind in policy.model_types if SpecifierSet(policy.range_of(kind)).contains(HERE)]
        for name, policy in own_policies().items()
    }
    return {name: kinds for name, kinds in found.items() if kinds}


def test_most_policies_hold() -> None:
    assert len(_holding()) > 200


@pytest.mark.parametrize("probe", PROBES)
def test_the_libraries_have(probe: str) -> None:
    assert PROBES[probe].check(), PROBES[probe].lost


def test_forwards_call_their_arguments_what_autopar_calls_them() -> None:
    """A cache of another name is one that is gathered, compared or taken for words; other names are gone."""
    taken: dict[str, set[str]] = {}
    for kind in (
        kind for name in set(CONFIG_MAPPING) & set(supported_model_types()) for kind in heads_of(name).values()
    ):
        for module in vars(sys.modules[kind.__module__]).values():
            if isinstance(module, type) and issubclass(module, nn.Module) and module.__module__ == kind.__module__:
                for each in inspect.signature(inspect.unwrap(module.forward)).parameters.values():
                    taken.setdefault(each.name, set()).add(f"{each.annotation}")
    caches = {name for name, kinds in taken.items() if any(re.search(r"\b(Dynamic|Static)?Cache\b", x) for x in kinds)}
    apart = {f"{side}_{name}" for side in ("encoder", "decoder") for name in ("cache", "past_key_values")}
    assert caches - apart <= set(CACHES), "autopar.compat.transformers.CACHES lacks some"
    assert caches & set(CACHES)
    assert (sequence_parallel._OF_MODELS | stages._USUAL) - set(CACHES) - _GONE <= set(taken)


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
