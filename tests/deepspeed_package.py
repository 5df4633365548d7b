"""DeepSpeed, which ``make fetch`` installs beside the environment: transformers would look for it if it were inside."""

import importlib.util
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1] / ".cache" / "deepspeed"


def need_deepspeed() -> None:
    """Skip the test where DeepSpeed is neither installed nor fetched."""
    if not (_FOLDER / "deepspeed").is_dir() and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not there: make fetch")


def put_on_path() -> None:
    """Let this process import DeepSpeed; one that is installed goes first."""
    if _FOLDER.is_dir() and str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
