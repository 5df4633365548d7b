"""What ranks really hold: their states, and what waits for backwards, saved by autograd or sent on by a stage."""

import functools
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.compat.tensors import local_part
from autopar.features.activation_checkpointing import setup as activation_checkpoint
from autopar.features.activation_checkpointing.setup import Tape
from autopar.pipeline_parallel.engine import Engine


def mixtral(**settings: Any) -> MixtralForCausalLM:
    """Five experts, three and two on two ranks, of sizes that the grouped product takes on two ranks too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=5, vocab_size=131)
    return MixtralForCausalLM._from_config(config, **settings)


def held_bytes(model: nn.Module, optimizer: Any, gradients: Any = None) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients, the optimizer's state with fp32 weights, and buffers."""
    steps = vars(optimizer)["_autopar"]
    masters = [] if steps.masters is None else [steps.masters.of(p) for p in steps.names if steps.owns(p)]
    states = [entry for state in optimizer.state.values() for entry in state.values()]
    gradients = [parameter.grad for parameter in model.parameters()] if gradients is None else gradients
    held = (model.parameters(), gradients, [*states, *(m for m in masters if m is not None)], model.buffers())
    weights, of_weights, state, buffers = (sum(local_part(tensor).nbytes for tensor in each) for each in held)
    return weights, of_weights, state, buffers


def states_are_as_planned(build: Any, config: dict[str, Any], sequence: int, batch: int) -> tuple[Any, Any]:
    """Train a step on the ranks of this job, and compare what this one holds; returns the plan and the model."""
    world = dist.get_world_size()
    plan = autopar.plan_memory(build(), config, sequence=sequence, batch=batch, gpus=world, device="cpu")
    model: Any = build()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    ids = torch.randint(0, 131, (batch, sequence), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model.execute_pipeline({"input_ids": ids, "labels": ids}, optimizer=optimizer)
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    mpu = model.mpu
    assert plan.ranks[mpu.pp.rank, mpu.dp_cp.rank, mpu.tp.rank][:4] == held_bytes(model, optimizer, gradients)
    return plan, model


class _Saved:
    """A tensor that waits for the backward pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what waits, each storage once, weights not."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._named: list[weakref.ref[torch.Tensor]] = []
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        self.most = 0

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in self._weights:
                return tensor
            saved = _Saved(tensor)
            self._saved.add(saved)
            return saved

        super().__init__(pack, lambda saved: saved.tensor if isinstance(saved, _Saved) else saved)

    def now(self, roots: Any = ()) -> int:
        """Return the bytes that wait now."""
        tensors = [*(saved.tensor for saved in self._saved), *roots, *self._alive_by_name(), *self._remembered()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for key, size in storages.items() if key not in self._weights)

    def _remembered(self) -> Iterator[torch.Tensor]:
        """What ``activation_checkpointing.save`` keeps."""
        return (x for tape in self._tapes for x in tree_leaves(tape.results) if isinstance(x, torch.Tensor))

    def _alive_by_name(self) -> Iterator[torch.Tensor]:
        return (tensor for ref in self._named if (tensor := ref()) is not None)

    @staticmethod
    def _noting(kind: Any, found: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            made = kind(*args, **kwargs)
            found.add(made)
            return made

        return make

    def __enter__(self) -> "SavedBytes":
        forward, saved = Engine._forward, self

        def counted(engine: Engine, stage: int, microbatch: int, step: Any) -> None:
            forward(engine, stage, microbatch, step)
            last = engine.plan.stages - 1
            sent = [root for (at, _), opened in engine._open.items() if at < last for root in opened.roots]
            saved.most = max(saved.most, saved.now(sent))

        self._patches = [
            patch.object(Engine, "_forward", counted),
            patch.object(activation_checkpoint, "Tape", self._noting(Tape, self._tapes)),
        ]
        for each in self._patches:
            each.start()
        for module in self._model.modules():
            function = vars(module).get("_gradient_checkpointing_func")
            if function is not None:
                module._gradient_checkpointing_func = self._noting_names(function)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        [each.stop() for each in self._patches]

    def _noting_names(self, function: Any) -> Any:
        def checkpoint(block: Any, *args: Any, **kwargs: Any) -> Any:
            named = tree_leaves((_keywords_of(block), kwargs))
            self._named += [weakref.ref(leaf) for leaf in named if isinstance(leaf, torch.Tensor)]
            return function(block, *args, **kwargs)

        return checkpoint


def _keywords_of(block: Any) -> list[Any]:
    """The arguments by name of a block that is to be called again, also inside of a function that calls it."""
    cells = [cell.cell_contents for cell in getattr(block, "__closure__", None) or ()]
    inside = [cell for cell in cells if isinstance(cell, functools.partial)]
    return [each.keywords for each in (block, *inside) if isinstance(each, functools.partial)]
