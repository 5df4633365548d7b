"""What the body of a test may leave behind in its process, put back before the next body runs there."""

import ctypes
import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy
import torch
import torch.distributed as dist
import transformers
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_sharding_prop_cache

from autopar.distributed import gloo_collectives
from autopar.features.generation import batching_turns
from autopar.features.host_transport import transport as host_transport
from autopar.guards import step as process_hooks

_LOGGERS = ("autopar", "torch", "transformers")
_FUNCTIONS = (FunctionType, BuiltinFunctionType, classmethod, staticmethod, property, type)
_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (numpy.random.get_state, numpy.random.set_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (os.getcwd, os.chdir),
)


class Settings:
    """The state of this process as it is now: ``restore`` makes it so again."""

    def __init__(self) -> None:
        gloo_collectives._POLL = 0.0  # several worlds share the cores
        host_transport._SPIN_ON_OWN_CORE = host_transport._SPIN
        gc.collect()
        gc.freeze()  # later collections skip the modules and caches of before the first body
        self.world, self.states = dist.group.WORLD, [read() for read, _ in _STATES]
        self.device, self.environment, self.path = torch.get_default_device(), dict(os.environ), list(sys.path)
        self.hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
        self.loggers = _loggers()
        self.functions = [
            (holder, name, value)
            for holder in _namespaces()
            for name, value in vars(holder).items()
            if type(value) in _FUNCTIONS
        ]

    def restore(self) -> None:
        """Put all of it back, drop what the body left, and meet the other ranks."""
        assert dist.is_initialized() and dist.group.WORLD is self.world, (
            "the test has destroyed the process group of its world: it cannot share its ranks, use @distributed"
        )
        if counters:
            torch._dynamo.reset()  # graphs keep their models
            counters.clear()
        gc.collect()  # models, and listeners to the hooks of the process
        process_hooks._listeners.clear()  # also of a model that a cache of another library still holds
        for (_, write), value in zip(_STATES, self.states, strict=True):
            write(value)
        if torch.get_default_device() != self.device:
            torch.set_default_device(self.device)
        torch.set_autocast_enabled("cpu", False)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path
        sys.excepthook, sys.unraisablehook, threading.excepthook = self.hooks
        transformers.utils.logging.warning_once.cache_clear()
        for holder, name, value in self.functions:
            if vars(holder).get(name) is not value:
                setattr(holder, name, value)
        for name in _loggers():
            logger = logging.getLogger(name)
            level, handlers, disabled = self.loggers.get(name, (logging.NOTSET, [], False))
            if logger.level != level:  # each setLevel empties the caches of some hundred loggers
                logger.setLevel(level)
            logger.handlers[:], logger.disabled = handlers, disabled
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # ranks wait long, with the largest model they have had
        _destroy_groups()


def _loggers() -> dict[str | None, tuple[int, list[logging.Handler], bool]]:
    """Level, handlers and switch of the loggers that tests touch."""
    names: list[Any] = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in _LOGGERS]
    return {
        name: (logging.getLogger(name).level, list(logging.getLogger(name).handlers), logging.getLogger(name).disabled)
        for name in [None, *names]
    }


def _namespaces() -> list[Any]:
    """The modules and classes of autopar, and others in which tests have put functions of their own."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "autopar"]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    own = [value for value in dict.fromkeys(classes) if value.__module__.partition(".")[0] == "autopar"]
    return [*modules, *own, Path, dist, torch.cuda]


def _destroy_groups() -> None:
    """Destroy all process groups except the world's; then all ranks number new groups alike."""
    state = dist.distributed_c10d._world
    batching_turns._groups.clear()
    for group in list(state.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    clear_sharding_prop_cache()  # DTensor remembers meshes over the groups that are gone
    number = torch.tensor(state.group_count)
    dist.all_reduce(number, dist.ReduceOp.MAX)  # a rank that is still in a collective of the body shows here
    state.group_count = int(number)
