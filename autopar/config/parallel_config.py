"""Read the user's configuration from a dict, a JSON or a YAML file, and report all its problems in one error."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autopar.config.sections import (
    FIELDS,
    FULLY_SHARDED,
    PLAIN,
    SAVED,
    SECTIONS,
    SHORT,
    SPLIT_BACKWARD,
    PipelineConfig,
    check_section,
    check_value,
    describe,
    explain_unknown,
)
from autopar.errors import ConfigError, clip, nearest
from autopar.policy.yaml_reader import plain, read_text, yaml_tree

_SHOWN = 8  # problems in one message
_NO_PIPELINE = PipelineConfig()


@dataclass(frozen=True)
class ParallelConfig:
    """The resolved configuration. ``docs/configuration.md`` describes every key.

    A field has the name of its key. For keys of ``zero``, ``optimizer``, ``compile``, ``loss`` and
    ``consistency_check`` the name of the section comes first (``zero_stage``), for keys of ``activation_checkpointing``
    ``checkpoint``. The field ``precision`` is the section's dtype; the fields ``compile``, ``consistency_check`` and
    ``activation_checkpointing`` are the ``enable`` of their sections.

    The user's form has sections. A section that is present is enabled unless it contains ``enable: false``. A key or
    section that is ``null`` is ignored::

        model_parallelism:
          enable: true
          tensor_parallel_size: 2
        activation_checkpointing:
          enable: true

    At the top level ``tp``, ``pp``, ``cp`` and ``ep`` are short for the four sizes: ``{"tp": 2, "pp": 2}``.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_dispatch: str = "all_to_all"
    context_parallel_size: int = 1
    context_parallel_method: str = "auto"
    sequence_parallel: bool = False
    cpu_transport: str = "auto"
    reduce_dtype: str = "same"
    activation_checkpointing: bool = False
    compile: bool = False
    compile_backend: str = "inductor"
    compile_mode: str = "default"
    compile_fullgraph: bool = False
    consistency_check: bool = True
    consistency_inputs: str = "auto"
    consistency_parameters: str = "auto"
    loss_chunk: int = 0
    loss_gather_logits: str = "on_read"
    loss_read_timeout: float = 20.0
    loss_router_aux: str = "global"
    cpu_checkpointing: bool = False
    checkpoint_saves: tuple[str, ...] = ()
    checkpoint_every: int = 1
    zero_stage: int = 0
    zero_shard_size: int = 0
    zero_cpu_offload: bool = False
    zero_optimizer_offload: bool = False
    zero_reduce_scatter: bool = False
    optimizer_full_matrix: str = "owned"
    optimizer_split_fused: bool = False
    optimizer_across_parameters: bool = False
    gradient_clipping: float = 0.0
    policy: str = ""
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
            problems += filter(None, [check_value(field.name, getattr(self, field.name), type(field.default))])
        if not problems:
            given = check_section("pipeline", self.pipeline.given(), SECTIONS["pipeline"], problems)
            object.__setattr__(self, "pipeline", PipelineConfig.of(given, self.pipeline_parallel_size, problems))
        raise_problems(problems or _contradictions(vars(self)))

    @classmethod
    def parse(
        cls, source: Mapping[str, Any] | str | Path | ParallelConfig | None, world_size: int | None = None
    ) -> ParallelConfig:
        """Read a dict, the path of a ``.json`` / ``.yaml`` / ``.yml`` file, or an existing ``ParallelConfig``.

        Args:
            world_size: The number of processes; None to check the sizes later.

        Raises:
            ConfigError: A key is unknown, or a type or size is wrong. It lists all problems.
        """
        if isinstance(source, ParallelConfig) or source is None:
            config = source or cls()
            raise_problems(_unfit(vars(config), world_size))
            return config
        loaded = read_config(Path(source)) if isinstance(source, (str, Path)) else source
        if not isinstance(loaded, Mapping):
            raise ConfigError(f"the config must be a dict, a path or a ParallelConfig, not {describe(loaded)}")
        problems: list[str] = []
        values: dict[str, dict[str, Any]] = {}
        fields: dict[str, Any] = {}
        for section, content in loaded.items():
            known = SECTIONS.get(section) if isinstance(section, str) else None
            if content is None and (known or section in PLAIN):
                continue
            if section == "optimizer" and not (isinstance(content, Mapping) and SECTIONS["optimizer"].keys() & content):
                known = None  # a section of another library
            if section in PLAIN:
                problem = check_value(section, content, PLAIN[section])
                problems += [problem] if problem else []
                if not problem:
                    fields[SHORT.get(str(section), str(section))] = content
            elif known is None:
                problems.append(explain_unknown(section, content))
            elif not isinstance(content, Mapping):
                problems.append(f"section '{section}' must hold keys ({', '.join(known)}), not {describe(content)}")
            else:
                values[section] = check_section(section, content, known, problems)
        pipeline = values.pop("pipeline", {})
        sizes = values.get("model_parallelism", {})
        for axis, name in SHORT.items():
            if name in fields and name in sizes:
                given = f"which is given too: {sizes[name]}. Leave one out"
                problems.append(f"{axis}={fields[name]} is short for model_parallelism.{name}, {given}")
        fields |= _fields(values)
        every: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(cls)} | fields
        problems = problems or _contradictions(every)
        fields["pipeline"] = PipelineConfig.of(pipeline, every["pipeline_parallel_size"], problems)
        raise_problems(problems + _unfit(every, world_size))
        return cls(**fields)

    @property
    def transport(self) -> str:
        """The transport on CPUs: gloo with compile, also for a rank on which compilation fails."""
        return "gloo" if self.compile and self.cpu_transport == "auto" else self.cpu_transport

    @property
    def fully_sharded(self) -> bool:
        """Whether torch's FSDP2 shards weights, gradients and optimizer state over the replicas."""
        return self.zero_stage in FULLY_SHARDED

    @property
    def parameters_every(self) -> int:
        """The number of steps between comparisons of all weights that must be identical on ranks; 0: only samples."""
        return int(self.consistency_parameters.partition(" ")[2] or 0)

    def data_parallel_size(self, world_size: int) -> int:
        """Return ``world_size / (tensor_parallel_size * context_parallel_size * pipeline_parallel_size)``.

        Raises:
            ConfigError: It is not an integer. The error lists the world sizes and tensor-parallel sizes that fit.
        """
        tp, cp, pp = self.tensor_parallel_size, self.context_parallel_size, self.pipeline_parallel_size
        if world_size % (tp * cp * pp):
            raise ConfigError(_does_not_divide(tp, cp, pp, world_size))
        return world_size // (tp * cp * pp)


def _fields(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields that enabled sections set. A section is enabled unless it contains ``enable: false``."""
    fields = {}
    for section, given in values.items():
        content = {"enable": True, **given}
        for key, value in content.items() if content["enable"] else [("enable", False)]:
            if key != "enable" or (section, key) in FIELDS:
                fields[FIELDS.get((section, key), key)] = tuple(value) if isinstance(value, list) else value
    return fields


def read_config(path: Path) -> object:
    """Read the data of a config file. Raises ConfigError with the line if it cannot be parsed."""
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
    except KeyError as error:
        raise fail(f"has the key '{error.args[0]}' twice in one section", None) from error
    except RecursionError as error:
        raise fail("is nested too deeply", None) from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise KeyError(key)
    return dict(pairs)


def raise_problems(problems: list[str], holder: str = "the config has") -> None:
    """Raise one ConfigError with all problems, if there are any."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = [f"  {i}. {problem}" for i, problem in enumerate(problems[:_SHOWN], 1)]
        more = len(problems) - _SHOWN
        lines += [f"  ... and {more} more: the error's .problems lists all"] if more > 0 else []
        raise ConfigError("\n".join([f"{holder} {len(problems)} problems:", *lines]), problems)


# -- values that are valid, but not together or not in this world ------------------------------------------------------


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    """List the problems of combinations of valid values."""
    c = SimpleNamespace(**values)
    return [*_of_scales(c), *_of_zero(c), *_of_blocks(c)]


def _of_scales(c: Any) -> Iterator[str]:
    """Yield problems of the loss scale."""
    if not c.min_scale <= c.initial_scale <= c.max_scale:
        between = f"min_scale={c.min_scale:g} and max_scale={c.max_scale:g}"
        yield f"precision.initial_scale={c.initial_scale:g} must lie between {between}"
    if c.growth_factor <= 1:
        yield f"precision.growth_factor must be above 1, not {c.growth_factor:g}"
    if c.backoff_factor >= 1:
        yield f"precision.backoff_factor must be below 1, not {c.backoff_factor:g}"


def _of_blocks(c: Any) -> Iterator[str]:
    """Yield problems of the loss, of compiled blocks, and of recomputed blocks."""
    if c.loss_chunk and c.loss_gather_logits == "always":
        yield f"loss.chunk={c.loss_chunk} is not supported with loss.gather_logits=always: it never makes full logits"
    if c.compile_mode != "default" and c.compile_backend != "inductor":
        yield f"compile.mode={c.compile_mode} needs the backend inductor, not {c.compile_backend}"
    if c.compile and c.cpu_transport == "shm":
        yield "cpu_transport=shm is not supported with compile: graphs use the process group. Leave one out"
    if c.compile and c.context_parallel_size > 1:
        cp = f"context_parallel_size={c.context_parallel_size}"
        yield f"{cp} is not supported with compile: Python code chooses the local sequence of a block"
    if c.compile and c.sequence_parallel:
        yield "sequence_parallel is not supported with compile: compiled blocks need full sequences. Leave one out"
    if c.compile and c.checkpoint_saves:
        saves = f"activation_checkpointing.save={list(c.checkpoint_saves)}"
        yield f"{saves} is not supported with compile, whose graphs choose what they keep. Leave one out"
    if c.cpu_checkpointing and not c.activation_checkpointing:
        yield "cpu_checkpointing=True needs activation_checkpointing=True"
    if (c.checkpoint_saves or c.checkpoint_every > 1) and not c.activation_checkpointing:
        yield "checkpoint_saves and checkpoint_every need activation_checkpointing=True"
    for name in (name for name in c.checkpoint_saves if name not in SAVED):
        known = f"{nearest(str(name), SAVED)} Known: {', '.join(SAVED)}"
        yield f"activation_checkpointing.save lists {clip(repr(name))}.{known}"


def _of_zero(c: Any) -> Iterator[str]:
    """Yield problems of a stage of ZeRO."""
    stage, sharded = c.zero_stage, c.zero_stage in FULLY_SHARDED
    stages = {"shard_size": "2 or 3", "cpu_offload": "2 or 3", "optimizer_offload": "0 or 1", "reduce_scatter": "1"}
    for key, fitting in stages.items():
        if getattr(c, f"zero_{key}") and str(stage) not in fitting:
            instead = ", which has zero.cpu_offload" if key == "optimizer_offload" else ""
            yield f"zero.{key} needs zero.stage {fitting}, not {stage}{instead}"
    if stage == 3 and c.pipeline_parallel_size > 1 and c.pipeline.schedule in SPLIT_BACKWARD:
        yield (
            f"zero.stage=3 is not supported with pipeline.schedule={c.pipeline.schedule}: the weights of a block would "
            "be freed between the two halves of its backward.\n  Use zero.stage 2, which gathers weights once per "
            "step, or the schedule 1f1b."
        )
    if c.zero_shard_size and c.expert_parallel_size > c.tensor_parallel_size:
        sizes = f"expert_parallel_size={c.expert_parallel_size} above tensor_parallel_size={c.tensor_parallel_size}"
        why = "experts are sharded over the replicas already. Leave it out"
        yield f"zero.shard_size={c.zero_shard_size} is not supported with {sizes}: {why}"
    if sharded and c.optimizer_split_fused:
        why = "torch's FSDP2 shards the rows of fused matrices"
        yield f"zero.stage={stage} is not supported with optimizer.split_fused: {why}. Use zero.stage 1."


def _unfit(values: Mapping[str, Any], world_size: int | None) -> list[str]:
    """List the problems of the sizes in a world of ``world_size`` processes (None: unknown)."""
    tp, cp, pp, ep = (values[f"{kind}_parallel_size"] for kind in ("tensor", "context", "pipeline", "expert"))
    zero, problems = values["zero_shard_size"], list[str]()
    replicas: int | None = None
    if world_size is not None and world_size % (tp * cp * pp):
        problems.append(_does_not_divide(tp, cp, pp, world_size))
    elif world_size is not None:
        replicas = world_size // (tp * cp * pp)
    if ep != 1 and (ep % tp or (replicas is not None and replicas % (ep // tp))):
        problems.append(_misfit_of_experts(ep, tp, replicas))
    if zero and replicas is not None and (replicas * cp) % zero:
        fitting = ", ".join(str(each) for each in range(1, replicas * cp + 1) if replicas * cp % each == 0)
        ranks = f"{replicas} replicas" + (f" x context_parallel_size={cp}" if cp > 1 else "")
        problems.append(f"zero.shard_size={zero} must divide the {ranks}: {fitting} fit here")
    return problems


def _misfit_of_experts(ep: int, tp: int, replicas: int | None) -> str:
    """Return the error that lists fitting expert-parallel sizes; ``replicas``: None if the world is unknown."""
    rule = f"expert_parallel_size={ep} must be 1 or a multiple of tensor_parallel_size={tp}"
    if replicas is None:
        return f"{rule}: experts are sharded over the tensor-parallel ranks and some of their replicas"
    fitting = sorted({1, *(tp * inner for inner in range(1, replicas + 1) if replicas % inner == 0)})
    fit = f"{', '.join(map(str, fitting))} {'fit' if len(fitting) > 1 else 'fits'} here"
    return f"{rule} that divides {tp} x {replicas} replicas = {tp * replicas}: {fit}"


def _does_not_divide(tp: int, cp: int, pp: int, world_size: int) -> str:
    """Return the error for sizes that do not divide the world, with sizes that do."""
    others = f"context_parallel_size={cp} x pipeline_parallel_size={pp}" if cp > 1 else f"pipeline_parallel_size={pp}"
    product = tp * cp * pp
    fitting = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % (size * cp * pp) == 0)
    sizes = f"tensor_parallel_size can be {fitting}" if fitting else f"no tensor_parallel_size fits {others}"
    return (
        f"tensor_parallel_size={tp} x {others} = {product} does not divide the world of {world_size} processes.\n"
        f"  {world_size} / {product} must be an integer: it is the data-parallel size.\n"
        f"  With {world_size} processes {sizes}; or start a multiple of {product} processes "
        f"(torchrun --nproc-per-node {product})."
    )
