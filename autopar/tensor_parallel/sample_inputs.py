"""The smallest inputs that exercise a model, made from its config; on the meta device, without values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

__all__ = ["sample_inputs"]


def sample_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """The smallest input that exercises the model: two sequences of five tokens, or what transformers proposes."""
    if model.main_input_name != "input_ids":
        return {key: value.to("meta") for key, value in model.dummy_inputs.items()}
    shape = (2, 3, 5) if "MultipleChoice" in type(model).__name__ else (2, 5)
    ids = torch.zeros(shape, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    elif getattr(config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = torch.empty(2, 5, config.hidden_size, device="meta", dtype=model.dtype)
    return inputs
