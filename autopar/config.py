"""ParallelConfig: what the user asks for, from a dict, a JSON or a YAML file. All errors at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import ConfigError, nearest

__all__ = ["ParallelConfig", "PipelineConfig"]

_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
_REDUCTIONS = ("tokens", "microbatch")

_SECTIONS: dict[str, dict[str, type]] = {
    "model_parallelism": {
        "enable": bool,
        "tensor_parallel_size": int,
        "pipeline_parallel_size": int,
        "expert_parallel_size": int,
    },
    "activation_checkpointing": {"enable": bool},
    "consistency_check": {"enable": bool},
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


@dataclass(frozen=True)
class PipelineConfig:
    """How ``execute_pipeline`` runs: the section ``pipeline``.

    Attributes:
        schedule: ``1f1b``, ``gpipe``, ``interleaved``, ``zero-bubble`` or ``zbv``.
        microbatch_size: samples of a micro-batch. None with ``num_microbatches``, and at one stage by default (the
            whole batch); at more stages the default is 1.
        num_microbatches: or the number of micro-batches.
        layers_per_stage: blocks of each stage, in order; empty: shared out by parameters.
        loss_reduction: ``tokens``: the loss of the whole batch, whatever the padding; ``microbatch``: the mean of the
            micro-batches' means.
        timeout: seconds that a stage waits for another one.
        chunks: stages on each rank; above 1 for ``interleaved``, 2 for ``zbv``.
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
        return self.schedule == "zbv"

    @classmethod
    def of(cls, section: Mapping[str, Any], pp: int, problems: list[str]) -> PipelineConfig:
        """From the keys of the section; what is wrong with them is added to ``problems``."""
        found = dict(section)
        schedule = found.setdefault("schedule", "1f1b")
        chunks = found.setdefault("chunks", 2 if schedule in ("interleaved", "zbv") else 1)
        if schedule not in _SCHEDULES:
            problems.append(
                f"pipeline.schedule={schedule!r} is unknown.{nearest(schedule, _SCHEDULES)} Known: "
                f"{', '.join(_SCHEDULES)}"
            )
        elif (schedule == "interleaved") != (chunks > 1) and schedule != "zbv":
            problems.append(
                f"pipeline.chunks={chunks} does not fit schedule {schedule}: more than 1 is for interleaved"
            )
        elif schedule == "zbv" and chunks != 2:
            problems.append(f"pipeline.chunks={chunks} does not fit schedule zbv, which has 2 stages on each rank")
        reduction = found.get("loss_reduction", "tokens")
        if reduction not in _REDUCTIONS:
            problems.append(f"pipeline.loss_reduction={reduction!r} is unknown. Known: {', '.join(_REDUCTIONS)}")
        layers = found["layers_per_stage"] = tuple(found.get("layers_per_stage", ()))
        if any(type(count) is not int or count < 1 for count in layers):
            problems.append(f"pipeline.layers_per_stage={list(layers)} must list numbers of blocks of at least 1")
        size, count = found.get("microbatch_size"), found.get("num_microbatches")
        if size is not None and count is not None:
            problems.append(
                f"pipeline.microbatch_size={size} and pipeline.num_microbatches={count} are both given: one follows "
                "from the other and the batch, so give one"
            )
        elif size is None and count is None and pp > 1:
            found["microbatch_size"] = 1
        if count is not None and count < pp:
            problems.append(
                f"pipeline.num_microbatches={count} is less than pipeline_parallel_size={pp}: some stages would never "
                f"work at the same time; give at least {pp}"
            )
        return cls(**found)


@dataclass(frozen=True)
class ParallelConfig:
    """Resolved configuration.

    Attributes:
        tensor_parallel_size: ranks that share the layers of one model replica.
        pipeline_parallel_size: stages that share the blocks of one model replica.
        expert_parallel_size: 1, or the tensor-parallel size: then its ranks hold whole experts of a mixture, and tokens
            travel to them, instead of a part of each expert.
        activation_checkpointing: recompute the blocks' activations in the backward pass.
        consistency_check: compare inputs and random state over the tensor-parallel ranks on the first forward.
        pipeline: how ``execute_pipeline`` runs.

    The form a user writes has sections; a section that is present is on unless it says ``enable: false``::

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
    pipeline: PipelineConfig = PipelineConfig()

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.pipeline == PipelineConfig() and self.pipeline_parallel_size > 1:
            object.__setattr__(self, "pipeline", PipelineConfig.of({}, self.pipeline_parallel_size, problems))
        for field in dataclasses.fields(self):
            problem = _problem(field.name, getattr(self, field.name), type(field.default))
            problems += [problem] if problem else []
        _raise(problems)

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
        for section, content in loaded.items():
            known = _SECTIONS.get(section) if isinstance(section, str) else None
            if known is None:
                problems.append(_unknown_section(section))
            elif not isinstance(content, Mapping):
                problems.append(f"section '{section}' must hold keys, not {_show(content)}")
            else:
                values[section] = _check_section(section, content, known, problems)
        sizes = values.get("model_parallelism", {})
        if not sizes.get("enable", True):
            sizes = {}
        tp, pp = sizes.get("tensor_parallel_size", 1), sizes.get("pipeline_parallel_size", 1)
        ep = sizes.get("expert_parallel_size", 1)
        pipeline = PipelineConfig.of(values.get("pipeline", {}), pp, problems)
        _raise(problems + _unfit(tp, pp, ep, world_size))
        return cls(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            expert_parallel_size=ep,
            activation_checkpointing=_is_on(values, "activation_checkpointing", default=False),
            consistency_check=_is_on(values, "consistency_check", default=True),
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
                f"unknown key '{key}' in section '{section}'.{nearest(str(key), known)} Known: {', '.join(known)}"
            )
        elif problem := _problem(f"{section}.{key}", value, known[key]):
            problems.append(problem)
        else:
            checked[key] = value
    return checked


def _problem(name: str, value: Any, kind: type) -> str | None:
    if type(value) is not kind:  # True is no int
        return f"{name} must be {_name(kind)}, not {_show(value)}"
    return f"{name} must be at least 1, not {value}" if isinstance(value, int) and kind is int and value < 1 else None


def _unknown_section(section: object) -> str:
    for name, keys in _SECTIONS.items():
        if section in keys and section != "enable":
            return f"'{section}' belongs into the section '{name}': {{{name}: {{{section}: ...}}}}"
    return f"unknown section '{section}'.{nearest(str(section), _SECTIONS)} Known: {', '.join(_SECTIONS)}"


def _read(path: Path) -> object:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"config file '{path}' must end in .json, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file '{path}' cannot be read: {error}") from error
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file '{path}' cannot be parsed: {error}") from error


def _name(kind: type) -> str:
    return {bool: "true or false", int: "an integer", str: "a text", list: "a list"}.get(kind, kind.__name__)


def _show(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def _raise(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, 1))
        raise ConfigError(f"the config has {len(problems)} problems:\n{lines}", problems)
