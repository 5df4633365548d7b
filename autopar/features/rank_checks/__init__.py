"""Ranks compare inputs, random states, weights and gradients, before forwards and steps: ``consistency_check``."""

from autopar.registry import Feature

FEATURE = Feature(
    name="rank_checks",
    about="values that ranks compare, before a forward and at a step",
    guards={
        "forward": "autopar.features.rank_checks.forward:make",
        "step": "autopar.features.rank_checks.step:StepComparison",
    },
)
