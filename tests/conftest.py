"""Settings of the whole test run: a clean environment, one thread, tiers."""

import tests.harness.environment  # noqa: F401 - cleans the environment, before others read it

# isort: split
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.tier_run import TierRun, add_options

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TierRun(config), "tiers")


@pytest.fixture
def alone() -> Iterator[Any]:
    """An MPU over a world of this one process."""
    from autopar.distributed.mesh import MPU

    state = torch.get_rng_state()
    yield MPU()
    dist.destroy_process_group()
    torch.set_rng_state(state)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the world of one process that a file's tests may have left behind: another file starts without one."""
    if (nextitem is None or nextitem.path != item.path) and dist.is_initialized():
        dist.destroy_process_group()
