"""The sections and keys of the configuration as data, their checks, and the section ``pipeline``."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import clip, nearest

_OF_ZERO = ("enable", "cpu_offload", "optimizer_offload", "reduce_scatter")
SECTIONS: dict[str, dict[str, type]] = {
    "model_parallelism": {
        "enable": bool,
        **dict.fromkeys((f"{axis}_parallel_size" for axis in ("tensor", "pipeline", "expert", "context")), int),
        "sequence_parallel": bool,
        **dict.fromkeys(("expert_dispatch", "context_parallel_method", "cpu_transport", "reduce_dtype"), str),
    },
    "activation_checkpointing": {"enable": bool, "cpu_checkpointing": bool, "save": list, "every": int},
    "compile": {"enable": bool, "backend": str, "mode": str, "fullgraph": bool},
    "zero": {"stage": int, "shard_size": int, **dict.fromkeys(_OF_ZERO, bool)},
    "optimizer": {"full_matrix": str, "split_fused": bool, "across_parameters": bool},
    "precision": {
        "enable": bool,
        "dtype": str,
        **dict.fromkeys(("initial_scale", "min_scale", "max_scale", "growth_factor", "backoff_factor"), float),
        **dict.fromkeys(("growth_interval", "hysteresis"), int),
    },
    "consistency_check": {"enable": bool, "inputs": str, "parameters": str},
    "loss": {"chunk": int, "gather_logits": str, "read_timeout": float, "router_aux": str},
    "pipeline": {
        **dict.fromkeys(("schedule", "loss_reduction"), str),
        **dict.fromkeys(("microbatch_size", "num_microbatches", "timeout", "chunks"), int),
        "layers_per_stage": list,
    },
}
# Short names of the sizes: {"tp": 2} is {"model_parallelism": {"tensor_parallel_size": 2}}.
SHORT = {f"{axis[0]}p": f"{axis}_parallel_size" for axis in ("tensor", "pipeline", "context", "expert")}
# Keys at the top level, outside of sections.
PLAIN: dict[str, type] = {"gradient_clipping": float, "policy": str, **dict.fromkeys(SHORT, int)}
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev")  # weight gradients are computed after input gradients
SCHEDULES = ("1f1b", "gpipe", "interleaved", *SPLIT_BACKWARD)
_FOLDED = ("zbv", "dualpipev")
_CHOICES: dict[str, tuple[Any, ...]] = {  # by field of ParallelConfig and PipelineConfig
    "schedule": SCHEDULES,
    "loss_reduction": ("tokens", "microbatch"),
    "cpu_transport": ("auto", "gloo", "shm"),
    "reduce_dtype": ("same", "fp32"),
    "context_parallel_method": ("auto", "ulysses", "gather"),
    "expert_dispatch": ("all_to_all", "all_reduce"),
    "zero_stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer_full_matrix": ("owned", "duplicated", "sharded"),
    "compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),  # torch.compile's
    "loss_gather_logits": ("on_read", "always"),
    "loss_router_aux": ("global", "replica"),
}
_FROM_ZERO = ("loss_chunk", "zero_shard_size")
_FORMS = {  # pattern, and its description
    "consistency_inputs": (r"auto|first|always|every [1-9]\d*", "auto, first, always or 'every N' (every 10)"),
    "consistency_parameters": (r"auto|every [1-9]\d*", "auto or 'every N' (every 100)"),
}
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a word", list: "a list"}
FULLY_SHARDED = (2, 3)  # ZeRO stages that use torch's FSDP2
SAVED = ("attention", "collectives", "matmuls")  # parts of a forward that recomputed blocks may keep

# (section, key) -> field of ParallelConfig, if the field has another name than the key.
FIELDS = {
    ("precision", "dtype"): "precision",
    ("consistency_check", "enable"): "consistency_check",
    ("consistency_check", "inputs"): "consistency_inputs",
    ("consistency_check", "parameters"): "consistency_parameters",
    ("activation_checkpointing", "enable"): "activation_checkpointing",
    ("activation_checkpointing", "save"): "checkpoint_saves",
    ("activation_checkpointing", "every"): "checkpoint_every",
    ("compile", "enable"): "compile",
}
for _section in ("zero", "optimizer", "compile", "loss"):
    FIELDS |= {(_section, key): f"{_section}_{key}" for key in SECTIONS[_section] if key != "enable"}


def check_section(
    section: str, content: Mapping[Any, Any], known: Mapping[str, type], problems: list[str]
) -> dict[str, Any]:
    """Return the valid values of a section; append problems to ``problems``."""
    checked: dict[str, Any] = {}
    for key, value in content.items():
        if key in SHORT and key not in known:
            problems.append(f"'{key}' belongs outside of the section '{section}': write {{{key}: {clip(str(value))}}}")
        elif key not in known:
            problems.append(
                explain(key, value)
                or f"unknown key '{clip(str(key))}' in section '{section}'.{nearest(str(key), known)} "
                f"Known: {', '.join(known)}"
            )
        elif value is None:
            continue
        elif problem := check_value(f"{section}.{key}", value, known[key]):
            problems.append(problem)
        else:
            checked[key] = value
    return checked


def check_value(name: str, value: Any, kind: type) -> str | None:
    """Return the problem of a value, or None."""
    if name == "policy" and type(value) is not str:
        return f"policy must be 'derive' or the path of a policy, not {describe(value)}"
    if type(value) is not kind and not (kind is float and type(value) is int):  # a bool is not an int here
        return f"{name} must be {_NAMES.get(kind, kind.__name__)}, not {describe(value)}"
    section, _, key = name.rpartition(".")
    field = FIELDS.get((section, key), key)
    if field in _CHOICES:
        *most, last = _CHOICES[field]
        choices = f"{', '.join(map(str, most))} or {last}"
        return None if value in _CHOICES[field] else f"{name} must be {choices}, not {clip(str(value))}"
    number: Any = value
    if field in _FORMS and not re.fullmatch(_FORMS[field][0], str(value)):
        return f"{name} must be {_FORMS[field][1]}, not {clip(str(value))}"
    if kind is float and not (0 < number < math.inf or (name in PLAIN and number == 0)):
        return f"{name} must be above 0, not {value}"
    least = 0 if field in _FROM_ZERO else 1
    return f"{name} must be at least {least}, not {value}" if kind is int and number < least else None


def explain_unknown(section: object, content: object) -> str:
    """Return the error of an unknown section, with the closest key."""
    for name, keys in SECTIONS.items():
        if section in keys and section != "enable" and explain(section, content) is None:
            return f"'{section}' belongs into the section '{name}': {{{name}: {{{section}: {clip(str(content))}}}}}"
    known = [*SECTIONS, *PLAIN]
    return (
        explain(section, content)
        or f"unknown section '{clip(str(section))}'.{nearest(str(section), known)} Known: {', '.join(known)}"
    )


def describe(value: object) -> str:
    """Return a value and its type, for messages."""
    return f"{clip(repr(value))} ({type(value).__name__})"


@dataclass(frozen=True)
class PipelineConfig:
    """The section ``pipeline`` of ``docs/configuration.md``.

    Without ``microbatch_size`` and ``num_microbatches``, a micro-batch is one sample, or the batch if there is one
    stage. With fewer than two micro-batches per rank, ``dualpipev`` uses the order of ``zbv``.
    """

    schedule: str = "1f1b"
    microbatch_size: int | None = None
    num_microbatches: int | None = None
    layers_per_stage: tuple[int, ...] = ()
    loss_reduction: str = "tokens"
    timeout: int = 600
    chunks: int = 1

    @property
    def folded(self) -> bool:
        """Whether the second half of the stages runs back over the ranks."""
        return self.schedule in _FOLDED

    def given(self) -> dict[str, Any]:
        """Return the keys of the section that are not the defaults."""
        fields = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        found = {name: value for name, value, usual in fields if value != usual or type(value) is not type(usual)}
        if isinstance(self.layers_per_stage, tuple) and self.layers_per_stage:
            found["layers_per_stage"] = list(self.layers_per_stage)
        return found

    @classmethod
    def of(cls, section: Mapping[str, Any], pp: int, problems: list[str]) -> PipelineConfig:
        """Create from the keys of the section; append problems to ``problems``."""
        layers = tuple(section.get("layers_per_stage", ()))
        found: dict[str, Any] = {"schedule": "1f1b", **section, "layers_per_stage": layers}
        if any(problem.startswith("pipeline.schedule ") for problem in problems):
            found.pop("chunks", None)  # its check needs a valid schedule
        found.setdefault("chunks", 2 if found["schedule"] in ("interleaved", *_FOLDED) else 1)
        if pp > 1 and not found.keys() & {"microbatch_size", "num_microbatches"}:
            found["microbatch_size"] = 1
        made = cls(**found)
        problems += made._problems(pp)
        return made

    def _problems(self, pp: int) -> Iterator[str]:
        """Yield problems of combinations of valid values with ``pp`` ranks."""
        schedule, chunks, count = self.schedule, self.chunks, self.num_microbatches
        unfit = f"pipeline.chunks={chunks} does not fit schedule {schedule}"
        if self.folded and chunks != 2:
            yield f"{unfit}, which has 2 stages on each rank"
        elif not self.folded and (schedule == "interleaved") != (chunks > 1):
            yield f"{unfit}: more than 1 is for interleaved"
        if any(type(each) is not int or each < 1 for each in self.layers_per_stage):
            blocks = clip(str(list(self.layers_per_stage)))
            yield f"pipeline.layers_per_stage={blocks} must list numbers of blocks of at least 1"
        if count is None:
            return
        given = f"pipeline.num_microbatches={count}"
        if self.microbatch_size is not None:
            both = f"pipeline.microbatch_size={self.microbatch_size} and {given} are both given"
            yield f"{both}: each follows from the other and the batch. Leave one out"
        if count < pp:
            less = f"{given} is less than pipeline_parallel_size={pp}"
            yield f"{less}: some stages would always be idle; use at least {pp}"
        elif schedule == "dualpipev" and 1 < pp <= count < 2 * pp:
            less = f"{given} is less than twice pipeline_parallel_size={pp}"
            yield f"{less}, which schedule dualpipev needs; use at least {2 * pp}, or schedule zbv"


# -- keys of other libraries -------------------------------------------------------------------------------------------


@functools.cache
def foreign_keys() -> dict[str, dict[str, str]]:
    """Return library -> key -> advice; ``anyone``: keys that no library has."""
    libraries = ("ColossalAI", "Megatron-LM", "DeepSpeed", "OSLO", "accelerate", "anyone")
    advice: dict[str, dict[str, str]] = {library: {} for library in libraries}
    for row in yaml.safe_load(Path(__file__).with_name("foreign_keys.yaml").read_text("utf-8")):
        for library in row.keys() - {"say"}:
            advice[library] |= dict.fromkeys(row[library], row["say"])
    return advice


def explain(key: object, value: Any = None) -> str | None:
    """Return the key to use instead of another library's key, with the user's value; None for an unknown key."""
    name = clip(str(key)).lstrip("-").replace("-", "_").lower()
    said = {library: advice[name] for library, advice in foreign_keys().items() if name in advice}
    if not said:
        return None
    shown = clip(str(value)) if type(value) in (bool, int, float, str) else "..."
    text = next(iter(said.values())).replace("VALUE", shown)
    owners = ", ".join(f"{library}'s" for library in said if library != "anyone")
    return f"'{key}' is {owners} name: {text}" if owners else f"there is no key '{key}': {text}"
