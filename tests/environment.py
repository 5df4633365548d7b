"""The environment of the test run: what libraries read in it is the same in every shell.

Imported first by conftest.py, for its effect: libraries read most of this while they are imported. The processes that
tests start inherit it. What is not named here stays as it is: PATH, PYTHONPATH, TMPDIR, which network and which GPUs to
use, and the switches of the tests themselves (UPDATE_DOCS, AUTOPAR_SIMULATED).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from multiprocessing.util import Finalize

# Names, or patterns of names, and what they would do.
REMOVED: dict[str, tuple[str, ...]] = {
    "a launcher's or a scheduler's: models would wait for ranks that never come": (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_*"),
        *("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE", "TORCHELASTIC_*", "FORK_LAUNCHED"),
        *("OMPI_*", "PMI_*", "PMIX_*", "MPI_*", "MV2_*", "SLURM_*", "SM_*", "CCL_*", "KUBEFLOW_*"),
    ),
    "what tutorials/recipes take: nodes would be looked for under other names": (
        *("HEAD", "NODES", "RANKS", "PORT", "RUN", "RESTARTS", "RENDEZVOUS", "INTERFACE", "RECIPES"),
    ),
    "verbosity: what is logged and warned of would be another text, or none": (
        *("TRANSFORMERS_*", "DATASETS_*", "LOGLEVEL", "TQDM_*", "DISABLE_TELEMETRY", "DO_NOT_TRACK"),
        *("NCCL_DEBUG*", "GLOO_LOG_LEVEL", "KINETO_*", "MKL_VERBOSE*", "ONEDNN_*", "DNNL_*", "TF_*"),
    ),
    "caches, tokens and addresses of the hub: tests would depend on what lies there": (
        *("HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "FSSPEC_*"),
    ),
    "which libraries count as installed": ("USE_TORCH*", "USE_TF", "USE_JAX", "USE_HUB_KERNELS", "USE_LIBUV"),
    "settings of accelerate, DeepSpeed and FSDP, which a Trainer takes for its user's": (
        *("ACCELERATE_*", "PARALLELISM_CONFIG_*", "FSDP_*", "MEGATRON_LM_*", "DEEPSPEED_*", "DS_*", "XLA_*", "PJRT_*"),
    ),
    "trackers: a Trainer would report its steps to them": (
        *("WANDB_*", "MLFLOW_*", "COMET_*", "CLEARML_*", "SWANLAB_*", "NEPTUNE_*", "TRACKIO_*", "TENSORBOARD_*"),
    ),
    "logs, checks and compilers of torch: messages get more lines, collectives other errors": (
        *("TORCH_*", "TORCHDYNAMO_*", "TORCHINDUCTOR_*", "AOT_*", "AOTI*", "PYTORCH_*", "ATEN_*", "C10_*", "DCP_*"),
        *("INDUCTOR_*", "TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    ),
    "threads: sums are added up in another order, and ranks take each other's cores": (
        *("OMP_*", "MKL_*", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_*", "KMP_*"),
        *("GOMP_*", "TOKENIZERS_*", "RAYON_*"),
    ),
    "colours and widths: pieces of what commands print are apart": (
        *("FORCE_COLOR", "NO_COLOR", "CLICOLOR*", "COLUMNS", "LINES", "TERMINAL_WIDTH"),
        *("TTY_*", "JUPYTER_*", "DATABRICKS_*", "TYPER_*", "_TYPER_*", "_AUTOPAR_*"),
    ),
    "languages and encodings of what processes print": ("LC_*", "LANG", "LANGUAGE"),
    "switches of Python that it passes on: warnings that are errors, more lines on stderr, modules not found": (
        *("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONVERBOSE", "PYTHONDEBUG", "PYTHONINSPECT", "PYTHONSAFEPATH"),
        *("PYTHONDEVMODE", "PYTHONPROFILEIMPORTTIME", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONCOERCECLOCALE"),
        *("PYTHONLEGACY*", "PYTHONTRACEMALLOC", "PYTHONMALLOC*", "PYTHONWARNDEFAULTENCODING"),
        *("PYTHONSTARTUP", "PYTHONBREAKPOINT", "PYTHON_COLORS", "PYTHONASYNCIODEBUG", "PYTHONINTMAXSTRDIGITS"),
    ),
    "arguments for pytest: they are read by now, and not meant for the runs that tests start": (
        *("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"),
    ),
    "folders of git: those of a hook are not those of the repositories that tests make": ("GIT_*",),
}
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
    patterns = [pattern for group in REMOVED.values() for pattern in group]
    kept = {
        name: value
        for name, value in environment.items()
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    if "PY_COLORS" not in kept:  # so that the lines of pytest itself stay as the shell wants them
        if environment.get("NO_COLOR"):
            kept["PY_COLORS"] = "0"
        elif environment.get("FORCE_COLOR"):
            kept["PY_COLORS"] = "1"
    return kept | SET


def _clean() -> None:
    """Make this process's environment so, with an empty folder as the cache of the hub."""
    hub = os.environ.get("HF_HOME", "") if "PYTEST_XDIST_WORKER" in os.environ else ""  # that of the main process
    if not hub:
        hub = tempfile.mkdtemp(prefix="autopar-hub-")
        Finalize(None, shutil.rmtree, (hub,), {"ignore_errors": True}, exitpriority=-100)  # also of forks: not by them
    clean = cleaned(os.environ) | {"HF_HOME": hub}
    os.environ.clear()
    os.environ.update(clean)
    sys.warnoptions.clear()  # PYTHONWARNINGS, which the ranks would get; pytest has filters of its own


_clean()
