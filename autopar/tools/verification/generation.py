"""Generation: tokens that are chosen greedily, and the logits that they were chosen by, with a cache and padding."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.tools.verification.closeness import Distance, measure
from autopar.tools.verification.outputs import reseed
from autopar.tools.verification.report import Row
from autopar.tools.verification.session import Session
from autopar.tools.verification.training import Named, worst_row

__all__ = ["generate", "generated", "prompt_of", "why_not"]

_TOKENS = 6
_PADDING = 2  # columns on the left of the first prompt


def why_not(session: Session) -> str:
    """Return why generation is left out; empty if it is not."""
    model = session.plain
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        return f"{type(model).__name__} does not generate"
    if session.mpu.cp.size > 1:
        return "context parallelism does not shorten what is generated token by token"
    if "input_ids" not in session.batches[0]:
        return "its batch has no input_ids"
    return ""


def prompt_of(session: Session) -> dict[str, Any]:
    """Return the inputs of the first batch without targets; for text alone, the first prompt is padded on the left."""
    batch = session.batches[0]
    inputs = {
        name: value
        for name, value in batch.items()
        if "label" not in name and not name.startswith(("decoder_", "output_", "next_sentence"))
    }
    encoder_decoder = getattr(session.plain.config, "is_encoder_decoder", False)
    if set(inputs) <= {"input_ids", "attention_mask"} and not encoder_decoder:
        ids = inputs["input_ids"]
        ids = ids[: session.mpu.dp.size + 1, : max(_PADDING + 1, ids.shape[1] // 2)]
        mask = torch.ones_like(ids)
        mask[0, :_PADDING] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs


def generated(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Return tokens and the logits of each, chosen greedily."""
    model.eval()
    reseed(0)
    settings: dict[str, Any] = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS, "do_sample": False}
    if "pixel_values" not in inputs:  # some models pass one of their own on
        settings["pad_token_id"] = 0
    with torch.no_grad():
        return model.generate(  # type: ignore[operator]
            **copy.deepcopy(inputs), **settings, return_dict_in_generate=True, output_logits=True
        )


def generate(session: Session) -> list[Row]:
    """Compare tokens and logits."""
    reason = why_not(session)
    if reason:
        return [Row("generate", "tokens", None, note=reason)]
    inputs = prompt_of(session)
    try:
        expected = generated(session.plain, inputs)
    except Exception as error:  # what the plain model cannot do is no matter of parallelism
        note = f"the plain model does not: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return [Row("generate", "tokens", None, note=note)]
    actual = generated(session.parallel, inputs)
    same = torch.equal(actual.sequences, expected.sequences)
    note = "" if same else f"{_shown(actual.sequences)}, the plain model's are {_shown(expected.sequences)}"
    rows = [Row("generate", "tokens", same, note=note)]
    logits = [
        Named(f"token {number + 1}", Distance(float("inf"), "missing") if mine is None else measure(mine, theirs))
        for number, (theirs, mine) in enumerate(zip(expected.logits or (), actual.logits or (), strict=False))
    ]
    return [*rows, worst_row("generate", "logits", logits, session.tolerance, show=False)] if logits else rows


def _shown(tokens: torch.Tensor) -> str:
    return str(tokens[0, -_TOKENS:].tolist())
