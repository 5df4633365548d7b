"""Megatron-LM's ``broadcast_data``: see :mod:`autopar.broadcast`, where ``mpu.broadcast_data`` finds it too."""

from __future__ import annotations

from autopar.broadcast import broadcast_data

__all__ = ["broadcast_data"]
