"""Diffusion transformers of diffusers."""
