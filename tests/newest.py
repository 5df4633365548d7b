"""List the model types that a newer transformers brings. ``python -m tests.newest``.

A model type is new if no policy and no line of ``types_without_policy.txt`` has it; a test compares that file with
the installed transformers. A small model of it gets a derived policy (*derived*), is refused in words (*refused*), or
ends otherwise (*fails*). ``make newest`` prints them with the newest versions that ``pyproject.toml`` admits;
``--ranges`` prints these ranges.
"""

import signal
import sys
import tomllib
import warnings
from pathlib import Path

import torch
import transformers
from packaging.requirements import Requirement
from transformers import CONFIG_MAPPING

from autopar.errors import AutoparError, first_line
from autopar.policy.match import supported_model_types
from autopar.tools.derivation.derive import derive
from autopar.tools.verification.small_models import small_config
from tests.random_models import heads_of

SECONDS = 20  # for a model type
KNOWN = Path(__file__).with_name("types_without_policy.txt")
NEWEST = ("transformers", "accelerate", "peft", "trl")


def ranges() -> list[str]:
    """Return the ranges in ``pyproject.toml`` of the libraries whose newest versions are tried."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    return sorted({text for text in listed if Requirement(text).name in NEWEST})


def without_policy() -> set[str]:
    """Return the model types of the installed transformers that no policy lists."""
    return set(CONFIG_MAPPING) - set(supported_model_types())


def known_without_policy() -> set[str]:
    """Return the model types that are known to have no policy."""
    return {line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")}


def stop(*_: object) -> None:
    raise TimeoutError("it takes too long")


def outcome(model_type: str) -> str:
    """Return what ``derive`` makes of the largest head of a model type."""
    try:
        heads = heads_of(model_type)
        usual = [
            name for end in ("ForConditionalGeneration", "ForCausalLM", "Model") for name in heads if name.endswith(end)
        ]
        with torch.device("meta"):
            model = heads[[*usual, *heads][0]](small_config(CONFIG_MAPPING[model_type]()))
        derive(model)
    except AutoparError as error:
        return f"refused  {first_line(error)}"
    except Exception as error:  # no refusal: a config without defaults, or a mistake
        return f"fails    {type(error).__name__}: {first_line(error)}"
    return "derived"


def main() -> None:
    """Print the ranges, or the table."""
    if sys.argv[1:] == ["--ranges"]:
        print(*ranges())
        return
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    new = sorted(without_policy() - known_without_policy())
    print(f"transformers {transformers.__version__}: {len(new)} new model types without a policy")
    signal.signal(signal.SIGALRM, stop)
    for model_type in new:
        signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)
        said = outcome(model_type)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(f"{model_type:36} {said[:140]}", flush=True)


if __name__ == "__main__":
    main()
