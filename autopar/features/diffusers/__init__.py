"""Transformers of diffusers (image, video and audio models): policies by class, and inputs for dry runs."""

from autopar.registry import Feature

_HERE = "autopar.features.diffusers"

FEATURE = Feature(
    name="diffusers",
    about="transformers of diffusers: policies by class",
    library="diffusers",
    additions={"diffusers": f"{_HERE}.checks:Checks"},
    models={"diffusers": f"{_HERE}.models:Models"},
)
