"""State-space models, convolutions and gated recurrences, and their hybrids with attention."""

from __future__ import annotations

from tests.zoo.flat import HEADS, KV_HEADS, LINEAR_THEN_FULL, MOE, sized
from tests.zoo.form import Kind

# The state-space mixers of one head count: as many heads as attention has, in several groups.
_MAMBA2 = {
    "mamba_n_heads": HEADS,
    "mamba_n_groups": KV_HEADS,
    "mamba_d_state": 5,
    "mamba_chunk_size": 4,
    "initializer_range": 0.25,
}

_ONE_GROUP = {"mamba_n_groups": 1}


KINDS: dict[str, Kind] = {
    "mamba": Kind(
        settings={"state_size": 5, "initializer_range": 0.25},
        variants={"biases": {"use_bias": True, "use_conv_bias": False}},
    ),
    "mamba2": Kind(
        make=sized(
            "mamba2",
            num_heads=HEADS,
            head_dim=16,
            n_groups=KV_HEADS,
            state_size=5,
            chunk_size=4,
            initializer_range=0.25,
        ),
        variants={
            "one-group": {"n_groups": 1},
            "biases": {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
        },
    ),
    "jamba": Kind(
        make=sized(
            "jamba",
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=5,
            initializer_range=0.15,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        variants={
            "other-layers": {"attn_layer_offset": 0, "mamba_proj_bias": True, "mamba_conv_bias": False},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    "bamba": Kind(
        make=sized("bamba", **_MAMBA2, attn_layer_indices=[1]),
        variants={
            "one-group": _ONE_GROUP,
            "biases": {
                "attention_bias": True,
                "mlp_bias": True,
                "mamba_proj_bias": True,
                "tie_word_embeddings": True,
            },
        },
    ),
    "falcon_h1": Kind(
        make=sized(
            "falcon_h1",
            **_MAMBA2,
            mamba_d_ssm=None,
            mamba_rms_norm=True,
            lm_head_multiplier=0.5,
            embedding_multiplier=2.0,
            mlp_multipliers=[1.5, 0.7],
            key_multiplier=0.8,
            attention_in_multiplier=1.3,
            attention_out_multiplier=0.9,
            ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9],
            ssm_in_multiplier=1.2,
            ssm_out_multiplier=0.7,
        ),
        double="the plain model's own float32 logits of 33 tokens are off by 7.5e-6",
        variants={
            "one-group": _ONE_GROUP,
            "no-norm": {"mamba_rms_norm": False, "tie_word_embeddings": True},
            "gate-then-norm": {"mamba_norm_before_gate": False},
            "biases": {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
        },
    ),
    "falcon_mamba": Kind(
        settings={"state_size": 5, "initializer_range": 0.25},
        variants={"biases": {"use_bias": True, "use_conv_bias": False}},
    ),
    "nemotron_h": Kind(
        double="rounding of float32 alone is above the tolerance",
        make=sized(
            "nemotron_h",
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            mamba_num_heads=HEADS,
            mamba_head_dim=8,
            n_groups=KV_HEADS,
            ssm_state_size=5,
            chunk_size=4,
            initializer_range=0.25,
            head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=11,
            moe_shared_expert_intermediate_size=13,
            n_group=2,
            routed_scaling_factor=1.5,
        ),
        variants={
            "one-group": {"n_groups": 1, "tie_word_embeddings": True},
            "latent": {"moe_latent_size": 10},
            "biases": {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "use_bias": True},
        },
    ),
    "granitemoehybrid": Kind(
        make=sized(
            "granitemoehybrid",
            **_MAMBA2,
            layer_types=LINEAR_THEN_FULL,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=13,
            embedding_multiplier=2.0,
            logits_scaling=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
        ),
        variants={
            "one-group": _ONE_GROUP,
            "dense": {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True},
            "biases": {"attention_bias": True, "mamba_proj_bias": True},
        },
    ),
    "zamba": Kind(
        make=sized(
            "zamba",
            num_hidden_layers=4,
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
            n_mamba_heads=HEADS,
            head_dim=16,
            num_key_value_heads=KV_HEADS,
            mamba_d_state=5,
            initializer_range=0.15,
        ),
        variants={
            "two-mamba-heads": {"n_mamba_heads": 2, "mamba_proj_bias": True, "mamba_conv_bias": False},
            "untied": {"tie_word_embeddings": False},
        },
    ),
    "zamba2": Kind(
        double="rounding of float32 alone is above the tolerance",
        make=sized(
            "zamba2",
            num_hidden_layers=5,
            layers_block_type=["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
            n_mamba_heads=HEADS,
            head_dim=16,
            mamba_ngroups=KV_HEADS,
            mamba_d_state=5,
            initializer_range=0.1,
            chunk_size=4,
            num_key_value_heads=HEADS,
            num_mem_blocks=2,
            use_shared_attention_adapter=True,
            adapter_rank=5,
            use_mem_rope=True,
        ),
        variants={
            "one-group": {"mamba_ngroups": 1},
            "one-block": {
                "num_mem_blocks": 1,
                "use_shared_attention_adapter": False,
                "use_mem_rope": False,
                "num_key_value_heads": KV_HEADS,
            },
            "biases": {"add_bias_linear": True},
            "untied": {"tie_word_embeddings": False},
        },
    ),
    "lfm2": Kind(
        settings={"layer_types": ["conv", "full_attention"], "block_multiple_of": 5},
        variants={"biases": {"conv_bias": True, "block_auto_adjust_ff_dim": False}},
    ),
    "lfm2_moe": Kind(
        make=sized("lfm2_moe", **MOE, layer_types=["conv", "full_attention"], num_dense_layers=1),
        variants={
            "biases": {
                "conv_bias": True,
                "use_expert_bias": False,
                "norm_topk_prob": False,
                "tie_word_embeddings": False,
            }
        },
    ),
    "lfm3": Kind(
        settings={
            "num_hidden_layers": 3,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "sliding_window": 4,
            "norm_eps": 1e-2,
            "rms_norm_eps": 1e-2,
            "initializer_range": 0.03,
        },
        variants={
            "biases": {"conv_bias": True, "attention_bias": True},
            "plain": {"use_sandwich_norm": False, "use_attention_gate": False},
        },
    ),
    "recurrent_gemma": Kind(
        make=sized(
            "recurrent_gemma",
            block_types=["recurrent", "attention"],
            attention_window_size=4,
        ),
        variants={"one-kv-head": {"num_key_value_heads": 1, "attention_bias": True}},
    ),
    "zaya": Kind(
        make=sized(
            "zaya",
            moe_intermediate_size=11,
            num_experts=4,
            router_hidden_size=10,
            initializer_range=0.3,
            head_dim=8,
            layer_types=["hybrid", "hybrid_sliding"],
            sliding_window=4,
        ),
        variants={"biases": {"attention_bias": True, "lm_head_bias": True, "tie_word_embeddings": False}},
    ),
}
