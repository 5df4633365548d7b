"""Small models with quantized weights and LoRA adapters, and the plain one beside a parallelized one."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from tests.features.peft.adapted import with_lora

bitsandbytes = pytest.importorskip("bitsandbytes")

FORMS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
OF_TORCHAO = ("torchao int8", "torchao float8")  # in ranks that have started torchao
_SIZES = {"hidden_size": 192, "num_attention_heads": 3, "head_dim": 64, "intermediate_size": 320, "vocab_size": 131}
_SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0}
_OF_GPT2 = {"n_embd": 192, "n_head": 3, "n_layer": 2, "vocab_size": 131, "n_positions": 64, "eos_token_id": 0}
_OF_GPT2 |= {"bos_token_id": 0, "tie_word_embeddings": False, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
_OF_PHI3 = {name: size for name, size in _SIZES.items() if name != "head_dim"}
_EVEN = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaForCausalLM, lambda: transformers.LlamaConfig(**_SIZES)),
    "qwen3": (transformers.Qwen3ForCausalLM, lambda: transformers.Qwen3Config(**{**_SIZES, "num_key_value_heads": 1})),
    "phi3": (transformers.Phi3ForCausalLM, lambda: transformers.Phi3Config(**_OF_PHI3)),
    "mixtral": (transformers.MixtralForCausalLM, lambda: transformers.MixtralConfig(**_SIZES, num_local_experts=4)),
    "gpt2": (transformers.GPT2LMHeadModel, lambda: transformers.GPT2Config(**_OF_GPT2)),
}


def write(folder: Any, family: str = "llama") -> Any:
    """Write a plain model: 3 heads of 64, 320 = 5 x 64 features; returns its class."""
    even = (transformers.LlamaForCausalLM, lambda: transformers.LlamaConfig(**{**_SIZES, **_EVEN}))
    kind, config = (FAMILIES | {"even": even})[family]
    torch.manual_seed(0)
    plain = kind(config())
    plain.config.save_pretrained(folder)  # save_pretrained writes on rank 0 only
    save_file(plain.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
    return kind


def how(form: str) -> Any:
    """Return the ``quantization_config`` of a form."""
    if form in FORMS:
        return transformers.BitsAndBytesConfig(**FORMS[form])
    from torchao import quantization

    kinds = {"torchao int8": quantization.Int8WeightOnlyConfig, "torchao float8": quantization.Float8WeightOnlyConfig}
    return transformers.TorchAoConfig(kinds[form]())


def loaded(settings: Any, family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """Return what ``from_pretrained(quantization_config=settings)`` gives."""
    with tempfile.TemporaryDirectory() as folder:
        return write(folder, family).from_pretrained(folder, quantization_config=settings, dtype=dtype)


def quantized(form: str, family: str = "llama") -> Any:
    """Return a quantized model that computes alike on all CPUs."""
    model = loaded(how(form), family)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # evaluation would compute in bf16 on some CPUs
    return model


def adapted(form: str, family: str = "llama", **settings: Any) -> Any:
    """The same with adapters on all linear layers, for training."""
    return with_lora(quantized(form, family), target_modules="all-linear", **settings).train()


def batches(count: int, rows: int = 2) -> list[dict[str, torch.Tensor]]:
    """Make micro-batches of other lengths, with padding."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        ids = torch.randint(1, 131, (rows, 9 + 4 * number), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : 2 + number] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


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
        plain = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, pad_token_id=0, eos_token_id=1))
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
    return transformers.GptOssForCausalLM


def say(folder: Path, settings: dict[str, Any] | None) -> Any:
    """Write how a folder is quantized into its config; returns what was there."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    before = config.pop("quantization_config", None)
    file.write_text(json.dumps(config | ({} if settings is None else {"quantization_config": settings})))
    return before
