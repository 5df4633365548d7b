"""Training in pipeline stages equals the plain model: losses, every gradient, weights after a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import language_batches
from tests.pipeline_parallel.oracle import check_pipeline
from tests.pool import pooled
from tests.small import gpt2, llama


@pytest.mark.parametrize("build", [gpt2, llama])
@pooled(world_size=2)
def test_two_stages(build: Any) -> None:
    check_pipeline(build, language_batches(131, count=2, batch=4)).mpu.destroy()
