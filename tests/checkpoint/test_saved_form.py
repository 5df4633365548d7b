"""A merged folder of every model type is byte for byte what ``save_pretrained`` of the plain model writes.

transformers converts many types between memory and file: it renames modules, writes stacked experts one by one, joins
projections that the hub has fused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from typer.testing import CliRunner

from autopar.checkpoint.format import Manifest
from autopar.checkpoint.offline import merge_checkpoint, reshard_checkpoint
from autopar.cli import app
from autopar.cli.split import split_checkpoint
from autopar.errors import CheckpointError
from autopar.plan import tensors
from autopar.plan.tensors import plan_tensors
from autopar.policy.match import supported_model_types
from autopar.storage.lazy_tensor import InMemory, open_piece
from tests.checkpoint.tiny import files, rewrite_manifest
from tests.random_models import Case, build, cases, of_type
from tests.refused_types import NAMES_IN_MEMORY
from tests.representatives import REPRESENTATIVES, first_types

WHOLE = sorted(  # the others are inside these
    name for name in supported_model_types() if not of_type(name).inside and name not in NAMES_IN_MEMORY
)

# Several tensors of the model make one tensor of the file.
JOINED = [
    *("dinov2", "dinov2_with_registers", "ernie4_5_vl_moe", "gte", "hrm_text", "inkling2", "inkling2_text"),
    *("jina_embeddings_v3", "kimi_k25", "lara_mini", "mistral_large4", "molmo2", "molmo2_text", "nomic_bert"),
    *("qianfan_ocr", "sarvam_moe", "step3p7", "tipsv2", "tipsv2_text_model", "tipsv2_vision_model"),
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


def check_plan(case: Case) -> bool:
    """Compare what both would save; whether some tensor of the file is joined from several."""
    model = build(case, 6, 3)
    mine, theirs = saved_by_its_plan(model), saved_by_the_plain_model(model)
    assert mine.keys() == theirs.keys(), case
    for name, tensor in theirs.items():
        assert mine[name].shape == tensor.shape and mine[name].dtype == tensor.dtype, (case, name)
        assert torch.equal(mine[name], tensor), (case, name)
    return any(piece.joined for tensor in plan_tensors(model, "", model, {}).values() for piece in tensor.pieces)


def assert_same_tensors(one: Path, other: Path) -> None:
    """Folders with several files, which need not hold the same ones each."""
    assert all(len(list(folder.glob("*.safetensors"))) > 1 for folder in (one, other))
    mine, theirs = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (one, other)
    )
    assert mine.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(mine[name], theirs[name])]
    assert not [name for name in theirs if mine[name].dtype != theirs[name].dtype]


def check_folders(case: Case, folder: Path, size: str = "") -> None:
    """From the plain model's folder to shards, other shards, and back: not a byte of a file is another one."""
    build(case, 6, 3).save_pretrained(folder / "plain", max_shard_size=size or "5GB")
    split_checkpoint(folder / "plain", folder / "split", tp=2, pp=2)
    reshard_checkpoint(folder / "split", folder / "other", tp=3)
    for shards in ("split", "other"):
        merge_checkpoint(folder / shards, folder / f"{shards} merged", max_shard_size=size or "5GB")
        if size:
            assert_same_tensors(folder / f"{shards} merged", folder / "plain")
            continue
        mine, theirs = files(folder / f"{shards} merged"), files(folder / "plain")
        assert mine.keys() == theirs.keys(), case
        differing = [name for name in theirs if mine[name] != theirs[name]]
        assert not differing, (case, differing)


@pytest.mark.tier("all")
@pytest.mark.parametrize("model_type", first_types({*REPRESENTATIVES, *JOINED}, WHOLE, later="sweep"))
def test_every_head_is_saved_as_by_the_plain_model(model_type: str) -> None:
    joined = [check_plan(case) for case in cases(model_type)]
    assert any(joined) == (model_type in JOINED), "JOINED is what other tests take: it holds all such types"


# Split builds the class that config.json names, which has to be one that transformers exports.
NOT_SPLIT = {
    "bridgetower_text_model": "the class is not exported",
    "glm5_next": "its small model is in float64, of which transformers reads some weights in float32",
    "idefics2_vision": "the class is not exported",
    "muse_spark": "its small model is in float64, of which transformers reads some weights in float32",
    "qwen2_vl_vision": "the class is not exported",
    "shieldgemma2": "transformers itself reads nothing of what Gemma3ForConditionalGeneration saves with this config",
}


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "model_type",
    first_types({*REPRESENTATIVES, *JOINED}, [name for name in WHOLE if name not in NOT_SPLIT], later="sweep"),
)
def test_split_resharded_and_merged_is_the_original(tmp_path: Path, model_type: str) -> None:
    check_folders(cases(model_type)[0], tmp_path)


@pytest.mark.parametrize("model_type", ["nomic_bert", "hrm_text", "inkling2_text"])
def test_several_tensors_of_the_model_in_one_of_the_file(tmp_path: Path, model_type: str) -> None:
    case = cases(model_type)[0]
    check_plan(case)
    check_folders(case, tmp_path / "one")
    check_folders(case, tmp_path / "several", size="30KB")
    tensors = Manifest.read(tmp_path / "one" / "split").tensors.values()
    assert any(piece.joined for tensor in tensors for piece in tensor.pieces)


def test_what_cannot_be_followed_keeps_its_names_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(Case("gpt2", "GPT2LMHeadModel"), 6, 3)

    def halved(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"half.{name}": tensor / 2 for name, tensor in state.items()}

    monkeypatch.setattr(tensors, "revert_weight_conversion", halved)
    message = r"the conversion of GPT2LMHeadModel in save_pretrained is not supported \(half\.\S+ is computed\)\n"
    with pytest.warns(UserWarning, match=message):
        plan = plan_tensors(model, "", model, {})
    assert all(tensor.saved_as == name for name, tensor in plan.items())


def test_tensors_of_other_dtypes_are_joined_as_torch_joins_them() -> None:
    model = build(cases("nomic_bert")[0], 6, 3)
    model.nomic_bert.layers[0].self_attn.k_proj.bfloat16()
    mine, theirs = saved_by_its_plan(model), saved_by_the_plain_model(model)
    assert {name: tensor.dtype for name, tensor in mine.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda piece: piece[4].__setitem__(0, 2), r"parts of shape \[48, 48\] are joined along dim 2"),
        (lambda piece: piece[4][1].clear(), "is joined from nothing"),
        (lambda piece: piece[4][1][1].__setitem__(1, [48, 47]), "parts with other sizes are joined along dim 0"),
    ],
)
def test_manifests_that_join_what_does_not_fit(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    build(cases("nomic_bert")[0], 6, 3).save_pretrained(tmp_path / "plain")
    split_checkpoint(tmp_path / "plain", tmp_path / "split", tp=2)

    def edit(data: Any) -> Any:
        change(
            next(t["pieces"][0] for n, t in data["parts"]["model"]["tensors"].items() if n.endswith("q_proj.weight"))
        )
        return data

    rewrite_manifest(tmp_path / "split", edit)
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoint(tmp_path / "split", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_inspect_names_the_tensor_that_others_are_joined_into(tmp_path: Path) -> None:
    build(cases("nomic_bert")[0], 6, 3).save_pretrained(tmp_path / "plain")
    split_checkpoint(tmp_path / "plain", tmp_path / "split", tp=2)
    shown = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "split"), "--json"]).stdout)
    pieces = {tensor["name"]: tensor["pieces"] for tensor in shown["tensors"]}
    for name in ("q_proj", "k_proj", "v_proj"):
        joined = pieces[f"nomic_bert.layers.0.self_attn.{name}.weight"]
        assert joined == ["nomic_bert.encoder.layers.0.attn.Wqkv.weight"]
    text = CliRunner().invoke(app, ["inspect", str(tmp_path / "split")]).stdout
    assert "nomic_bert.encoder" in text and "not saved" not in text
