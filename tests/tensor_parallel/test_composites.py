"""Composites that no case of the zoo can run: models without a forward, and one whose image encoder needs timm."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    Gemma3nConfig,
    Gemma3nForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

import autopar
from tests.features.experts.mixtures import wholes
from tests.harness.worlds import pooled
from tests.random_models import Case, batches, build

_TEXT = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "intermediate_size": 37,
    "vocab_size": 61,
    "pad_token_id": 0,
}
_THINKERS = {
    "qwen2_5_omni": Case("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration"),
    "qwen3_omni_moe": Case("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration"),
}


def _omni(kind: str) -> Any:
    thinker = build(_THINKERS[kind], 4, 2, vocab=131).config.to_dict()
    if kind == "qwen2_5_omni":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        talker = {**_TEXT, "embedding_size": 32, "rope_parameters": rope}
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "ff_mult": 2}
        eights = dict.fromkeys(("mel_dim", "enc_dim", "enc_emb_dim", "enc_attention_channels", "enc_se_channels"), 8)
        looks = {"emb_dim": 16, "num_embeds": 61, "look_ahead_layers": [0], "look_backward_layers": [0]}
        encoder = {"enc_channels": [16, 16, 16], "enc_kernel_sizes": [3, 3, 1], "enc_dilations": [1, 2, 1]}
        rates = {"upsample_initial_channel": 16, "upsample_rates": [2], "upsample_kernel_sizes": [4]}
        gan = {"mel_dim": 8, **rates, "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}
        wav = {"dit_config": {**sizes, **eights, **looks, **encoder}, "bigvgan_config": gan}
        parts = {"thinker_config": thinker, "talker_config": talker, "token2wav_config": wav}
        return Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**parts))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 19}
    talker = {
        "text_config": {**_TEXT, **experts, "shared_expert_intermediate_size": 23},
        "code_predictor_config": {**_TEXT, "num_hidden_layers": 1, "num_code_groups": 3},
        "thinker_hidden_size": 32,
        "num_code_groups": 3,
        "spatial_merge_size": 2,
    }
    wav = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    wav |= {"intermediate_size": 21, "codebook_size": 41, "num_quantizers": 3, "decoder_dim": 16}
    rates = {"upsample_rates": [2], "upsampling_ratios": [2]}
    parts = {"thinker_config": thinker, "talker_config": talker, "code2wav_config": {**wav, **rates}}
    return Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**parts))


def _draw(model: nn.Module) -> None:
    """Draw all weights in float64; experts of talkers have no initial values."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)


def _talk(model: Any) -> torch.Tensor:
    """Return the logits of a talker for what a thinker says, ``[batch, seq, codes]``."""
    said = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.arange(12).view(2, 6)
    if isinstance(model, Qwen2_5OmniForConditionalGeneration):
        logits: torch.Tensor = model.talker(input_ids=ids, thinker_reply_part=said).logits
        return logits
    talker = model.talker
    hidden = talker.model(inputs_embeds=talker.text_projection(said) + talker.get_input_embeddings()(ids))[0]
    return talker.codec_head(hidden)  # type: ignore[no-any-return]


def _compare(plain: Any, model: Any, run: Any) -> None:
    found, due = run(model), run(plain)
    for mine, other in zip(found, due, strict=True):
        assert (mine - other).norm() < 1e-5 * other.norm()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    gradients, largest = wholes(model, gradients=True), max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        apart = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-4 * largest)
        assert apart < 1e-5, (name, float(apart))


@pytest.mark.parametrize("kind", _THINKERS)
@pooled(world_size=2)
def test_omni_models_that_think_and_talk(kind: str) -> None:
    plain = _omni(kind)
    _draw(plain)
    for module in plain.modules():
        if isinstance(module, PreTrainedModel):
            module.config._experts_implementation = "eager"
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    data = [
        {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        for batch in batches(_THINKERS[kind], plain.thinker.config, 2)
    ]

    def run(each: Any) -> list[torch.Tensor]:
        outputs = [each.thinker(**batch) for batch in data]
        sum(out.loss for out in outputs).backward()
        logits = _talk(each)
        logits.pow(2).mean().backward()
        return [*(out.logits for out in outputs), logits]

    _compare(plain, model, run)
    assert sum(p.numel() for p in model.talker.parameters()) < 0.8 * sum(p.numel() for p in plain.talker.parameters())


class _Eye(nn.Module):
    """In place of timm's encoder: an image of 12 x 12 becomes 3 x 3 positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.conv = config, nn.Conv2d(3, config.hidden_size, 4, 4)

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.conv(pixel_values))


def _gemma3n(monkeypatch: pytest.MonkeyPatch) -> Any:
    text = {**_TEXT, **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 131)}
    text |= {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 0, "laurel_rank": 5, "altup_num_inputs": 3}
    text |= {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"activation_sparsity_pattern": [0.5, 0.0]}
    audio = {"input_feat_size": 8, "hidden_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 1}
    audio |= {"conf_attention_chunk_size": 2, "conf_attention_context_left": 3, "conf_reduction_factor": 2}
    audio |= {"sscp_conv_channel_size": [6, 4], "vocab_size": 1, "vocab_offset": 130}
    vision = {"hidden_size": 20, "vocab_size": 1, "vocab_offset": 129, "num_labels": 2}
    config = Gemma3nConfig(
        text_config=text, audio_config=audio, vision_config=vision, vision_soft_tokens_per_image=9, image_token_id=128
    )
    made = AutoModel.from_config
    monkeypatch.setattr(
        AutoModel, "from_config", lambda each: _Eye(each) if each.model_type == "gemma3n_vision" else made(each)
    )
    return Gemma3nForConditionalGeneration(config)


@pooled(world_size=2)
def test_gemma3n_with_an_image_encoder_that_stays_whole() -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain = _gemma3n(patch)
        _draw(plain)
        model = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 120, (2, 14), generator=generator)
    ids[:, 2:11] = 128
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 12, 12, generator=generator).double()}

    def run(each: Any) -> list[torch.Tensor]:
        out = each(**batch, labels=ids.masked_fill(ids == 128, -100))
        out.loss.backward()
        return [out.logits]

    _compare(plain, model, run)
