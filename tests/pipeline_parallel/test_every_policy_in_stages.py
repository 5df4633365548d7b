"""Every policy in two pipeline stages: the main head of its first model type against the plain model.

Models that cannot be cut are listed with what ``initialize`` says of them.
"""

import re

import pytest
import transformers

import autopar
import autopar.dry_run.plan_model
from autopar.errors import AutoparError
from autopar.plan.stages import elements_of
from autopar.policy.load import own_policies
from autopar.policy.match import find_policy, supported_model_types
from tests.exchange import raises_everywhere
from tests.harness.worlds import distributed, pooled
from tests.pipeline_parallel.oracle import check_pipeline
from tests.random_models import Case, batches, build, cases, kind, of_type
from tests.representatives import every_fourth, first_policies, one_of_each_structure

_TOO_FEW = "1 blocks cannot be split into 2 stages"
_LAYERS = "later blocks or the head read outputs of earlier blocks, which leaves 1 groups"
_ORDER = "its forward must call each block once, in order"
_FIXED = "its forward runs the blocks without recording gradients"

REFUSED = {
    # Images shrink from one list of blocks to the next; only one list is cut, and here it has one block.
    **dict.fromkeys(("funnel", "glpn", "hiera", "pvt", "pvt_v2", "segformer"), _TOO_FEW),
    # The last half of the layers uses keys and values of earlier ones; and with four layers no other cut is left.
    **dict.fromkeys(("gemma3n_text", "gemma4", "gemma4_text", "gemma4_text_inside", "gemma4_unified"), _LAYERS),
    # The head reads several layers; of XLM's four lists of layers the largest is the chain.
    **dict.fromkeys(("bridgetower", "dpt", "flava", "xlm"), _LAYERS),
    # One block for all layers; two lists in turns, or some layers many times; blocks whose forward is called without
    # the block.
    **dict.fromkeys(("albert", "dory", "hrm_text", "inkling2_loop_text", "squeezebert"), _ORDER),
    # The decoder reads keys and values of an encoder with the same weights, layer by layer.
    "diffusion_gemma": "its forward does not run with the blocks 1 to 1 alone",
    # A backward pass of its own; a CLIP that stays fixed, and whose inner layers the head reads.
    **dict.fromkeys(("reformer", "clipseg"), _FIXED),
}
"""Policy -> what ``initialize`` says of the model of its test."""

LATER = {
    "ibert": "read ibert.embeddings.token_type_embeddings.weight, which another stage holds",
    "pi0": "read embed_action_time.action_in_proj.bias, ",
}
"""Policy -> what the first pass says: stages look at values of activations, for their range; or embed actions."""

WITHHELD = {"colpali": "image_hidden_states"}
"""Policy -> an entry of the outputs of a model without a loss that the last stage cannot give."""

_COLLECTED = {"output_router_logits"}  # what the batches of some ask for, and stages refuse

NAMES = list(own_policies())
WHOLE_TYPES = [name for name in supported_model_types() if not of_type(name).inside]


def _first(name: str) -> str | None:
    types = own_policies()[name].model_types
    return next((model_type for model_type in types if not of_type(model_type).inside), None)


def _listed(model_type: str) -> list[Case]:
    """The heads that make text, or else the first one."""
    order = ("seq2seq", "causal", "masked", "ctc")
    listed = cases(model_type)
    words = [case for case in listed if kind(case.head) in order]
    return sorted(words, key=lambda case: (order.index(str(kind(case.head))), case.variant)) or listed[:1]


def _run(name: str) -> None:
    transformers.logging.set_verbosity_error()
    autopar.dry_run.plan_model.check_plan = lambda *_: True  # it is about tensor parallelism
    model_type = _first(name)
    assert model_type is not None
    listed = _listed(model_type)
    if not listed:
        return  # all its heads are left out, with reasons
    models = [(case, build(case, 6, 3)) for case in listed[:4]]
    case, model = next(((c, m) for c, m in models if find_policy(m).name == name), models[0])
    if name in REFUSED:
        with raises_everywhere(AutoparError, REFUSED[name]):
            autopar.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2}})
        return
    assert len(elements_of(model, find_policy(model))[0]) > 1
    settings = {"pipeline": {"microbatch_size": 1000, "timeout": 20}, "without": WITHHELD.get(name, "")}
    inputs = [{k: v for k, v in batch.items() if k not in _COLLECTED} for batch in batches(case, model.config)]
    check_pipeline(lambda: model, inputs, **settings)


# Each is split in another way.
IN_EVERY_RUN = ("deberta", "zamba", "whisper", "llava", "mamba2", "blt")
IN_EVERY_MERGE = ("mpnet", "gemma2", "vit", "albert", "mllama")


WHOLE = [name for name in NAMES if _first(name) is not None and name not in LATER]


@pytest.mark.every_case
@pytest.mark.tier("test", only=IN_EVERY_RUN)
@pytest.mark.parametrize(
    "name",
    first_policies(
        {*IN_EVERY_RUN, *IN_EVERY_MERGE, *every_fourth(one_of_each_structure(WHOLE_TYPES), 1)}, WHOLE, later="sweep"
    ),
)
@pooled(world_size=2, timeout=120)
def test_two_stages_of(name: str) -> None:
    _run(name)


def test_what_make_test_has_is_there() -> None:
    assert set(NAMES) >= {*IN_EVERY_RUN, *IN_EVERY_MERGE}


@pytest.mark.parametrize("name", LATER)
@distributed(world_size=2)
def test_what_only_the_first_pass_can_see(name: str) -> None:
    with pytest.raises(AutoparError, match=re.escape(LATER[name])):
        _run(name)
