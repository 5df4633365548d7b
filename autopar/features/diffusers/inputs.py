"""Make inputs of a diffusion transformer for a dry run, by the names of its arguments and the keys of its config."""

from __future__ import annotations

from typing import Any


def sample_inputs(model: Any, batch: int, length: int) -> dict[str, Any]:
    """Make inputs on the meta device.

    Raises:
        ValueError: An argument is not known.
    """
    raise ValueError(f"no sample input is known for {type(model).__name__}")
