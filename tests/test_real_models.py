from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from autopar.checkpoint.offline import merge_checkpoint, reshard_checkpoint
from autopar.cli.split import split_checkpoint
from tests.parity import close
from tests.real_models import minilm, smollm2
from tests.small import parallel
from tests.worlds import distributed

pytestmark = [pytest.mark.tier("all"), pytest.mark.together]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The folder of SmolLM2, and a file with the plain model's logits and greedy tokens."""
    folder = smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens).logits
        generated = model.generate(**tokens, max_new_tokens=25, do_sample=False)
    file = tmp_path_factory.mktemp("smollm2") / "expected.pt"
    torch.save({"ids": tokens["input_ids"], "logits": logits, "generated": generated}, file)
    return str(folder), str(file)


def compare_language_model(folder: str, file: str, tp: int) -> None:
    expected = torch.load(file)
    model = parallel(AutoModelForCausalLM.from_pretrained(folder).eval(), tp)
    ids = expected["ids"]
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.ones_like(ids)).logits
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=25, do_sample=False)
    relative = (logits - expected["logits"]).norm() / expected["logits"].norm()
    assert relative < 2e-4, relative
    assert torch.equal(generated, expected["generated"])
    text = AutoTokenizer.from_pretrained(folder).decode(generated[0])
    assert "Paris" in text, text


@distributed(world_size=2, timeout=300)
def test_smollm2_on_two_with_six_and_three_heads(language_model: tuple[str, str]):
    compare_language_model(*language_model, tp=2)


def compare_encoder(folder: str, tp: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(1000, 20000, (3, 21))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    plain = AutoModel.from_pretrained(folder).eval()
    model = parallel(AutoModel.from_pretrained(folder).eval(), tp)
    expected, actual = plain(ids, attention_mask=mask), model(ids, attention_mask=mask)
    close(actual.last_hidden_state, expected.last_hidden_state, "hidden states")
    close(actual.pooler_output, expected.pooler_output, "pooled")


@pytest.fixture(scope="module")
def encoder() -> str:
    return str(minilm())


@distributed(world_size=4, timeout=300)
def test_minilm_on_four(encoder: str):
    compare_encoder(encoder, 4)


def test_smollm2_split_for_three_resharded_for_two_and_merged(tmp_path: Path):
    folder = smollm2()
    split_checkpoint(folder, tmp_path / "three", tp=3)
    reshard_checkpoint(tmp_path / "three", tmp_path / "two", tp=2, pp=2)
    merge_checkpoint(tmp_path / "two", tmp_path / "merged")
    original, merged = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "merged"))
    assert original.keys() == merged.keys()
    assert all(torch.equal(original[name], merged[name]) for name in original)
