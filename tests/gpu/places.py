"""Where the tests of this folder run: each on the CPU, where there is no GPU, and on the GPU, where there is one."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
CPU = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the same test runs on the GPU"))
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not HAS_GPU, reason="torch sees no GPU (torch.cuda.is_available() is False)"),
        pytest.mark.filterwarnings("default"),  # those of drivers and nccl are not this project's
    ],
)
PLACES = [CPU, GPU]
if os.environ.get("AUTOPAR_SIMULATED"):
    from tests.gpu import simulated

    PLACES = [pytest.param(simulated.start().type)]
on_each = pytest.mark.parametrize("place", PLACES)
