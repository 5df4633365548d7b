"""Small configs of decoders with a mixture of experts and attention by heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.flat import BIASES, EXPERTS, GRANITE, GROUPED, GROUPS, HEADS, MIXED, SLIDING, made_flat
from tests.zoo.form import Draw, Kind

_MINIMAX = {
    f"{part}_{name}_factor": value
    for part in ("full_attn", "linear_attn", "mlp")
    for name, value in (("alpha", 1.5), ("beta", 0.7))
}
_ROUTER_LOSS = {"router-loss": {"router_aux_loss_coef": 0.5}}  # more than any has by itself
LLAMA4 = {
    **EXPERTS,
    "moe_layers": [1],
    "attention_chunk_size": 4,
    "no_rope_layers": [1, 0],
    "intermediate_size_mlp": 41,
    "floor_scale": 2,
}


def _router_loss(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """Asks for it with the batch: a config that asks for it cannot generate."""
    named = ("router_aux_loss_coef", "aux_loss_coef")
    asked = any(getattr(config, name, None) == 0.5 for name in named)
    return {**batch, "output_router_logits": True} if asked else batch


def _dbrx(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    return CONFIG_MAPPING["dbrx"](
        experts_implementation="eager",
        d_model=8 * heads,
        n_heads=heads,
        n_layers=2,
        max_seq_len=32,
        vocab_size=vocab,
        initializer_range=0.1,
        attn_config={"kv_n_heads": kv_heads, "clip_qkv": 0.3, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 21, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": None},
        **changes,
    )


_FLAT: dict[str, Kind] = {
    "mixtral": Kind(
        settings={**EXPERTS, "sliding_window": 4},
        inputs=_router_loss,
        variants={**_ROUTER_LOSS, **GROUPED, "batched": {"experts_implementation": "batched_mm"}},
    ),
    "jetmoe": Kind(
        settings={**EXPERTS, "kv_channels": 8, "num_key_value_heads": HEADS},
        inputs=_router_loss,
        variants={"router-loss": {"aux_loss_coef": 0.5}, "three-of-four": {"num_experts_per_tok": 3}},
    ),
    "qwen2_moe": Kind(
        settings={
            **EXPERTS,
            **SLIDING,
            "use_sliding_window": True,
            "mlp_only_layers": [0],
        },
        inputs=_router_loss,
        variants={**_ROUTER_LOSS, **GROUPED, "no-biases": {"qkv_bias": False, "norm_topk_prob": False}},
    ),
    "qwen3_moe": Kind(
        settings={**EXPERTS, "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 4},
        inputs=_router_loss,
        variants={**_ROUTER_LOSS, **BIASES},
    ),
    "phimoe": Kind(
        settings={**EXPERTS, "sliding_window": 4},
        variants={"biases": {"attention_bias": True, "lm_head_bias": True}},
    ),
    "olmoe": Kind(settings={**EXPERTS, "clip_qkv": 0.3}, variants=BIASES),
    "granitemoe": Kind(settings={**EXPERTS, **GRANITE}, variants=BIASES),
    "granitemoeshared": Kind(
        settings={**EXPERTS, **GRANITE},
        variants={"no-shared": {"shared_intermediate_size": 0}, **BIASES},
    ),
    "llama4_text": Kind(
        settings=LLAMA4,
        variants={**BIASES, "no-qk-norm": {"use_qk_norm": False}},
    ),
    "gpt_oss": Kind(
        settings={**EXPERTS, **SLIDING},
        inputs=_router_loss,
        variants={**_ROUTER_LOSS, **GROUPED, "no-biases": {"attention_bias": False}},
    ),
    "ernie4_5_moe": Kind(
        settings={**EXPERTS, "moe_num_shared_experts": 2},
        variants={"biases": {"use_bias": True}, "no-shared": {"moe_num_shared_experts": 0}},
    ),
    "glm4_moe": Kind(
        settings={**EXPERTS, **GROUPS, "use_qk_norm": True},
        variants={"biases": {"attention_bias": True, "use_qk_norm": False}},
    ),
    "afmoe": Kind(settings={**EXPERTS, **SLIDING, "num_shared_experts": 2, "mup_enabled": True}, variants=BIASES),
    "aria_text": Kind(
        settings={**EXPERTS, "moe_num_shared_experts": 2},
        variants={"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "beam": Kind(settings={**EXPERTS, **MIXED, **SLIDING, **GROUPS, "head_dim": 8}, variants=BIASES),
    "cohere2_moe": Kind(
        settings={**EXPERTS, **MIXED, **SLIDING, "prefix_dense_intermediate_size": 41},
        variants={
            **BIASES,
            "sigmoid-sum": {"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum"},
            "no-shared": {"num_shared_experts": 0},
        },
    ),
    "dots1": Kind(settings={**EXPERTS, **SLIDING, **GROUPS}, variants=BIASES),
    "exaone_moe": Kind(settings={**EXPERTS, **MIXED, **SLIDING, **GROUPS, "num_shared_experts": 2}),
    "flex_olmo": Kind(settings=EXPERTS, variants=BIASES),
    "flint": Kind(settings={**EXPERTS, **SLIDING, "mlp_only_layers": [0]}, variants=BIASES),
    "granitemoe_swa": Kind(
        settings={**EXPERTS, **GRANITE, **SLIDING, "layer_rope_theta": [10000.0, 0]}, variants=BIASES
    ),
    "hunyuan_v1_moe": Kind(settings=EXPERTS, variants=BIASES),
    "hy_v3": Kind(settings={**EXPERTS, **MIXED}, variants=BIASES),
    "kolibri1": Kind(settings={**EXPERTS, **SLIDING}),
    "laguna": Kind(
        settings={**EXPERTS, **MIXED, **SLIDING, "moe_router_logit_softcapping": 3.0},
        variants={
            **BIASES,
            "gated-elements": {"gating": "per-element"},
            "heads-per-layer": {"num_attention_heads_per_layer": [HEADS, 12]},
        },
    ),
    "mellum": Kind(settings={**EXPERTS, **MIXED, **SLIDING}, variants=BIASES),
    "mimo_v2_flash": Kind(settings={**EXPERTS, **MIXED, **SLIDING, **GROUPS, "v_head_dim": 5}, variants=BIASES),
    "minimax": Kind(
        settings={**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 4, **_MINIMAX}
    ),
    "minimax_m2": Kind(settings={**EXPERTS}),
    "solar_open": Kind(settings={**EXPERTS, **GROUPS}, variants=BIASES),
}

KINDS: dict[str, Kind] = {
    **made_flat(_FLAT, tied={"ernie4_5_moe", "cohere2_moe", "jetmoe"}),
    "dbrx": Kind(make=_dbrx),
}
