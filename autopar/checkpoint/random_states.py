"""Save the random states of a rank as JSON, and choose the state from which a rank of another mesh continues.

A state consists of the default generators of Python, numpy, torch and the current GPU, and of the named streams of
``mpu.random_tracker``. Each rank saves and restores its state without communication.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autopar import registry
from autopar.distributed.process import accelerator
from autopar.distributed.rng import Generators, TorchGenerators
from autopar.errors import CheckpointError
from autopar.storage.json_values import Json, decode, encode_inline

_WHERE = "random states"
_MT19937 = 624  # words of numpy's state
_SPREAD = 1 << 20  # more than the number of tensor-parallel ranks


def take(tracker: Any = None) -> Json:
    """Return all random states of this process as JSON, including the tracker's named streams.

    Raises:
        CheckpointError: numpy's default generator is not MT19937.
    """
    now = Generators.now()
    if now.numpy["bit_generator"] != "MT19937":
        raise CheckpointError(f"numpy's default generator must be MT19937, got {now.numpy['bit_generator']}")
    default = {"python": now.python, "numpy": now.numpy, "torch": now.torch.cpu, "cuda": now.torch.cuda}
    return encode_inline({**default, "streams": None if tracker is None else dict(tracker.get_states())}, _WHERE)


def check(value: Json, tracker: Any) -> None:
    """Raise CheckpointError if ``value`` is damaged, ConfigError if :func:`restore` needs a feature that is missing."""
    if _checked(value)["streams"] is not None and tracker is None:
        registry.need("RandomStateTracker", "the named random streams in the checkpoint")


def restore(value: Json, tracker: Any = None) -> Any:
    """Restore the states of :func:`take` or :func:`choose`; return the tracker of the named streams.

    The GPU's generator is left unchanged without a saved GPU state or without a GPU.

    Raises:
        CheckpointError: ``value`` is damaged. Nothing has changed.
    """
    states = _checked(value)
    if states["streams"] is not None:
        if tracker is None:
            tracker = registry.entry("toolbox", "RandomStateTracker")()
        tracker.set_states(states["streams"])
    Generators(TorchGenerators(states["torch"], states["cuda"]), states["python"], states["numpy"]).restore()
    return tracker


def choose(saved: Sequence[Mapping[str, Any]], tp: int, pp: int, dp: int, cp: int = 0) -> Json:
    """Choose the state from which the rank at ``(tp, pp, dp, cp)`` continues.

    * A rank with the coordinates of a saved rank gets the saved state.
    * A new rank of a saved replica gets the default generators of stage 0 and tensor-parallel rank 0, which are equal
      in a replica, and new named streams, which differ between tensor-parallel ranks.
    * A new replica gets the state of replica 0 if all saved replicas had equal states, otherwise a derived state.
    * A new context-parallel rank gets the state of rank 0 of its group, whose default generators are equal.

    A derived state is seeded with the next number of replica 0's generator plus a number of the rank, so the same
    checkpoint and mesh always give the same states.

    Args:
        saved: The entries of all ranks: ``{"tp": 0, "pp": 0, "dp": 0, "cp": 0, "state": result of take}``.
    """
    states: dict[tuple[int, int, int], Json] = {
        (entry["tp"], entry["pp"], entry["dp"]): entry["state"]
        for place in (0, cp)  # the rank's entry comes last and takes precedence
        for entry in saved
        if entry["cp"] == place
    }
    first = states[0, 0, 0]
    replicas = [state for (t, p, _), state in states.items() if t == p == 0]
    if (0, 0, dp) not in states and any(state != first for state in replicas):
        return _seeded(first, tp, dp)
    replica = dp if (0, 0, dp) in states else 0
    for coordinates in ((tp, pp, replica), (tp, 0, replica)):
        if coordinates in states:
            return states[coordinates]
    base = states[0, 0, replica]
    streams = _reseeded(_checked(base)["streams"], tp)
    return {**base, "streams": encode_inline(streams, f"{_WHERE}.streams")}


def _seeded(base: Json, tp: int, dp: int) -> Json:
    """Seed the states of a new replica. Only the streams differ between its tensor-parallel ranks."""
    states = _checked(base)
    seed = _draw(states["torch"]) + dp * _SPREAD
    default = TorchGenerators.of_seed(seed, cuda=True)
    fresh = {
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed % (1 << 32)).get_state(legacy=False),
        "torch": default.cpu,
        "cuda": default.cuda,
        "streams": _reseeded(states["streams"], dp * _SPREAD + tp),
    }
    return encode_inline(fresh, _WHERE)


def _reseeded(streams: Mapping[str, Any] | None, own: int) -> dict[str, dict[str, Any]] | None:
    if streams is None:
        return None
    seeds = {name: _draw(stream["cpu"]) + own for name, stream in streams.items()}
    return {name: {"seed": seed, **TorchGenerators.of_seed(seed, cuda=True)._asdict()} for name, seed in seeds.items()}


def _draw(state: torch.Tensor) -> int:
    generator = torch.Generator()
    generator.set_state(state)
    return int(torch.randint(1 << 60, (), generator=generator))


def _checked(value: Json) -> dict[str, Any]:
    """Decode the states. Raises CheckpointError unless every generator accepts its state."""
    states: dict[str, Any] = decode(value, where=_WHERE)
    try:
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        if not 0 <= states["numpy"]["state"]["pos"] <= _MT19937:  # numpy would read beyond its memory
            raise ValueError(f"the position of numpy's generator must be between 0 and {_MT19937}")
        _check(states["torch"], states["cuda"])
        for stream in (states["streams"] or {}).values():
            _check(stream["cpu"], stream["cuda"])
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the {_WHERE} in the checkpoint are damaged: {str(error).splitlines()[0]}") from error
    return states


def _check(cpu: Any, cuda: Any) -> None:
    torch.Generator().set_state(cpu)
    if cuda is not None and (found := accelerator()) is not None:
        torch.Generator(found.type).set_state(cuda)
