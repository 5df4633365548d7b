"""Run autopar with the oldest and the newest libraries that ``pyproject.toml`` admits: ``python -m tests.versions``.

``make oldest`` and ``make newest`` install what ``--requirements`` prints in environments of their own, and run this
module there. Results go to ``compatibility.json``, and ``docs/compatibility.md`` is drawn from it. A model type is new
if the newest transformers has it, the oldest does not, and no policy lists it.

``--without-policy`` prints the model types of the installed transformers that no policy lists, and their classes.
"""

import argparse
import datetime
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers import CONFIG_MAPPING

from autopar.compat.transformers import CACHES
from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import AutoparError, first_line
from autopar.features.sequence_parallel import setup as sequence_parallel
from autopar.plan import stages
from autopar.plan.make_plan import make_plan
from autopar.policy.load import own_policies
from autopar.policy.match import find_policy, supported_model_types
from autopar.tools.derivation.derive import derive
from autopar.tools.verification.small_models import small_config
from tests.probes import PROBES, failures
from tests.random_models import build, heads_of
from tests.representatives import one_of_each_structure
from tests.test_every_policy import _main

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("compatibility.json")
PAGE = ROOT / "docs" / "compatibility.md"
ENDS = ("oldest", "newest")
LIBRARIES = {"torch": "torch", "transformers": "transformers", "accelerate": "accelerate", "peft": "PEFT", "trl": "TRL"}

FAMILIES = ["gpt2", "llama", "mixtral", "bert", "t5"]
OTHERS = ["qwen3", "deepseek_v3", "olmo2", "bart", "bloom", "vit", "whisper"]  # make sweep
TRAINING = {
    "Trainer": "tests/integrations/test_trainer.py::test_on_two_ranks[plain-{'tp': 2}]",
    "TRL": "tests/integrations/test_trl.py::test_trainers[tensor-parallel]",
    "LoRA": "tests/features/peft/test_lora.py::test_lora_trains_as_on_one_process[llama, all linear]",
}
# Model types whose config was another one in 5.20, so that the small models of the tests cannot be made.
CANNOT_BUILD = {"cohere_compass_text"}
# Arguments that forwards had before 5.24, and one that they take as a keyword.
GONE = {"cache_position", "head_mask", "layer_head_mask", "num_items_in_batch"}


def admitted() -> dict[str, SpecifierSet]:
    """Return the ranges in ``pyproject.toml`` of the dependencies and of the extras that training uses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for name in ("trainer", "peft", "rl") for text in project["optional-dependencies"][name]]
    return {each.name: each.specifier for each in map(Requirement, [*project["dependencies"], *extras])}


def bound(admits: SpecifierSet, operator: str) -> Version:
    """Return the version after ``>=`` or ``<``."""
    (found,) = (each.version for each in admits if each.operator == operator)
    return Version(found)


def requirements(ranges: dict[str, SpecifierSet], end: str) -> list[str]:
    """Return what to install: the lower bound of a library, or its range, whose newest version pip takes."""
    exact = {name: f"{name}=={bound(ranges[name], '>=')}" for name in LIBRARIES} if end == "oldest" else {}
    return [exact.get(name, f"{name}{admits}") for name, admits in ranges.items()]


def uncovered(ranges: dict[str, SpecifierSet], recorded: dict[str, Any]) -> list[str]:
    """Return the libraries of which a recorded run did not use the lower bound or the last minor version."""
    found = []
    for name in LIBRARIES:
        oldest, newest = (Version(recorded[end]["versions"][name]) for end in ENDS)
        low, high = bound(ranges[name], ">="), bound(ranges[name], "<")
        if Version(oldest.public) != low:
            found.append(f"make oldest: {name} {oldest} is not {low}")
        if (newest.major, newest.minor + 1) != (high.major, high.minor):
            found.append(f"make newest: {name} {newest} is not the last one below {high}")
    return found


def described(error: Exception) -> str:
    """Return one line on an error, for a cell of a table."""
    return f"{type(error).__name__}: {first_line(error)}"[:160].replace("|", "/")


def tried(names: Iterable[str], check: Callable[[str], object]) -> dict[str, Any]:
    """Return how many names passed a check, and a line for each that did not."""
    passed, failed = 0, {}
    for name in names:
        try:
            check(name)
            passed += 1
        except Exception as error:  # any: the page lists it
            failed[name] = described(error)
            print(f"{name}: {failed[name]}", flush=True)
    return {"passed": passed, "failed": failed}


def command(*arguments: str) -> str:
    """Run a module with this interpreter and return its output; raise an error with the last line if it fails."""
    line, there = [sys.executable, "-m", *arguments], {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(line, cwd=ROOT, env=there, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError([*(ran.stderr + ran.stdout).strip().splitlines(), "no output"][-1])
    return ran.stdout


def training(name: str) -> None:
    """Run one test of a trainer or of adapters over ranks."""
    said = command("pytest", "-q", "-p", "no:cacheprovider", "--tier", "sweep", TRAINING[name])
    assert "1 passed" in said, "the test was skipped"


def held(name: str) -> list[str]:
    """Return the model types of a policy that the installed transformers has and that the policy's range includes."""
    policy, here = own_policies()[name], transformers.__version__
    ours = set(policy.model_types) & set(CONFIG_MAPPING) - CANNOT_BUILD
    return [model_type for model_type in sorted(ours) if here in SpecifierSet(policy.range_of(model_type))]


def rehearse(name: str) -> None:
    """Plan and rehearse the main head of each model type of a policy."""
    for model_type in held(name):
        for case in _main(model_type)[:1]:
            model = build(case, 6, 3)
            check_plan(model, "", make_plan(model, find_policy(model), 2))


def arguments(_: str) -> None:
    """Compare the arguments of all forwards with the names that autopar knows, of caches above all."""
    taken: dict[str, set[str]] = {}
    ours = {*CONFIG_MAPPING} & {*supported_model_types()}
    for file in {kind.__module__ for name in ours for kind in heads_of(name).values()}:
        for module in vars(sys.modules[file]).values():
            if inspect.isclass(module) and issubclass(module, torch.nn.Module) and module.__module__ == file:
                for each in inspect.signature(inspect.unwrap(module.forward)).parameters.values():
                    taken.setdefault(each.name, set()).add(f"{each.annotation}")
    caches = {name for name, kinds in taken.items() if any(re.search(r"\b(Dynamic|Static)?Cache\b", x) for x in kinds)}
    apart = {f"{side}_{name}" for side in ("encoder", "decoder") for name in ("cache", "past_key_values")}
    assert caches - apart <= set(CACHES), f"autopar.compat.transformers.CACHES lacks {caches - apart - set(CACHES)}"
    assert caches and (sequence_parallel._OF_MODELS | stages._USUAL) - set(CACHES) - GONE <= set(taken)


def without_policy() -> set[str]:
    """Return the model types of the installed transformers that no policy lists."""
    return set(CONFIG_MAPPING) - set(supported_model_types())


def stop(*_: object) -> None:
    raise TimeoutError("it takes too long")


def outcome(model_type: str) -> str:
    """Return what ``derive`` makes of the largest head of a model type: derived, refused or fails."""
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 20, 1)  # seconds
    try:
        heads, usual = heads_of(model_type), ("ForConditionalGeneration", "ForCausalLM", "Model")
        head = max(heads, key=lambda name: [name.endswith(end) for end in usual])
        with torch.device("meta"):
            model = heads[head](small_config(CONFIG_MAPPING[model_type]()))
        derive(model)
    except AutoparError as error:
        return f"refused: {described(error)}"
    except Exception as error:  # no refusal: a config without defaults, or a mistake
        return f"fails: {described(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "derived"


def run(every: bool) -> dict[str, Any]:
    """Run all checks in this environment: one policy of each structure, or every one that the version has."""
    policies = [name for name in own_policies() if held(name)]
    if not every:
        structures = one_of_each_structure([model_type for name in policies for model_type in held(name)])
        policies = [name for name in structures if name in policies]
    families = FAMILIES + OTHERS * every
    lost = dict(line.partition("\n")[0].split(": ", 1) for line in failures())
    return {
        "date": f"{datetime.date.today()}",
        "python": sys.version.split()[0],
        "build of torch": f"CUDA {torch.version.cuda}, on CPUs" if torch.version.cuda else "CPU",
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "checks": {
            "private names": {"passed": len(PROBES) - len(lost), "failed": lost},
            "arguments of forwards": tried(["all model types"], arguments),
            "policies": tried(policies, rehearse),
            "verify": tried(families, lambda name: command("autopar", "verify", name, "--tp", "2")),
            "training": tried(TRAINING, training),
        },
        "without_policy": sorted(without_policy()),
    }


def page(recorded: dict[str, Any]) -> str:
    """Return ``docs/compatibility.md`` with the recorded versions and checks, and new model types without a policy."""
    ends = [recorded[end] for end in ENDS]
    rows = [("", *ENDS), ("---", "---", "---")]
    rows += [(title, *(each[title.lower()] for each in ends)) for title in ("date", "Python", "build of torch")]
    rows += [(title, *(each["versions"][name] for each in ends)) for name, title in LIBRARIES.items()]
    for name in ends[0]["checks"]:
        counts = [(each["checks"][name]["passed"], len(each["checks"][name]["failed"])) for each in ends]
        rows.append((name, *(f"{passed} of {passed + failed}" for passed, failed in counts)))
    failed = [[item for check in each["checks"].values() for item in check["failed"].items()] for each in ends]
    rows.append(("failures", *("<br>".join(map(": ".join, items)) or "none" for items in failed)))
    new = [(name, said) for name, said in recorded["newest"]["new"].items() if name not in supported_model_types()]
    rows += [(), ("new model type", "result"), ("---", "---"), *new]
    text = "".join(f"| {' | '.join(row)} |\n" if row else "\n" for row in rows)
    marked = r"(?<=<!-- versions -->\n).*?(?=<!-- /versions -->)"
    return re.sub(marked, lambda _: text, PAGE.read_text(), flags=re.DOTALL)


def main() -> None:
    """Print the requirements of an end, or run it and write what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--end", choices=ENDS)
    which.add_argument("--without-policy", action="store_true", help="print the model types that no policy lists")
    parser.add_argument("--requirements", action="store_true", help="print what to install, and exit")
    parser.add_argument("--every", action="store_true", help="run all policies and more families")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    if given.without_policy:
        print("\n".join(f"{name}: {' '.join(heads_of(name))}" for name in sorted(without_policy())))
        return
    if given.requirements:
        print(*requirements(admitted(), given.end))
        return
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found = run(given.every)
    recorded = json.loads(RECORDED.read_text()) | {given.end: found}
    for name, each in found["checks"].items():
        print(f"{name}: {each['passed']} passed, {len(each['failed'])} failed")
    if given.end == "newest":
        known = recorded["oldest"]["without_policy"]
        found["new"] = {name: outcome(name) for name in found.pop("without_policy") if name not in known}
    if not given.check:
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
        PAGE.write_text(page(recorded))
    sys.exit(any(each["failed"] for each in found["checks"].values()))


if __name__ == "__main__":
    main()
