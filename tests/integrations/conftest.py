from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process trains, which the ``on_one_process`` of a module leaves in a folder."""
    path = tmp_path_factory.mktemp("one-process")
    request.module.on_one_process(path)
    return path
