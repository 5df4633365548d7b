"""A merged folder of every model type is byte for byte what ``save_pretrained`` of the plain model writes.

transformers converts many types between memory and file: it renames modules, writes stacked experts one by one, joins
projections that the hub has fused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from autopar.checkpoint.lazy import InMemory
from autopar.checkpoint.merge import merge_checkpoint
from autopar.checkpoint.pieces import open_piece
from autopar.checkpoint.reshard import reshard_checkpoint
from autopar.policy.match import supported_model_types
from autopar.policy.tensors import plan_tensors
from autopar.split import split_checkpoint
from tests.random_models import Case, build, cases, of_type

WHOLE = sorted(name for name in supported_model_types() if not of_type(name).inside)  # the others are inside these

# Several tensors of the model make one tensor of the file.
JOINED = [
    *("dinov2", "dinov2_with_registers", "ernie4_5_vl_moe", "gte", "hrm_text", "inkling2", "inkling2_text"),
    *("jina_embeddings_v3", "kimi_k25", "mistral_large4", "molmo2", "molmo2_text", "nomic_bert", "qianfan_ocr"),
    *("step3p7", "tipsv2", "tipsv2_text_model", "tipsv2_vision_model"),
]


def saved_by_the_plain_model(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    state = {k: v for k, v in model.state_dict().items() if k not in (model._keys_to_ignore_on_save or ())}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))


def saved_by_its_plan(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    state, saved = model.state_dict(), {}
    for name, tensor in plan_tensors(model, "", model, {}).items():
        if tensor.saved_as is not None:
            saved[tensor.saved_as] = state[name]
            continue
        for piece in tensor.pieces:
            saved[piece.name] = open_piece(piece, name, lambda of: InMemory(state[of])).read()
    return saved


def check_plan(case: Case) -> None:
    model = build(case, 6, 3)
    mine, theirs = saved_by_its_plan(model), saved_by_the_plain_model(model)
    assert mine.keys() == theirs.keys(), case
    for name, tensor in theirs.items():
        assert mine[name].shape == tensor.shape and mine[name].dtype == tensor.dtype, (case, name)
        assert torch.equal(mine[name], tensor), (case, name)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_folders(case: Case, folder: Path, size: str = "5GB") -> None:
    """From the plain model's folder to shards, other shards, and back: not a byte of a file is another one."""
    build(case, 6, 3).save_pretrained(folder / "plain", max_shard_size=size)
    split_checkpoint(folder / "plain", folder / "split", tp=2, pp=2)
    reshard_checkpoint(folder / "split", folder / "other", tp=3)
    for shards in ("split", "other"):
        merge_checkpoint(folder / shards, folder / f"{shards} merged", max_shard_size=size)
        mine, theirs = files(folder / f"{shards} merged"), files(folder / "plain")
        assert mine.keys() == theirs.keys(), case
        differing = [name for name in theirs if mine[name] != theirs[name]]
        assert not differing, (case, differing)


@pytest.mark.parametrize("model_type", WHOLE)
@pytest.mark.every
def test_every_head_is_saved_as_by_the_plain_model(model_type: str) -> None:
    for case in cases(model_type):
        check_plan(case)
