"""ParallelConfig: what the user asks for, from a dict, a JSON or a YAML file. All errors at once."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.config.foreign_keys import explain
from autopar.config.pipeline import PipelineConfig
from autopar.errors import ConfigError, clip, nearest
from autopar.policy.yaml_reader import plain, read_text, yaml_tree

__all__ = ["ParallelConfig"]

_SECTIONS: dict[str, dict[str, type]] = {
    "model_parallelism": {
        "enable": bool,
        "tensor_parallel_size": int,
        "pipeline_parallel_size": int,
        "expert_parallel_size": int,
    },
    "activation_checkpointing": {"enable": bool, "cpu_checkpointing": bool},
    "zero": {"enable": bool, "stage": int, "cpu_offload": bool},
    "precision": {
        "enable": bool,
        "dtype": str,
        "initial_scale": float,
        "min_scale": float,
        "max_scale": float,
        "growth_interval": int,
        "growth_factor": float,
        "backoff_factor": float,
        "hysteresis": int,
    },
    "consistency_check": {"enable": bool, "inputs": str},
    "pipeline": {
        "schedule": str,
        "microbatch_size": int,
        "num_microbatches": int,
        "layers_per_stage": list,
        "loss_reduction": str,
        "timeout": int,
        "chunks": int,
    },
}
_NUMBERS = ("gradient_clipping",)  # plain numbers at the top level
_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero.stage": (0, 1, 3),
    "zero_stage": (0, 1, 3),
    "precision.dtype": ("fp32", "bf16", "fp16"),
    "precision": ("fp32", "bf16", "fp16"),
}


_INPUTS = re.compile(r"auto|first|always|every [1-9]\d*")
_STAGE_2 = ": 1 shards what the optimizer keeps, 3 weights and gradients too"
# The key that a section's name alone stands for, as other libraries write it: precision: fp16, pipeline: 2
_CHIEF = {"precision": "precision.dtype", "zero": "zero.stage", "pipeline": "model_parallelism.pipeline_parallel_size"}
_SHOWN = 8  # problems in one message

_NO_PIPELINE = PipelineConfig()


@dataclass(frozen=True)
class ParallelConfig:
    """Resolved configuration.

    Attributes:
        tensor_parallel_size: ranks that share the layers of one model replica.
        pipeline_parallel_size: stages that share the blocks of one model replica.
        expert_parallel_size: 1, or the tensor-parallel size: then its ranks hold whole experts of a mixture, and tokens
            travel to them, instead of a part of each expert.
        activation_checkpointing: recompute the blocks' activations in the backward pass.
        consistency_check: compare what the ranks of a replica must have alike when a forward begins, and gradients and
            weights of the replicas when an optimizer steps.
        consistency_inputs: how often contents of inputs, random states and weights are compared: ``first``,
            ``every N`` forwards, ``always``, or ``auto``: always on the CPU, every 10 on GPUs. Shapes are compared
            on every forward, but for ``first``.
        cpu_checkpointing: keep the inputs of the recomputed blocks in the CPU's memory.
        zero_stage: 0; 1: the optimizer's state is shared out over data parallel; 3: weights and gradients too (FSDP2).
        zero_cpu_offload: with stage 3, keep the shares in the CPU's memory.
        gradient_clipping: largest norm of all gradients; 0 leaves them as they are.
        precision: ``fp32``, ``bf16`` or ``fp16``: what the model computes in; the optimizer works on fp32 weights.
        initial_scale, min_scale, max_scale: of the loss, with fp16.
        growth_interval: steps without an overflow after which the scale grows by ``growth_factor``.
        hysteresis: overflows after which it is multiplied by ``backoff_factor``.
        pipeline: how ``execute_pipeline`` runs.

    The form a user writes has sections; a section that is present is on unless it says ``enable: false``. A key or a
    section that is ``null`` is as if it were not there::

        model_parallelism:
          enable: true
          tensor_parallel_size: 2
        activation_checkpointing:
          enable: true
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    activation_checkpointing: bool = False
    consistency_check: bool = True
    consistency_inputs: str = "auto"
    cpu_checkpointing: bool = False
    zero_stage: int = 0
    zero_cpu_offload: bool = False
    gradient_clipping: float = 0.0
    precision: str = "fp32"
    initial_scale: float = 65536.0
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    growth_interval: int = 1000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 2
    pipeline: PipelineConfig = _NO_PIPELINE

    def __post_init__(self) -> None:
        problems: list[str] = []
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None:
                object.__setattr__(self, field.name, field.default)
            problem = _problem(field.name, getattr(self, field.name), type(field.default))
            problems += [problem] if problem else []
        if not problems:
            given = _check_section("pipeline", self.pipeline.given(), _SECTIONS["pipeline"], problems)
            object.__setattr__(self, "pipeline", PipelineConfig.of(given, self.pipeline_parallel_size, problems))
        _raise(problems or _contradictions(vars(self)))

    @classmethod
    def parse(
        cls, source: Mapping[str, Any] | str | Path | ParallelConfig | None, world_size: int | None = None
    ) -> ParallelConfig:
        """Read a dict, the path of a ``.json`` / ``.yaml`` / ``.yml`` file, or a ready ``ParallelConfig``.

        Args:
            world_size: number of processes that ``initialize`` has to share out; None leaves that to later.

        Raises:
            ConfigError: lists every unknown key, wrong type and impossible size that was found.
        """
        if isinstance(source, ParallelConfig) or source is None:
            config = source or cls()
            tp, pp, ep = config.tensor_parallel_size, config.pipeline_parallel_size, config.expert_parallel_size
            _raise(_unfit(tp, pp, ep, world_size))
            return config
        loaded = _read(Path(source)) if isinstance(source, (str, Path)) else source
        if not isinstance(loaded, Mapping):
            raise ConfigError(f"the config must be a dict, a path or a ParallelConfig, not {_show(loaded)}")
        problems: list[str] = []
        values: dict[str, dict[str, Any]] = {}
        numbers: dict[str, Any] = {}
        for section, content in loaded.items():
            known = _SECTIONS.get(section) if isinstance(section, str) else None
            if content is None and (known or section in _NUMBERS):
                continue
            if section in _NUMBERS:
                problem = _problem(section, content, float)
                problems += [problem] if problem else []
                numbers[section] = content
            elif known is None:
                problems.append(_unknown_section(section, content))
            elif not isinstance(content, Mapping):
                problems.append(
                    f"section '{section}' must hold keys, not {_show(content)}{_as_section(section, content)}"
                )
            else:
                values[section] = _check_section(section, content, known, problems)
        sizes = values.get("model_parallelism", {})
        if not sizes.get("enable", True):
            sizes = {}
        tp, pp = sizes.get("tensor_parallel_size", 1), sizes.get("pipeline_parallel_size", 1)
        ep = sizes.get("expert_parallel_size", 1)
        training = {**numbers, **_training(values)}
        recompute = _is_on(values, "activation_checkpointing", default=False)
        if not problems:
            asked = {"pipeline_parallel_size": pp, "activation_checkpointing": recompute}
            problems = _contradictions({**_defaults(), **training, **asked})
        pipeline = PipelineConfig.of(values.get("pipeline", {}), pp, problems)
        _raise(problems + _unfit(tp, pp, ep, world_size))
        return cls(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            expert_parallel_size=ep,
            activation_checkpointing=recompute,
            consistency_check=_is_on(values, "consistency_check", default=True),
            consistency_inputs=values.get("consistency_check", {}).get("inputs", "auto"),
            **training,
            pipeline=pipeline,
        )

    def data_parallel_size(self, world_size: int) -> int:
        """``world_size / (tensor_parallel_size * pipeline_parallel_size)``.

        Raises:
            ConfigError: if that is not whole; says which world sizes and which tensor-parallel sizes would fit.
        """
        tp, pp = self.tensor_parallel_size, self.pipeline_parallel_size
        if world_size % (tp * pp):
            raise ConfigError(_does_not_divide(tp, pp, world_size))
        return world_size // (tp * pp)


def _training(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The fields that the sections ``zero``, ``precision`` and ``activation_checkpointing`` set."""
    on = {section: content for section, content in values.items() if content.get("enable", True)}
    renamed = {("zero", "stage"): "zero_stage", ("zero", "cpu_offload"): "zero_cpu_offload"}
    renamed["precision", "dtype"] = "precision"
    return {
        renamed.get((section, key), key): value
        for section in ("zero", "precision", "activation_checkpointing")
        for key, value in on.get(section, {}).items()
        if key != "enable"
    }


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(ParallelConfig)}


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    """Values that are right one by one and do not go together."""
    problems = []
    low, first, high = values["min_scale"], values["initial_scale"], values["max_scale"]
    if not low <= first <= high:
        problems.append(f"precision.initial_scale={first:g} must lie between min_scale={low:g} and max_scale={high:g}")
    if values["growth_factor"] <= 1:
        problems.append(f"precision.growth_factor must be above 1, not {values['growth_factor']:g}")
    if values["backoff_factor"] >= 1:
        problems.append(f"precision.backoff_factor must be below 1, not {values['backoff_factor']:g}")
    if values["zero_cpu_offload"] and values["zero_stage"] != 3:
        problems.append(f"zero.cpu_offload needs zero.stage 3, not {values['zero_stage']}")
    if values["zero_stage"] == 3 and values["pipeline_parallel_size"] > 1:
        problems.append(
            f"zero.stage=3 does not go with pipeline_parallel_size={values['pipeline_parallel_size']}: weights would "
            "be collected for each micro-batch. Use zero.stage 1."
        )
    if values["cpu_checkpointing"] and not values["activation_checkpointing"]:
        problems.append("cpu_checkpointing=True needs activation_checkpointing=True")
    return problems


def _unfit(tp: int, pp: int, ep: int, world_size: int | None) -> list[str]:
    """What keeps ``initialize`` from these sizes in a world of that size; nothing if the world is not known."""
    problems = []
    if ep not in (1, tp):
        problems.append(
            f"expert_parallel_size={ep} must be 1 or tensor_parallel_size={tp}: whole experts are shared out over the "
            "tensor-parallel ranks"
        )
    if world_size is None:
        return problems
    return problems + ([_does_not_divide(tp, pp, world_size)] if world_size % (tp * pp) else [])


def _does_not_divide(tp: int, pp: int, world_size: int) -> str:
    fitting = [size for size in range(1, world_size + 1) if world_size % (size * pp) == 0]
    return (
        f"tensor_parallel_size={tp} x pipeline_parallel_size={pp} = {tp * pp} does not divide "
        f"the world of {world_size} processes.\n"
        f"  {world_size} / {tp * pp} must be whole: it is the data-parallel size.\n"
        + (
            f"  With {world_size} processes tensor_parallel_size can be {', '.join(map(str, fitting))}"
            if fitting
            else f"  With {world_size} processes no tensor_parallel_size fits pipeline_parallel_size={pp}"
        )
        + f"; or start a multiple of {tp * pp} processes (torchrun --nproc-per-node {tp * pp})."
    )


def _is_on(values: Mapping[str, Mapping[str, Any]], section: str, *, default: bool) -> bool:
    return bool(values[section].get("enable", True)) if section in values else default


def _check_section(
    section: str, content: Mapping[Any, Any], known: Mapping[str, type], problems: list[str]
) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            problems.append(
                explain(key, value)
                or f"unknown key '{clip(str(key))}' in section '{section}'.{nearest(str(key), known)} "
                f"Known: {', '.join(known)}"
            )
        elif value is None:
            continue
        elif problem := _problem(f"{section}.{key}", value, known[key]):
            problems.append(problem)
        else:
            checked[key] = value
    return checked


def _problem(name: str, value: Any, kind: type) -> str | None:
    if type(value) is not kind and not (kind is float and type(value) is int):  # True is no int
        return f"{name} must be {_name(kind)}, not {_show(value)}"
    if name in _CHOICES:
        *most, last = _CHOICES[name]
        choices = f"{', '.join(map(str, most))} or {last}"
        hint = _STAGE_2 if value == 2 else ""
        return None if value in _CHOICES[name] else f"{name} must be {choices}, not {clip(str(value))}{hint}"
    if name in ("consistency_check.inputs", "consistency_inputs") and not _INPUTS.fullmatch(str(value)):
        return f"{name} must be auto, first, always or 'every N' (every 10), not {clip(str(value))}"
    number: Any = value
    if kind is float and not (0 < number < math.inf or (name in _NUMBERS and number == 0)):
        return f"{name} must be above 0, not {value}"
    return f"{name} must be at least 1, not {value}" if kind is int and number < 1 else None


def _unknown_section(section: object, content: object) -> str:
    for name, keys in _SECTIONS.items():
        if section in keys and section != "enable":
            return f"'{section}' belongs into the section '{name}': {{{name}: {{{section}: ...}}}}"
    known = [*_SECTIONS, *_NUMBERS]
    return (
        explain(section, content)
        or f"unknown section '{clip(str(section))}'.{nearest(str(section), known)} Known: {', '.join(known)}"
    )


def _as_section(section: str, content: object) -> str:
    """What to write for a section that was given one value."""
    if isinstance(content, bool) and "enable" in _SECTIONS[section]:
        return f": write {section}: {{enable: {str(content).lower()}}}"
    home, _, key = _CHIEF.get(section, "").partition(".")
    fits = key and _problem(f"{home}.{key}", content, _SECTIONS[home][key]) is None
    return f": write {home}: {{{key}: {content}}}" if fits else ""


def _read(path: Path) -> object:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"config file '{path}' must end in .json, .yaml or .yml")

    def fail(problem: str, line: int | str | None) -> ConfigError:
        return ConfigError(f"config file '{path}'{f', line {line}:' if line else ''} {problem}")

    text = read_text(path, fail)
    if path.suffix != ".json":
        return plain(yaml_tree(text, str(path), fail))
    try:
        return json.loads(text, object_pairs_hook=_each_key_once)
    except ValueError as error:
        problem, line = getattr(error, "msg", error), getattr(error, "lineno", 1)
        raise fail(f"cannot be parsed as JSON: {problem}", line) from error
    except (KeyError, RecursionError) as error:
        problem = (
            f"has the key '{error.args[0]}' twice in one section"
            if isinstance(error, KeyError)
            else "is nested too deeply"
        )
        raise fail(problem, None) from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise KeyError(key)
    return dict(pairs)


def _name(kind: type) -> str:
    return {bool: "true or false", int: "an integer", float: "a number", str: "a word", list: "a list"}.get(
        kind, kind.__name__
    )


def _show(value: object) -> str:
    return f"{clip(repr(value))} ({type(value).__name__})"


def _raise(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        shown = problems[: _SHOWN + 1 if len(problems) == _SHOWN + 1 else _SHOWN]
        lines = [f"  {i}. {problem}" for i, problem in enumerate(shown, 1)]
        rest = problems[len(shown) :]
        lines += [f"  ... and {len(rest)} more: the error's .problems lists all"] if rest else []
        raise ConfigError("\n".join([f"the config has {len(problems)} problems:", *lines]), problems)
