"""Small checkpoints in forms that transformers dequantizes. Each function is called by all ranks; the first writes."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from tests.features.quantized.models import FAMILIES, write

BLOCK = 64


def write_fp8(folder: Path, family: str) -> Any:
    """Write a checkpoint as DeepSeek's: numbers of 8 bits, and a scale for each block of 64 x 64; returns its class."""
    kind = FAMILIES[family][0]
    if dist.get_rank() == 0:
        write(folder, family)
        kind.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)  # names as the files of others have
        files = {}
        for name, weight in load_file(folder / "model.safetensors").items():
            files[name] = weight
            if weight.ndim == 2 and ("proj" in name or "experts" in name):
                rows, columns = weight.shape
                blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
                scales = blocks.abs().amax((1, 3)) / 448
                files[name] = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns)
                files[f"{name}_scale_inv"] = scales
        save_file(files, folder / "model.safetensors", {"format": "pt"})
        say(folder, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"})
    dist.barrier()
    return kind


def write_mxfp4(folder: Path) -> Any:
    """Write a checkpoint of gpt-oss: the experts' numbers of 4 bits, two in a byte, and exponents of blocks of 32."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "vocab_size": 131}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
        plain = GptOssForCausalLM(GptOssConfig(**sizes, pad_token_id=0, eos_token_id=1))
        files = {}
        for name, weight in plain.state_dict().items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                files[name] = weight
                continue
            experts, inputs, outputs = weight.shape
            files[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            files[f"{name}_scales"] = torch.randint(119, 123, (experts, outputs, inputs // 32), dtype=torch.uint8)
        plain.config.save_pretrained(folder)
        save_file(files, folder / "model.safetensors", {"format": "pt"})
        say(folder, {"quant_method": "mxfp4"})
    dist.barrier()
    return GptOssForCausalLM


def say(folder: Path, settings: dict[str, Any] | None) -> Any:
    """Write how a folder is quantized into its config; returns what was there."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    before = config.pop("quantization_config", None)
    file.write_text(json.dumps(config | ({} if settings is None else {"quantization_config": settings})))
    return before
