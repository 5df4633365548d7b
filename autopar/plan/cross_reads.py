"""Where parameters belong that the forward was not seen to read, because it was seen with other inputs (text alone).

An image encoder makes what is put between the words: then it belongs in front of the first block, and only there. Or
later blocks look at the image too: then every stage needs it. Signs of that are counted here. A sign that misleads
costs memory; where there is none though blocks do look, the first forward with an image is refused
(:mod:`autopar.pipeline_parallel.stage`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

__all__ = ["looks_further"]

# Tensors that the forward of every decoder takes.
_USUAL = {
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "cache_position", "labels"),
    *("past_key_values", "head_mask", "logits_to_keep"),
    *("encoder_hidden_states", "encoder_attention_mask", "decoder_input_ids"),
}


def looks_further(
    model: PreTrainedModel,
    prefix: str,
    blocks: Sequence[str],
    unread: set[str],
    reads: Mapping[str, set[int]],
    entries: set[int],
) -> bool:
    """Whether blocks seem to read more than what lies between the words at the first one.

    Args:
        model: its path in all names is ``prefix``.
        blocks: paths of the blocks.
        unread: parameters that the forward was not seen to read.
        reads: parameters -> places of the elements that read them.
        entries: places where the embedding of words is read in any model: the first blocks, and behind the last.
    """
    if any(name.startswith(path + ".") for name in unread for path in blocks):
        return True  # blocks have parameters for it (cross-attention)
    around = {path.rpartition(".")[0].rpartition(".")[0] for path in blocks}
    if any(name.startswith(f"{path}." if path else "") for name in unread for path in around):
        return True  # so does the module that runs the blocks
    start = f"{prefix}." if prefix else ""
    words = {id(p) for p in _embedding(model).parameters()}
    read_at = [reads.get(start + name, set()) for name, p in model.named_parameters() if id(p) in words]
    if any(where - entries for where in read_at):
        return True  # blocks read what lies between the words again
    decoder = model.get_decoder()
    if decoder is model or not isinstance(decoder, nn.Module):
        return False
    taken = inspect.signature(decoder.forward).parameters.values()
    return any("Tensor" in str(each.annotation) and each.name not in _USUAL for each in taken)


def _embedding(model: PreTrainedModel) -> nn.Module:
    try:
        found = model.get_input_embeddings()
    except NotImplementedError:
        found = None
    return found if isinstance(found, nn.Module) else nn.Identity()
