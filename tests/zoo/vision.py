"""Image and video encoders."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo.form import Draw, Inputs, Kind
from tests.zoo.towers import composite

_BACKBONE = "no task head: a tuple of feature maps"
_PART = "a part of the model, no task head"


def _images(size: int = 12, video: bool = False, patches: int = 9, stride: int = 1) -> Inputs:
    """Pixels of one size, and what the head wants beside them."""

    def inputs(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
        batch: dict[str, Any] = {"pixel_values": draw.normal(2, *([config.num_frames] if video else []), 3, size, size)}
        if head.endswith(("ForImageClassification", "ForVideoClassification")):
            batch["labels"] = draw(0, 3, 2)
        elif head.endswith(("ForMaskedImageModeling", "VideoMAEForPreTraining")):
            masked = torch.zeros(2, patches, dtype=torch.bool)
            masked[0, : patches // 2] = masked[1, 1 : patches // 2 + 1] = True
            batch["bool_masked_pos"] = masked
            if head.startswith("Beit"):
                batch["labels"] = draw(0, config.vocab_size, int(masked.sum()))
        elif head.endswith("ForSemanticSegmentation"):
            batch["labels"] = draw(0, 3, 2, size // stride, size // stride)
        elif head.endswith("ForPreTraining"):
            batch["noise"] = draw.normal(2, patches)
        return batch

    return inputs


def _sized(model_type: str, **scaled: Any) -> Any:
    """A flat config whose fields given as functions follow the number of heads."""

    def fields(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
        sizes = {name: value(heads) if callable(value) else value for name, value in scaled.items()}
        return {"initializer_range": 0.1, "num_labels": 3, **sizes}

    return composite(model_type, fields)


def _twice(heads: int) -> tuple[int, int]:
    return heads, 2 * heads


_SMALL: dict[str, Any] = {"image_size": 12, "patch_size": 4, "encoder_stride": 4}
_DINO = {"image_size": 12, "patch_size": 4, "mlp_ratio": 3, "layerscale_value": 0.7}
_BEIT: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "num_hidden_layers": 4,
    "use_mask_token": True,
    "auxiliary_channels": 12,
    "use_absolute_position_embeddings": True,
    "use_relative_position_bias": True,
    "layer_scale_init_value": 0.7,
    "hidden_size": lambda heads: 8 * heads,
    "num_attention_heads": lambda heads: heads,
    "intermediate_size": 37,
    "vocab_size": 131,
    "out_indices": [1, 2, 3, 4],
}
_NO_BIAS = {"no-bias": {"qkv_bias": False}}
_SWIN: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": lambda heads: 4 * heads,
    "depths": (2, 2),
    "num_heads": _twice,
    "window_size": 4,
    "mlp_ratio": 1.3,
    "encoder_stride": 4,
}
_PYRAMID: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": (2, 1),
    "hidden_sizes": lambda heads: (4 * heads, 8 * heads),
    "num_attention_heads": lambda heads: (heads, heads),
    "strides": (4, 2),
    "mlp_ratios": (2, 3),
}


def _autoencoder(model_type: str, **more: Any) -> Any:
    """An encoder of the patches that are seen and a narrower decoder of all."""
    return _sized(
        model_type,
        image_size=12,
        patch_size=4,
        num_hidden_layers=2,
        intermediate_size=37,
        hidden_size=lambda heads: 8 * heads,
        num_attention_heads=lambda heads: heads,
        decoder_hidden_size=lambda heads: 4 * heads,
        decoder_num_attention_heads=lambda heads: heads,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=23,
        **more,
    )


KINDS: dict[str, Kind] = {
    "aimv2_vision_model": Kind(
        settings=_SMALL,
        inputs=_images(),
        variants={
            "biases": {"qkv_bias": True, "mlp_bias": True},
            "native": {"is_native": True},
            "no-head": {"use_head": False},
        },
    ),
    "beit": Kind(
        make=_sized("beit", **_BEIT),
        inputs=_images(16, patches=16),
        without={"BeitBackbone": _BACKBONE},
        variants={
            "shared-bias": {"use_relative_position_bias": False, "use_shared_relative_position_bias": True},
            "cls": {"use_relative_position_bias": False, "use_mean_pooling": False},
        },
    ),
    "clip_vision_model": Kind(settings={**_SMALL, "projection_dim": 20}, inputs=_images()),
    "data2vec-vision": Kind(
        make=_sized("data2vec-vision", **_BEIT),
        inputs=_images(16, patches=16),
        variants={"shared-bias": {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}},
        double="the plain model's own float32 gradients of segmentation are off by 1.6e-3",
    ),
    "deit": Kind(settings=_SMALL, inputs=_images(), variants=_NO_BIAS),
    "dinov2": Kind(
        settings=_DINO,
        inputs=_images(),
        without={"Dinov2Backbone": _BACKBONE, "Dinov2Encoder": _PART},
        variants={"swiglu": {"use_swiglu_ffn": True}, **_NO_BIAS},
    ),
    "dinov2_with_registers": Kind(
        settings={**_DINO, "num_register_tokens": 2},
        inputs=_images(),
        without={"Dinov2WithRegistersBackbone": _BACKBONE, "Dinov2WithRegistersEncoder": _PART},
        variants={"swiglu": {"use_swiglu_ffn": True}, **_NO_BIAS},
    ),
    "dinov3_vit": Kind(
        settings={**_DINO, "num_register_tokens": 2, "use_gated_mlp": True, "pos_embed_rescale": None},
        inputs=_images(),
        without={"DINOv3ViTBackbone": _BACKBONE, "DINOv3ViTEncoder": _PART},
        variants={
            "plain-mlp": {"use_gated_mlp": False, "mlp_bias": False, "key_bias": True},
            "few-biases": {"query_bias": False, "value_bias": False, "proj_bias": False},
        },
    ),
    "donut-swin": Kind(make=_sized("donut-swin", **_SWIN), inputs=_images(16), variants=_NO_BIAS),
    "dpt": Kind(
        settings={
            "image_size": 16,
            "patch_size": 4,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 12, 16, 20],
            "fusion_hidden_size": 16,
            "pooler_output_size": 22,
        },
        inputs=_images(16),
        variants={"add-readout": {"readout_type": "add"}, **_NO_BIAS},
    ),
    "glpn": Kind(
        make=_sized(
            "glpn",
            **_PYRAMID,
            sr_ratios=(2, 1),
            patch_sizes=(7, 3),
            decoder_hidden_size=12,
        ),
        inputs=_images(32),
    ),
    "hiera": Kind(
        make=_sized(
            "hiera",
            embed_dim=lambda heads: 4 * heads,
            image_size=(32, 32),
            depths=(1, 2, 1),
            num_heads=lambda heads: (heads, 2 * heads, 4 * heads),
            num_query_pool=2,
            mlp_ratio=1.3,
            masked_unit_size=(4, 4),
            masked_unit_attention=(True, False, False),
            decoder_hidden_size=lambda heads: 4 * heads,
            decoder_depth=1,
            decoder_num_heads=lambda h: h,
        ),
        inputs=_images(32, patches=4),
        without={"HieraBackbone": _BACKBONE},
    ),
    "ijepa": Kind(settings={**_SMALL, "pooler_output_size": 22}, inputs=_images(), variants=_NO_BIAS),
    "imagegpt": Kind(
        inputs=lambda head, config, words, draw: {
            "input_ids": words["input_ids"].clamp(max=config.vocab_size - 2),
            **({"labels": draw(0, 3, 2)} if head.endswith("Classification") else {}),
            **({"labels": draw(0, config.vocab_size - 1, 2, 7)} if head.endswith("ImageModeling") else {}),
        },
        variants={
            "upcast": {
                "reorder_and_upcast_attn": True,
                "scale_attn_by_inverse_layer_idx": True,
                "n_inner": None,
                "attn_implementation": "eager",
            }
        },
    ),
    "mlcd": Kind(settings=_SMALL, inputs=_images()),
    "mlcd_vision_model": Kind(settings=_SMALL, inputs=_images()),
    "mobilevit": Kind(
        make=_sized(
            "mobilevit",
            initializer_range=0.08,
            image_size=64,
            hidden_sizes=lambda heads: (4 * heads, 4 * heads, 8 * heads),
            mlp_ratio=1.3,
            neck_hidden_sizes=(4, 8, 12, 12, 16, 20, 24),
            num_attention_heads=lambda heads: heads,
            expand_ratio=2.0,
            output_stride=16,
            aspp_out_channels=12,
        ),
        inputs=_images(64),
        variants=_NO_BIAS,
    ),
    "pixio": Kind(
        settings={**_DINO, "n_cls_tokens": 2}, inputs=_images(), without={"PixioBackbone": _BACKBONE}, variants=_NO_BIAS
    ),
    "pvt": Kind(
        make=_sized("pvt", **_PYRAMID, image_size=32, patch_sizes=(4, 2), sequence_reduction_ratios=(2, 1)),
        inputs=_images(32),
        variants=_NO_BIAS,
    ),
    "pvt_v2": Kind(
        make=_sized("pvt_v2", **_PYRAMID, image_size=32, patch_sizes=(7, 3), sr_ratios=(2, 1)),
        inputs=_images(32),
        without={"PvtV2Backbone": _BACKBONE},
        variants={"linear": {"linear_attention": True}, **_NO_BIAS},
    ),
    "segformer": Kind(
        make=_sized("segformer", **_PYRAMID, patch_sizes=(7, 3), sr_ratios=(2, 1), decoder_hidden_size=12),
        inputs=_images(32),
    ),
    "siglip_vision_model": Kind(settings=_SMALL, inputs=_images(), variants={"no-head": {"vision_use_head": False}}),
    "swin": Kind(
        make=_sized("swin", **_SWIN),
        inputs=_images(16, patches=64),
        without={"SwinBackbone": _BACKBONE, "SwinEncoder": _PART},
        variants={**_NO_BIAS, "positions": {"use_absolute_embeddings": True}},
    ),
    "swin2sr": Kind(
        make=_sized(
            "swin2sr",
            initializer_range=0.04,
            image_size=8,
            patch_size=1,
            embed_dim=lambda heads: 8 * heads,
            depths=(2, 1),
            num_heads=lambda heads: (heads, heads),
            window_size=4,
            mlp_ratio=1.3,
        ),
        inputs=_images(8),
        variants={**_NO_BIAS, "three-convolutions": {"resi_connection": "3conv", "upsampler": "pixelshuffledirect"}},
    ),
    "swinv2": Kind(
        make=_sized("swinv2", **_SWIN),
        inputs=_images(16, patches=64),
        without={"Swinv2Backbone": _BACKBONE},
        variants=_NO_BIAS,
    ),
    "timesformer": Kind(
        settings={**_SMALL, "num_frames": 2},
        inputs=_images(video=True),
        variants={
            "space": {"attention_type": "space_only", "num_frames": 1},
            "joint": {"attention_type": "joint_space_time"},
            **_NO_BIAS,
        },
    ),
    "tipsv2_text_model": Kind(),
    "tipsv2_vision_model": Kind(
        settings=_DINO,
        inputs=_images(),
        without={"Tipsv2VisionBackbone": _BACKBONE, "Tipsv2VisionEncoder": _PART},
        variants={"swiglu": {"use_swiglu_ffn": True}, **_NO_BIAS},
    ),
    "videomae": Kind(
        make=_autoencoder("videomae", num_frames=4),
        inputs=_images(video=True, patches=18),
        variants={"no-bias": {"qkv_bias": False}, "cls": {"use_mean_pooling": False}},
    ),
    "vit": Kind(settings={**_SMALL, "pooler_output_size": 22}, inputs=_images(), variants=_NO_BIAS),
    "vit_mae": Kind(
        make=_autoencoder("vit_mae", norm_pix_loss=True),
        inputs=lambda head, config, words, draw: {
            "pixel_values": draw.normal(2, 3, 12, 12),
            "noise": draw.normal(2, 9),
        },
        variants=_NO_BIAS,
    ),
    "vit_msn": Kind(settings=_SMALL, inputs=_images(), variants=_NO_BIAS),
    "vitdet": Kind(
        settings={
            "image_size": 16,
            "pretrain_image_size": 16,
            "patch_size": 4,
            "mlp_ratio": 3,
            "window_size": 3,
            "use_relative_position_embeddings": True,
            "window_block_indices": [0],
            "residual_block_indices": [1],
        },
        inputs=_images(16),
        without={"VitDetBackbone": _BACKBONE},
        variants={"no-relative": {"use_relative_position_embeddings": False, "qkv_bias": False}},
    ),
    "vivit": Kind(
        settings={"image_size": 12, "tubelet_size": [2, 4, 4], "num_frames": 4, "pooler_output_size": 22},
        inputs=_images(video=True),
        variants=_NO_BIAS,
    ),
    "yolos": Kind(
        settings={"image_size": [12, 12], "patch_size": 4, "num_detection_tokens": 5},
        inputs=_images(),
        variants={"no-positions": {"use_mid_position_embeddings": False, **_NO_BIAS["no-bias"]}},
    ),
    # Towers of composite models, by themselves.
    **{
        name: Kind(settings={**_SMALL, "projection_dim": 20}, inputs=_images())
        for name in (
            *("altclip_vision_model", "chinese_clip_vision_model", "clipseg_vision_model", "metaclip_2_vision_model"),
            *("blip_vision_model", "blip_2_vision_model", "instructblip_vision_model"),
            *("idefics2_vision", "idefics3_vision", "smolvlm_vision"),
        )
    },
    "instructblipvideo_vision_model": Kind(settings=_SMALL, inputs=_images()),
    "internvl_vision": Kind(
        settings={"image_size": [12, 12], "patch_size": [4, 4], "use_qk_norm": True, "attention_bias": True},
        inputs=_images(),
        variants={"plain-attention": {"use_qk_norm": False, "use_mean_pooling": False}},
    ),
    "janus_vision_model": Kind(settings={**_SMALL, "mlp_ratio": 1.3, "attention_bias": False}, inputs=_images()),
    "pixtral": Kind(settings=_SMALL, inputs=_images()),
    "siglip2_vision_model": Kind(
        settings={"num_patches": 9, "patch_size": 4},
        inputs=lambda head, config, words, draw: {
            "pixel_values": draw.normal(2, 9, 48),
            "pixel_attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3]),
            "spatial_shapes": torch.tensor([[3, 3], [3, 2]]),
        },
        variants={"no-head": {"vision_use_head": False}},
    ),
    **{
        name: Kind(
            settings={"encoder_hidden_size": 28, "use_qformer_text_input": True},
            inputs=lambda head, config, words, draw: {
                ("input_ids" if "Instruct" in head else "query_embeds"): (
                    words["input_ids"] if "Instruct" in head else draw.normal(2, 7, config.hidden_size)
                ),
                **({"query_embeds": draw.normal(2, 3, config.hidden_size)} if "Instruct" in head else {}),
                **({} if "Instruct" in head else {"query_length": 3}),
                "encoder_hidden_states": draw.normal(2, 5, 28),
            },
        )
        for name in ("blip_2_qformer", "instructblip_qformer", "instructblipvideo_qformer")
    },
}
