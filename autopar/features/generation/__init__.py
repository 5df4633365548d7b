"""``model.generate`` and continuous batching on several ranks, with identical tokens on all of them."""

from autopar.registry import Feature, Step

FEATURE = Feature(
    name="generation",
    about="generate and continuous batching on several ranks",
    steps={"generate_together": Step("autopar.features.generation.generate:generate_together", after="hook_forwards")},
)
