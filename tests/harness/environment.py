"""The environment of the test run: what libraries read in it is the same in every shell."""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from multiprocessing.util import Finalize

KEPT = (  # patterns of names
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "TMPDIR", "TZ", "LD_*", "CC", "CXX", "XDG_*", "SSL_*"),
    *("*_proxy", "*_PROXY", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "NVIDIA_*", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    *("TRITON_PTXAS_PATH", "CI", "GITHUB_ACTIONS", "UPDATE_DOCS", "AUTOPAR_*", "PY_COLORS", "PYTEST_VERSION"),
    *("PYTEST_CURRENT_TEST", "PYTEST_XDIST_*", "COVERAGE_*"),
)
SET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks for GPUs without touching them: worlds are forked
    "LC_ALL": "C.UTF-8",
    "_TYPER_FORCE_DISABLE_TERMINAL": "1",  # else typer prints colours on GitHub and where pytest is asked for them
}


def cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment as tests are to find it."""
    kept = {name: value for name, value in environment.items() if any(fnmatchcase(name, pattern) for pattern in KEPT)}
    for name, value in (("NO_COLOR", "0"), ("FORCE_COLOR", "1")):
        if environment.get(name):
            kept.setdefault("PY_COLORS", value)  # the lines of pytest itself stay as the shell wants them
    return kept | SET


def _clean() -> None:
    """Make this process's environment so, with an empty folder as the cache of the hub."""
    hub = os.environ.get("HF_HOME", "") if "PYTEST_XDIST_WORKER" in os.environ else ""  # that of the main process
    if not hub:
        hub = tempfile.mkdtemp(prefix="autopar-hub-")
        Finalize(None, shutil.rmtree, (hub,), {"ignore_errors": True}, exitpriority=-100)  # also of forks: not by them
    clean = cleaned(os.environ)
    os.environ.clear()
    os.environ.update(clean, HF_HOME=hub)
    sys.warnoptions.clear()  # PYTHONWARNINGS, which the ranks would get; pytest has filters of its own


_clean()
