"""Continuous batching of a tensor-parallel model: ``generate_batch`` and transformers' managers.

transformers' own manager runs in its thread. Where ranks share a model it takes requests on the first rank of a group,
and the other ranks follow it. autopar gives it the ranks (:mod:`.batching_turns`), this rank's KV
heads for the paged cache, and deadlines around its steps.
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

from autopar.compat.transformers import free_part, kept_manager, takes_ranks
from autopar.distributed.digest import of_text
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.swap import config_view, set_value, swap
from autopar.tensor_parallel.hooks import cache_layouts


def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make transformers' manager, over the ranks of a tensor-parallel group. Every rank of a replica calls it."""
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
        self.destroy_cached_continuous_batching_manager()  # of the plain model
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
    """Make transformers' manager; on the CPU its cache leaves memory to the other ranks of the host."""
    kept = kept_manager(model)
    manager = type(model).init_continuous_batching(model, *args, **kwargs)
    config, ranks = manager.continuous_batching_config, int(os.environ.get("LOCAL_WORLD_SIZE") or mpu.world_size)
    if manager is not kept and ranks > 1 and mpu.device.type == "cpu" and config.num_blocks is None:
        config.max_memory_percent *= free_part() / ranks
    return manager


def generate_batch(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate_batch`` with the same prompts and settings on all ranks of a replica; every rank gets all tokens."""
    if reason := _refusal(self, self._autopar_failures.mpu):
        _refuse(self, reason)
    if self._autopar_check is not None:
        digest = of_text(repr((inputs, args, sorted(kwargs.items()))))
        self._autopar_check.check_call(f"generate_batch of {len(inputs)} prompts (with settings {digest:x})")
    return type(self).generate_batch(self, inputs, *args, **kwargs)


@contextlib.contextmanager
def keep_activations(model: nn.Module) -> Iterator[None]:
    """Keep activations inside of ``with``: transformers' blocks that recompute in training mode forget their cache."""
    on = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in on:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in on:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def forget(model: nn.Module) -> None:
    """Destroy a manager that was kept for another session."""
    if isinstance(kept_manager(model), _OverRanks):
        model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]


def _refusal(model: nn.Module, mpu: MPU) -> str:
    """Return why the ranks cannot run requests together; empty if they can."""
    if mpu.pp.size > 1:
        return f"its {mpu.pp.size} pipeline stages would each need a paged cache and a part of every step"
    if mpu.cp.size > 1:
        return f"context_parallel_size={mpu.cp.size} shares out rows of one sequence, and a step has rows of many"
    if mpu.shards.size > mpu.tp.size:
        return f"experts lie on {mpu.shards.size} ranks of several replicas, and each replica takes steps of its own"
    if mpu.dp_cp.size > 1 and any(isinstance(one, DTensor) for one in model.parameters()):
        return f"zero.stage 2 and 3 gather weights over {mpu.dp_cp.size} replicas, and each takes steps of its own"
    if mpu.tp.size > 1 and not takes_ranks():
        return f"this release of transformers lets each of the {mpu.tp.size} ranks choose by itself what runs next"
    return ""


def _refuse(model: nn.Module, reason: str) -> NoReturn:
    raise ConfigError(
        f"continuous batching (generate_batch, paged attention) of {type(model).__name__}: {reason}.\n"
        "  Use model.generate(**tokenizer(prompts, padding=True, padding_side='left', return_tensors='pt')) on all "
        "ranks; of TRL\n  leave use_transformers_paged (use_transformers_continuous_batching) out. It goes with "
        "tensor_parallel_size, with replicas\n  of that, and with replicas of the whole model (transformers 5.23)."
    )


def _own_kv_heads(model: Any, mpu: MPU) -> int:
    """Return the number of this rank's KV heads in a layer; raise ConfigError if layers differ on any rank."""
    config = model.config.get_text_config()
    whole = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layouts = cache_layouts(model)
    layers = [
        next((one for one in layouts.get(number, ()) if one.size == whole), None)
        for number in range(config.num_hidden_layers)
    ]
    for rank in range(mpu.tp.size):
        found = {whole if layout is None else layout.local_size(rank) for layout in layers}
        if len(found) > 1:
            _refuse(
                model, f"its layers have {sorted(found)} KV heads on rank {mpu.tp.ranks[rank]}, and a cache one number"
            )
    mine = layers[0]
    return whole if mine is None else mine.local_size(mpu.tp.rank)


class _Seen:
    """An object with other values of some attributes."""

    def __init__(self, seen: Any, **own: Any) -> None:
        vars(self).update(own, _seen=seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen, name)


class _OverRanks:
    """Mixin before transformers' manager: its loop on the ranks of a tensor-parallel group."""

    model: Any
    batch_processor: Any
    background_thread_status: Any
    distributed_helper: Any

    def over_ranks(self: Any, failures: FailureLog, check: Any, heads: int) -> None:
        """Continue over the ranks; the manager was made for one process. Collective over tp."""
        from autopar.features.generation.batching_turns import RankTurns

        here = weakref.ref(self)
        status = self.background_thread_status
        seconds = self.continuous_batching_config.cpu_group_timeout
        self.distributed_helper = RankTurns(failures, seconds, lambda: _progress(here()), lambda: status.fatal_error)
        self.autopar_failures, self.autopar_check, self.autopar_heads = failures, check, heads
        self.autopar_thread: int | None = None  # that takes the steps
        self.autopar_compare = True  # weights, in the next step
        self.autopar_told = False

    def _create_batch_processor(self: Any) -> Any:
        """Make or find the paged cache of this rank's heads; where a rank cannot, all ranks learn it."""
        whole = self.model
        text = config_view(whole.config.get_text_config())
        set_value(text, "num_key_value_heads", self.autopar_heads)
        self.model = _Seen(whole, config=_Seen(whole.config, get_text_config=lambda: text))
        try:
            return super()._create_batch_processor()  # type: ignore[misc]
        except BaseException as error:
            self.distributed_helper.fail(error)
            raise
        finally:
            self.model = whole

    @contextlib.contextmanager
    def autopar_step(self: Any, compare: bool) -> Iterator[None]:
        """Limit the collectives of a step, and name the rank that did not come to them."""
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
        """Capture graphs, on all ranks at once."""
        self.autopar_thread = threading.get_ident()
        with self.autopar_step(compare=False):
            super().warmup()  # type: ignore[misc]

    def _generation_step(self: Any) -> None:
        self.autopar_thread = threading.get_ident()
        compare, self.autopar_compare = self.autopar_compare, False
        with self.autopar_step(compare):
            super()._generation_step()  # type: ignore[misc]

    def start(self: Any) -> None:
        """Start the thread; weights are compared in its first step."""
        if not self.is_running():
            self.autopar_compare, self.autopar_told = True, False
            self.distributed_helper.asked_to_stop = 0
        super().start()  # type: ignore[misc]

    @contextlib.contextmanager
    def pause(self: Any) -> Iterator[None]:
        """Pause on all ranks; weights are compared afterwards, as they may have changed."""
        with super().pause():  # type: ignore[misc]
            self.autopar_compare = True
            yield

    def stop(self: Any, *args: Any, **kwargs: Any) -> None:
        """Stop when all ranks do, and raise the error that ended the thread before that, once."""
        super().stop(*args, **kwargs)  # type: ignore[misc]
        if self.is_running() or self.autopar_told:
            return
        error = self.background_thread_status.fatal_error
        if error is not None:
            self.autopar_told = True
            self.autopar_failures.publish_error(error)
            forget(self.model)
            self.distributed_helper.destroy_cpu_comm_group()
            raise error

    def check_thread(self: Any) -> None:
        """Refuse a forward of another thread while this one takes steps, unless that one has paused it."""
        inside = self.autopar_thread == threading.get_ident()
        if self.is_running() and not inside and not self.background_thread_status.is_pause_requested(local=True):
            raise ConfigError(
                f"continuous batching of {type(self.model).__name__} runs in a thread, and this is a forward in "
                "another one: the collectives of the two would meet.\n"
                "  Put it inside of `with manager.pause():`, on all ranks, or call manager.stop() before it."
            )


def _progress(manager: Any) -> dict[str, tuple[int, int]]:
    """Return the number of tokens and the last one of each request that runs."""
    processor = None if manager is None else manager.batch_processor
    active = {} if processor is None else processor.scheduler.active_requests
    tokens = {name: state.generated_tokens for name, state in active.items()}
    return {name: (len(made), made[-1] if made else -1) for name, made in tokens.items()}
