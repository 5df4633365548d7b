"""Random state in a tensor-parallel group: a replicated stream, and one stream per rank.

Dropout on replicated activations must drop the same elements on every rank of the group; dropout on sharded activations
must drop different ones. So there are two streams. The default generator has the same seed on all ranks. A named stream
with a seed per rank replaces it inside :meth:`RandomStateTracker.fork`, since ``torch.nn.functional.dropout`` has no
generator argument. Idea and seeds are from Megatron-LM (``megatron/core/tensor_parallel/random.py``).

    tracker = manual_seed(1234, mpu)         # also mpu.random_tracker
    x = dropout(x)                           # Replicate: equal on all ranks
    with tracker.fork():
        scores = dropout(scores)             # Shard: different on each rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from autopar.distributed.axis import Axis, Group, axis_of
from autopar.distributed.process import accelerator
from autopar.distributed.rng import TorchGenerators
from autopar.errors import ConfigError, nearest

MODEL_PARALLEL_STREAM = "model-parallel-rng"
"""Name of the stream that differs between the ranks of a tensor-parallel group."""

_MODEL_PARALLEL_OFFSET = 2718  # as in Megatron-LM, so that runs can be compared


Snapshot = tuple[dict[str | None, TorchGenerators], list[str | None]]
"""The states of all streams, and the active forks."""


class RandomStateTracker:
    """Named random streams in addition to the default one, for the CPU and for the current GPU.

    Args:
        cuda: True to track the generator of the GPU too. Default: True if there is a GPU.
    """

    def __init__(self, cuda: bool | None = None) -> None:
        self._cuda = accelerator() is not None if cuda is None else cuda
        self._seeds: dict[str, int] = {}
        self._states: dict[str | None, TorchGenerators] = {}  # stream -> last state; None: the default generators
        self._forks: list[str | None] = [None]  # active forks, innermost last

    def add(self, name: str, seed: int) -> None:
        """Add a stream; raise ConfigError if another stream has this name or this seed."""
        if name in self._seeds:
            raise ConfigError(f"random stream {name!r} already exists (seed {self._seeds[name]})")
        for other, known in self._seeds.items():
            if known == seed:
                raise ConfigError(f"random stream {name!r}: seed {seed} is already used by stream {other!r}")
        self._seeds[name], self._states[name] = seed, TorchGenerators.of_seed(seed, self._cuda)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from stream ``name`` inside ``with``; afterwards, also after an exception, draw from the outer stream.

        Forks nest. A fork of a stream that an outer fork uses continues from the current state of the outer fork.

        Raises:
            ConfigError: The stream does not exist.
        """
        if name not in self._seeds:
            known = ", ".join(map(repr, self._seeds)) or "no stream: call manual_seed first"
            raise ConfigError(f"no random stream {name!r}; there is {known}.{nearest(name, self._seeds)}")
        self._store()
        self._forks.append(name)
        self._load()
        try:
            yield
        finally:
            self._store()
            self._forks.pop()
            self._load()

    def get_states(self) -> dict[str, dict[str, Any]]:
        """Return ``seed`` and states of each named stream, ``cpu`` and ``cuda`` (None without a GPU)."""
        self._store()
        return {name: {"seed": seed, **self._states[name]._asdict()} for name, seed in self._seeds.items()}

    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all named streams with the result of :meth:`get_states`; a missing GPU state starts at the seed.

        Raises:
            ConfigError: The call is inside a fork of a stream that is missing in ``states``.
        """
        missing = [name for name in self._forks[1:] if name not in states]
        if missing:
            raise ConfigError(
                f"set_states inside a fork of {missing[0]!r}, which is not among the states {list(states)}"
            )
        self._store()
        self._seeds = {name: stream["seed"] for name, stream in states.items()}
        self._states = {None: self._states[None]}
        for name, stream in states.items():
            fresh = TorchGenerators.of_seed(stream["seed"], self._cuda).cuda if stream["cuda"] is None else None
            self._states[name] = TorchGenerators(stream["cpu"], stream["cuda"] if fresh is None else fresh)
        self._load()

    def reset(self) -> None:
        """Remove all named streams; raise ConfigError inside a fork."""
        if len(self._forks) > 1:
            raise ConfigError(f"reset inside a fork of {self._forks[-1]!r}")
        self._seeds, self._states = {}, {}

    def snapshot(self) -> Snapshot:
        """Return the default generators, all streams, and the active forks, for recomputation."""
        self._store()
        return dict(self._states), list(self._forks)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a :meth:`snapshot`, including its active forks."""
        self._states, self._forks = dict(snapshot[0]), list(snapshot[1])
        self._load()

    # -- the default generators hold the stream of the innermost fork -----------------------------------------------

    def _store(self) -> None:
        self._states[self._forks[-1]] = TorchGenerators.now(self._cuda)

    def _load(self) -> None:
        state = self._states[self._forks[-1]]
        (state if self._cuda else state._replace(cuda=None)).restore()


def manual_seed(seed: int, group: Group) -> RandomStateTracker:
    """Seed the replicated stream with ``seed``, and the tensor-parallel stream with ``seed + 2718 + tp rank``.

    The replicated stream is torch's default generator (CPU and all GPUs). The tracker holds the other stream as
    ``"model-parallel-rng"``; an MPU keeps the tracker as ``mpu.random_tracker``.
    """
    axis = axis_of(group)
    torch.manual_seed(seed)
    tracker = RandomStateTracker()
    tracker.add(MODEL_PARALLEL_STREAM, seed + _MODEL_PARALLEL_OFFSET + axis.rank)
    if not isinstance(group, (Axis, torch.distributed.ProcessGroup)):
        cast(Any, group).random_tracker = tracker
    return tracker


model_parallel_cuda_manual_seed = manual_seed  # Megatron-LM's name; the CPU is seeded as well


def get_cuda_rng_tracker(group: Group) -> RandomStateTracker:
    """Return the tracker that :func:`manual_seed` stored on this MPU; raise ConfigError if there is none."""
    tracker = getattr(group, "random_tracker", None)
    if not isinstance(tracker, RandomStateTracker):
        raise ConfigError(f"{type(group).__name__} has no random state tracker\n  Call manual_seed(seed, mpu) first.")
    return tracker


class _Rewind:
    """Restore the random state of the forward pass during a recomputation; reusable for ``retain_graph=True``."""

    def __init__(self, tracker: RandomStateTracker) -> None:
        self._tracker = tracker
        self._then = tracker.snapshot()
        self._now: list[Snapshot] = []

    def __enter__(self) -> None:
        self._now.append(self._tracker.snapshot())
        self._tracker.restore(self._then)

    def __exit__(self, *exc: object) -> None:
        self._tracker.restore(self._now.pop())


def checkpoint(function: Callable[..., Any], tracker: RandomStateTracker | None, *args: Any) -> Any:
    """Run ``function(*args)`` without keeping its activations; backward recomputes them with the same random numbers.

    See Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). torch's non-reentrant checkpoint restores
    only the default generators, so this function also restores both streams and the forks around the call. The backward
    pass does not change the random state.

    Args:
        function: Callable that runs once now and once in the backward pass.
        tracker: Tracker of the streams that ``function`` uses; None if it draws from the default generator only.
    """
    rewind = _Rewind(RandomStateTracker() if tracker is None else tracker)
    return torch_checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # rewind restores it
        context_fn=lambda: (nullcontext(), rewind),
    )
