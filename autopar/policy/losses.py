"""Over what the own loss of a model is a mean: by the class whose ``forward`` makes it, as policies say."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from autopar.policy.match import policies_of
from autopar.policy.schema import Policy

__all__ = ["loss_kind"]

# The losses of transformers' classes by the end of their names. All others are means, if their policy names none.
_USUAL = {
    "ForCausalLM": "loss_function",
    "ForConditionalGeneration": "loss_function",
    "ForSequenceClassification": "mean",
    "ForTokenClassification": "mean",
    "ForCTC": "other",
}


def loss_kind(model: Any, given: Policy | None = None) -> str | None:
    """Return the kind of a model's own loss, one of :data:`~autopar.policy.schema.LOSSES`; None if nothing says it.

    The kind is a fact about the class that defines ``forward``: a class that inherits it has the same loss, and one
    that has a ``forward`` of its own may have another.

    Args:
        given: the user's policy, which may name any class. The policies that autopar has for the model's type speak of
            classes of transformers alone.
    """
    classes = [kind for kind in type(model).__mro__ if not kind.__module__.startswith("autopar.")]
    place = next(place for place, kind in enumerate(classes) if "forward" in vars(kind))
    maker, names = classes[place], [kind.__name__ for kind in classes[: place + 1]]
    said = next((given.loss[name] for name in names if name in given.loss), None) if given is not None else None
    if said is not None or not isinstance(model, PreTrainedModel) or not maker.__module__.startswith("transformers."):
        return said
    policies = policies_of(model.config.model_type)
    named = next((policy.loss[maker.__name__] for policy in policies if maker.__name__ in policy.loss), None)
    return named or _usual(model, maker) or ("mean" if policies else None)


def _usual(model: PreTrainedModel, maker: type) -> str | None:
    if maker.__name__.endswith("ForConditionalGeneration") and is_encoder_decoder(model):
        return None
    return next((kind for end, kind in _USUAL.items() if maker.__name__.endswith(end)), None)


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Return whether a model, or the one for text in it, is an encoder and a decoder."""
    configs = (model.config, getattr(model.config, "text_config", None))
    return any(getattr(each, "is_encoder_decoder", False) for each in configs)
