"""Every policy in two pipeline stages: the main head of its first model type against the plain model.

Models that cannot be cut are listed with the reason, and must be refused.
"""

from __future__ import annotations

import pytest
import transformers

import autopar.api
from autopar.errors import AutoparError
from autopar.policy.load import load_policy, policy_files, policy_folder
from autopar.policy.match import find_policy
from autopar.policy.stages import elements_of
from tests.pipeline_parallel.oracle import check_pipeline
from tests.pool import pooled
from tests.random_models import batches, build, cases, kind, of_type

_TOO_FEW = "one block, or one that all layers share"
_LAYERS = "later layers, or the head, read outputs of several earlier ones"
_ORDER = "blocks are not called once each, in order"
_READS = "blocks read what another part of the model makes of other inputs than text"
_BACKWARDS = "it computes its own backward pass"
_HANDS_OUT = "the last stage cannot give the outputs of the image encoder, which this model returns"
_COLLECTS = "the loss collects from the routers of all layers"

REFUSED = {
    **dict.fromkeys(("albert", "funnel", "glpn", "hiera", "pvt", "pvt_v2", "segformer"), _TOO_FEW),
    **dict.fromkeys(("bridgetower", "dpt", "flava", "gemma3n_text", "gemma4_text", "gemma4_unified", "xlm"), _LAYERS),
    **dict.fromkeys(("wav2vec2", "wav2vec2_bert", "wav2vec2_conformer", "wavlm"), _LAYERS),
    **dict.fromkeys(("hrm_text", "squeezebert"), _ORDER),
}
"""Policy -> why the model of its test cannot be cut into stages (of those that ``initialize`` refuses)."""

FAILS = {
    **dict.fromkeys(("nllb_moe", "switch_transformers"), _COLLECTS),
    **dict.fromkeys(("blt", "clap", "clipseg", "evolla", "granite4_vision", "granite_docling"), _READS),
    **dict.fromkeys(("idefics", "inkling2", "mllama", "musicgen", "neomme"), _READS),
    "colpali": _HANDS_OUT,
    "reformer": _BACKWARDS,
}
"""Policy -> why its model is refused when it first runs, or fails there."""

NAMES = [path.stem for path in policy_files()]


def _first(name: str) -> str | None:
    types = load_policy(policy_folder() / f"{name}.yaml").model_types
    return next((model_type for model_type in types if not of_type(model_type).inside), None)


def _run(name: str) -> None:
    transformers.logging.set_verbosity_error()
    autopar.api.rehearse = lambda *_: True  # it is about tensor parallelism
    model_type = _first(name)
    assert model_type is not None
    order = ("seq2seq", "causal", "masked")
    listed = cases(model_type)
    words = [case for case in listed if kind(case.head) in order]
    listed = sorted(words, key=lambda case: (order.index(str(kind(case.head))), case.variant)) or listed[:1]
    if not listed:
        return  # all its heads are left out, with reasons
    models = [(case, build(case, 6, 3)) for case in listed[:4]]
    case, model = next(((c, m) for c, m in models if find_policy(m).name == name), models[0])
    settings = {"pipeline": {"microbatch_size": 1000, "timeout": 20}}
    if name in REFUSED or name in FAILS:
        with pytest.raises((AutoparError, ValueError, IndexError, AssertionError)):
            check_pipeline(lambda: model, batches(case, model.config), **settings)
        return
    assert len(elements_of(model, find_policy(model))[0]) > 1
    check_pipeline(lambda: model, batches(case, model.config), **settings).mpu.destroy()


@pytest.mark.every
@pytest.mark.parametrize("name", [name for name in NAMES if _first(name) is not None])
@pooled(world_size=2, timeout=120)
def test_two_stages_of(name: str) -> None:
    _run(name)


@pytest.mark.parametrize("name", ["deberta", "zamba", "mpnet", "whisper", "llava", "gemma2", "mamba2", "vit", "albert"])
@pooled(world_size=2, timeout=120)
def test_some_in_every_run(name: str) -> None:
    _run(name)
