"""Continuous batching of a tensor-parallel model: ``generate_batch`` and transformers' managers.

transformers' manager runs in a thread on each rank. It takes requests on the first rank of a group, and the other ranks
follow. autopar gives it the ranks (:mod:`.batching_turns`), the local KV heads for the paged cache, and deadlines for
its steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.transformers import free_part, kept_manager
from autopar.distributed.digest import of_text
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.swap import Proxy, config_view, replaced, set_value, swap
from autopar.tensor_parallel.hooks import cache_layouts


def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make transformers' manager over the ranks of a tensor-parallel group; every rank of a replica must call it."""
    failures: FailureLog = self._autopar_failures
    mpu = failures.mpu
    if reason := _refusal(self, mpu):
        _refuse(self, reason)
    if mpu.tp.size == 1:
        return _sharing_host(self, mpu, *args, **kwargs)
    heads = _own_kv_heads(self, mpu)
    if self._autopar_check is not None:
        digest = of_text(repr((args, sorted(kwargs.items()))))
        self._autopar_check.check_call(f"init_continuous_batching (with settings {digest:x})")
    cached = kept_manager(self)
    if cached is not None and not isinstance(cached, _OverRanks):
        self.destroy_cached_continuous_batching_manager()  # it was made before the model was parallelized
    manager = _sharing_host(self, mpu, *args, **kwargs)
    if not isinstance(manager, _OverRanks):
        swap(manager, _OverRanks)
        manager.over_ranks(failures, self._autopar_check, heads)
    here = weakref.ref(manager)

    def check_thread() -> None:
        if (running := here()) is not None:
            running.check_thread()

    self._autopar_region.check_thread = check_thread
    return manager


def _sharing_host(model: Any, mpu: MPU, *args: Any, **kwargs: Any) -> Any:
    """Make transformers' manager; on the CPU its cache leaves memory for the other ranks of the host."""
    kept = kept_manager(model)
    manager = type(model).init_continuous_batching(model, *args, **kwargs)
    config, ranks = manager.continuous_batching_config, int(os.environ.get("LOCAL_WORLD_SIZE") or mpu.world_size)
    if manager is not kept and ranks > 1 and mpu.device.type == "cpu" and config.num_blocks is None:
        config.max_memory_percent *= free_part() / ranks
    return manager


def generate_batch(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``generate_batch`` with identical prompts and settings on all ranks of a replica; each gets all tokens."""
    if reason := _refusal(self, self._autopar_failures.mpu):
        _refuse(self, reason)
    if self._autopar_check is not None:
        digest = of_text(repr((inputs, args, sorted(kwargs.items()))))
        self._autopar_check.check_call(f"generate_batch of {len(inputs)} prompts (with settings {digest:x})")
    return type(self).generate_batch(self, inputs, *args, **kwargs)


@contextlib.contextmanager
def keep_activations(model: nn.Module) -> Iterator[None]:
    """Disable recomputation inside, since blocks that recompute in training mode drop their KV cache."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if vars(module).get("gradient_checkpointing") is True:
                stack.enter_context(replaced(vars(module), {"gradient_checkpointing": False}))
        yield


def forget(model: nn.Module) -> None:
    """Destroy a manager that was kept for a later session."""
    if isinstance(kept_manager(model), _OverRanks):
        model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]


def _refusal(model: nn.Module, mpu: MPU) -> str:
    """Return the part of the model or config that continuous batching does not support; empty if it supports all."""
    if mpu.pp.size > 1:
        return f"pipeline_parallel_size={mpu.pp.size}"
    if mpu.cp.size > 1:
        return f"context_parallel_size={mpu.cp.size}"
    if mpu.shards.size > mpu.tp.size:
        return f"experts that are distributed over {mpu.shards.size} ranks of several replicas"
    if mpu.dp_cp.size > 1 and any(isinstance(one, DTensor) for one in model.parameters()):
        return f"zero.stage 2 and 3 on {mpu.dp_cp.size} replicas"
    return ""


def _refuse(model: nn.Module, reason: str) -> NoReturn:
    raise ConfigError(
        f"continuous batching (generate_batch, paged attention) of {type(model).__name__} is not supported with "
        f"{reason}\n"
        "  Use model.generate(**tokenizer(prompts, padding=True, padding_side='left', return_tensors='pt')) on all "
        "ranks; with TRL\n  remove use_transformers_paged (use_transformers_continuous_batching). Supported are "
        "tensor_parallel_size and replicas\n  (transformers 5.23)."
    )


def _own_kv_heads(model: Any, mpu: MPU) -> int:
    """Return the number of local KV heads per layer; raise ConfigError if layers differ on any rank."""
    config = model.config.get_text_config()
    full = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layouts = cache_layouts(model)
    layers = [
        next((one for one in layouts.get(number, ()) if one.size == full), None)
        for number in range(config.num_hidden_layers)
    ]
    for rank in range(mpu.tp.size):
        found = {full if layout is None else layout.local_size(rank) for layout in layers}
        if len(found) > 1:
            _refuse(model, f"different numbers of KV heads in its layers: {sorted(found)} on rank {mpu.tp.ranks[rank]}")
    mine = layers[0]
    return full if mine is None else mine.local_size(mpu.tp.rank)


class _OverRanks:
    """Mixin for transformers' manager that runs its loop on the ranks of a tensor-parallel group."""

    model: Any
    batch_processor: Any
    background_thread_status: Any
    distributed_helper: Any

    def over_ranks(self: Any, failures: FailureLog, check: Any, heads: int) -> None:
        """Switch a manager that was made for one process to the ranks. A collective of tp."""
        from autopar.features.generation.batching_turns import RankTurns

        here = weakref.ref(self)
        status = self.background_thread_status
        seconds = self.continuous_batching_config.cpu_group_timeout
        self.distributed_helper = RankTurns(failures, seconds, lambda: _progress(here()), lambda: status.fatal_error)
        self.autopar_failures, self.autopar_check, self.autopar_heads = failures, check, heads
        self.autopar_thread: int | None = None  # the thread that runs the steps
        self.autopar_compare = True  # True to compare weights in the next step
        self.autopar_raised = False

    def _create_batch_processor(self: Any) -> Any:
        """Make or find the paged cache of the local heads; a failure of one rank is raised on all ranks."""
        model = self.model
        text = config_view(model.config.get_text_config())
        set_value(text, "num_key_value_heads", self.autopar_heads)
        seen = Proxy(model, config=Proxy(model.config, get_text_config=lambda: text))
        with replaced(vars(self), {"model": seen}):
            try:
                return super()._create_batch_processor()  # type: ignore[misc]
            except BaseException as error:
                self.distributed_helper.fail(error)
                raise

    @contextlib.contextmanager
    def autopar_step(self: Any, compare: bool) -> Iterator[None]:
        """Set a deadline for the collectives of a step, and name a rank that times out."""
        failures, check = self.autopar_failures, self.autopar_check
        what, ranks = "a step of continuous batching", failures.mpu.tp.ranks
        with contextlib.ExitStack() as stack:
            stack.enter_context(failures.deadline())
            stack.enter_context(failures.blame(what, ranks))
            if check is not None:
                stack.enter_context(check.first_only(compare, watch=False))
            stack.enter_context(keep_activations(self.model))
            yield

    def warmup(self: Any) -> None:
        """Capture graphs on all ranks at the same time."""
        self.autopar_thread = threading.get_ident()
        with self.autopar_step(compare=False):
            super().warmup()  # type: ignore[misc]

    def _generation_step(self: Any) -> None:
        self.autopar_thread = threading.get_ident()
        compare, self.autopar_compare = self.autopar_compare, False
        with self.autopar_step(compare):
            super()._generation_step()  # type: ignore[misc]

    def start(self: Any) -> None:
        """Start the thread; its first step compares weights."""
        if not self.is_running():
            self.autopar_compare, self.autopar_raised = True, False
            self.distributed_helper.asked_to_stop = 0
        super().start()  # type: ignore[misc]

    @contextlib.contextmanager
    def pause(self: Any) -> Iterator[None]:
        """Pause on all ranks; the next step compares weights, which may have changed."""
        with super().pause():  # type: ignore[misc]
            self.autopar_compare = True
            yield

    def stop(self: Any, *args: Any, **kwargs: Any) -> None:
        """Stop when all ranks stop; raise an error that ended the thread earlier, once."""
        super().stop(*args, **kwargs)  # type: ignore[misc]
        if self.is_running() or self.autopar_raised:
            return
        error = self.background_thread_status.fatal_error
        if error is not None:
            self.autopar_raised = True
            self.autopar_failures.publish_error(error)
            forget(self.model)
            self.distributed_helper.destroy_cpu_comm_group()
            raise error

    def check_thread(self: Any) -> None:
        """Raise ConfigError for a forward in another thread while the manager runs and is not paused."""
        inside = self.autopar_thread == threading.get_ident()
        if self.is_running() and not inside and not self.background_thread_status.is_pause_requested(local=True):
            raise ConfigError(
                f"a forward is not supported while continuous batching of {type(self.model).__name__} runs in another "
                "thread\n  Put it inside `with manager.pause():` on all ranks, or call manager.stop() before it."
            )


def _progress(manager: Any) -> dict[str, tuple[int, int]]:
    """Return the number of tokens and the last token of each running request."""
    processor = None if manager is None else manager.batch_processor
    active = {} if processor is None else processor.scheduler.active_requests
    tokens = {name: state.generated_tokens for name, state in active.items()}
    return {name: (len(made), made[-1] if made else -1) for name, made in tokens.items()}
