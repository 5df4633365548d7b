"""The base of the forward hooks of a tensor-parallel model."""

__all__ = ["Hook"]


class Hook:
    """Base of the forward hooks that :func:`autopar.tensor_parallel.hooks.detach` takes away."""
