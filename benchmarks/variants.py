"""What is compared: autopar in its configurations, the limit, DTensor, transformers' own tensor parallelism.

A variant that cannot be made here is a :class:`Missing`, whose reason goes into the table.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

# Options that an installed autopar may know or not. "autopar" is without any: the defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "autopar": {},
    "autopar, gloo": {"model_parallelism": {"cpu_transport": "gloo"}},
    "autopar, shm": {"model_parallelism": {"cpu_transport": "shm"}},
    "autopar, logits gathered": {"loss": {"gather_logits": "always"}},
    "autopar, loss in chunks": {"loss": {"chunk": 2048}},
}
LIMIT = "limit"


class Missing(NamedTuple):
    """A variant that is not available, and why."""

    reason: str


class Made(NamedTuple):
    """A parallel model, how it is called for its loss, and for its logits."""

    model: Any
    loss: Callable[[torch.Tensor], torch.Tensor]


def accepts(config: dict[str, Any], world: int) -> str | None:
    """Return why the installed autopar does not take a configuration; None if it does."""
    from autopar import ParallelConfig
    from autopar.errors import ConfigError

    try:
        ParallelConfig.parse(config, world)
    except ConfigError as error:
        return f"not available: {first_line(error)}"
    return None


def merged(*configs: dict[str, Any]) -> dict[str, Any]:
    """Merge configurations section by section."""
    found: dict[str, Any] = {}
    for config in configs:
        for section, content in config.items():
            found[section] = {**found.get(section, {}), **content} if isinstance(content, dict) else content
    return found


def autopar_model(plain: Any, name: str, world: int) -> Made | Missing:
    """Parallelize a copy with one of :data:`OPTIONS`."""
    config = merged({"model_parallelism": {"tensor_parallel_size": world}}, OPTIONS[name])
    if reason := accepts(config, world):
        return Missing(reason)
    import autopar

    return _hugging_face(autopar.initialize(copy.deepcopy(plain), config))


def limit(plain: Any, world: int) -> Made:
    """Make the same shards with collectives that do nothing, and without checks: what communication could reach.

    Values are wrong (a gather repeats a rank's own part), the work of each rank is not. torch's fake process group
    takes the place of the tensor-parallel one.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    import autopar

    config = {"model_parallelism": {"tensor_parallel_size": world}, "consistency_check": {"enable": False}}
    model = autopar.initialize(copy.deepcopy(plain), config)
    model.mpu.tp.group = dist.new_group(backend="fake")
    if hasattr(model.mpu.tp, "transport"):
        model.mpu.tp.transport = None  # else it would carry what the group should
    return _hugging_face(model)


def dtensor(plain: Any, world: int, *, whole_logits: bool = False) -> Made | Missing:
    """Parallelize a Llama by torch's ``parallelize_module``, with a sharded embedding, head and ``loss_parallel``.

    Args:
        whole_logits: gather them, as generation needs.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    if plain.config.model_type != "llama":
        return Missing(f"DTensor has no Conv1D ({plain.config.model_type})")
    whole = Replicate()
    head: Any = ColwiseParallel(output_layouts=whole) if whole_logits else None
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "lm_head": head or ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for number in range(plain.config.num_hidden_layers):
        block = f"model.layers.{number}"
        plan[f"{block}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        plan[f"{block}.mlp"] = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,))
        for column in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{block}.{column}"] = ColwiseParallel()
        for row in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{block}.{row}"] = RowwiseParallel()
    model = parallelize_module(copy.deepcopy(plain), init_device_mesh("cpu", (world,)), plan)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            logits = model(ids).logits[:, :-1]  # [batch, seq - 1, vocab/tp]
            found = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            if torch.is_grad_enabled():
                found.backward()
            return found

    return Made(model, loss)


class _LlamaStage(torch.nn.Module):
    """Blocks of a Llama from ``start`` up to ``stop``, the first stage with the embedding, the last with the head."""

    def __init__(self, plain: Any, start: int, stop: int) -> None:
        super().__init__()
        last = stop == len(plain.model.layers)
        self.embedding = None if start else plain.model.embed_tokens
        self.layers, self.rotary = plain.model.layers[start:stop], plain.model.rotary_emb
        self.head = torch.nn.Sequential(plain.model.norm, plain.lm_head) if last else torch.nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden if self.embedding is None else self.embedding(hidden)
        positions = torch.arange(hidden.shape[1])[None]
        angles = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=angles)
        return self.head(hidden)


def torch_pipelining(plain: Any, ids: torch.Tensor, microbatches: int) -> Callable[[], None]:
    """Return a step of a Llama by ``torch.distributed.pipelining``: 1F1B over all ranks, and AdamW."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    bounds = [len(plain.model.layers) * place // world for place in range(world + 1)]
    module = _LlamaStage(copy.deepcopy(plain), bounds[rank], bounds[rank + 1])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)

    def step() -> None:
        schedule.step(*([ids] if rank == 0 else []), **({"target": ids} if rank == world - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformers_model(plain: Any, world: int) -> Made | Missing:
    """Parallelize by transformers' ``tp_plan``: needs accelerate, and a plan for the model."""
    from transformers import AutoModelForCausalLM

    shared: list[Any] = [None]
    with tempfile.TemporaryDirectory() as folder:
        shared[0] = folder
        dist.broadcast_object_list(shared)
        if dist.get_rank() == 0:
            plain.save_pretrained(shared[0])
        dist.barrier()
        try:
            from transformers.distributed import DistributedConfig

            settings = DistributedConfig(tp_size=world, tp_plan="auto")
            model = AutoModelForCausalLM.from_pretrained(shared[0], distributed_config=settings, dtype=torch.float32)
        except Exception as error:  # no accelerate, no plan for this model
            return Missing(f"not available: {first_line(error)}")
        finally:
            dist.barrier()
    return _hugging_face(model)


def plain_model(plain: Any) -> Made:
    """Return the model as it is."""
    return _hugging_face(plain)


def _hugging_face(model: Any) -> Made:
    def loss(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, labels=ids).loss
        if torch.is_grad_enabled():
            found.backward()
        return found

    return Made(model, loss)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error, for a table."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def agreed(made: Made | Missing) -> Made | Missing:
    """Take a variant only if every rank has it."""
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, made.reason if isinstance(made, Missing) else None)
    missing = [reason for reason in reasons if reason]
    return Missing(missing[0]) if missing else made
