from __future__ import annotations

from tests.zoo.form import Kind

KINDS: dict[str, Kind] = {
    "cohere": Kind(
        variants={"biases": {"attention_bias": True}},
    ),
    "cohere2": Kind(
        settings={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "exaone4": Kind(
        settings={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2": Kind(
        settings={"sliding_window": 4},
    ),
    "gemma3_text": Kind(
        settings={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "glm": Kind(
        variants={"biases": {"attention_bias": True}},
    ),
    "gpt2": Kind(
        variants={
            "cross-attention": {"add_cross_attention": True},
            "upcast": {
                "reorder_and_upcast_attn": True,
                "scale_attn_by_inverse_layer_idx": True,
                "n_inner": None,
                "attn_implementation": "eager",
            },
        },
    ),
    "granite": Kind(
        settings={
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "hyperclovax": Kind(
        variants={"no-post-norm": {"use_post_norm": False}},
    ),
    "llama": Kind(
        variants={
            "biases": {"attention_bias": True, "mlp_bias": True},
            "eager": {"attn_implementation": "eager"},
            "four-layers": {"num_hidden_layers": 4},
        },
    ),
    "mistral": Kind(
        settings={"sliding_window": 4},
    ),
    "olmo": Kind(
        settings={"clip_qkv": 0.3},
    ),
    "phi": Kind(
        variants={"qk-norm": {"qk_layernorm": True}},
    ),
    "phi3": Kind(
        variants={"partial-rotary": {"partial_rotary_factor": 0.5}},
    ),
    "qwen3": Kind(
        variants={"biases": {"attention_bias": True}},
    ),
    "stablelm": Kind(
        variants={"parallel-residual": {"use_parallel_residual": True, "use_qkv_bias": True}},
    ),
    "starcoder2": Kind(
        variants={"no-biases": {"use_bias": False}},
    ),
    "vaultgemma": Kind(
        settings={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
