"""``model.generate`` and continuous batching on several ranks: they choose the same tokens and stop together."""

from autopar.registry import Feature, Step

FEATURE = Feature(
    name="generation",
    about="generate and continuous batching on several ranks",
    steps={"generate_together": Step("autopar.features.generation.generate:generate_together", after="hook_forwards")},
)
