"""Compare inputs, random states, weights and gradients of ranks before forwards and steps: ``consistency_check``."""

from autopar.registry import Feature

FEATURE = Feature(
    name="rank_checks",
    about="rank checks before a forward and at an optimizer step",
    guards={
        "forward": "autopar.features.rank_checks.forward:make",
        "step": "autopar.features.rank_checks.step:StepComparison",
    },
)
