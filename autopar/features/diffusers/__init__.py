"""Transformers of diffusers (image, video and audio models): policies by class, and inputs for dry runs."""

from autopar.registry import Feature, Step

_HERE = "autopar.features.diffusers"

FEATURE = Feature(
    name="diffusers",
    about="transformers of diffusers: policies by class",
    library="diffusers",
    additions={"diffusers": f"{_HERE}.checks:Checks"},
    models={"diffusers": f"{_HERE}.models:Models"},
    steps={"adapt_transformers": Step(f"{_HERE}.saving:adapt_methods", after="prepare_optimizer")},
)
