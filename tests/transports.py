"""What carries the tensor-parallel collectives on the CPU, for tests of collectives: they run over both."""

from __future__ import annotations

import pytest

both_transports = pytest.mark.parametrize("transport", ["gloo", "shm"])
"""Parametrize a test with ``transport``, for ``MPU(..., cpu_transport=transport)`` or the config."""
