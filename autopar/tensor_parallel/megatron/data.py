"""Megatron-LM's ``broadcast_data``: see :mod:`autopar.distributed.broadcast_data`."""

from __future__ import annotations

from autopar.distributed.broadcast_data import broadcast_data

__all__ = ["broadcast_data"]
