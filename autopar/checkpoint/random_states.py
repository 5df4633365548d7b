"""The random states of one rank as JSON, and the saved one from which a rank of another mesh continues.

A state holds Python's, numpy's and torch's default generators, the current GPU's, and the named streams of the
toolbox's tracker (``mpu.random_tracker``). No collective: each rank takes and restores its own.
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
_SPREAD = 1 << 20  # more than there are tensor-parallel ranks


def take(tracker: Any = None) -> Json:
    """Return all random states of this process as JSON, including the tracker's named streams.

    Raises:
        CheckpointError: numpy's default generator is not MT19937.
    """
    now = Generators.now()
    if now.numpy["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's default generator is {now.numpy['bit_generator']}; only MT19937 can be restored"
        )
    default = {"python": now.python, "numpy": now.numpy, "torch": now.torch.cpu, "cuda": now.torch.cuda}
    return encode_inline({**default, "streams": None if tracker is None else dict(tracker.get_states())}, _WHERE)


def check(value: Json, tracker: Any) -> None:
    """Raise CheckpointError if ``value`` is damaged, ConfigError if a feature is missing that :func:`restore` needs."""
    if _checked(value)["streams"] is not None and tracker is None:
        registry.need("RandomStateTracker", "the named random streams in the checkpoint")


def restore(value: Json, tracker: Any = None) -> Any:
    """Continue with the states of :func:`take` or :func:`choose`; return the tracker of the named streams.

    Without a saved GPU state, or without a GPU, that one is left as it is.

    Raises:
        CheckpointError: ``value`` is damaged; nothing has changed.
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

    * A rank that was there when the checkpoint was saved has the same state again.
    * Another one has that of stage 0 and tensor-parallel rank 0 of its replica: the default generators of a replica are
      equal. Its named streams are new ones, because those differ between tensor-parallel ranks.
    * A new replica continues like replica 0 if the saved replicas had equal states (they draw equally on purpose, or
      there was only one); otherwise all its states are derived from replica 0's.
    * A new context-parallel rank continues like rank 0 of its group, whose default generators are equal.

    Derived means: seeded with the number that the saved generator draws next, plus a number of the rank. The same
    checkpoint and mesh always give the same states.

    Args:
        saved: One entry per rank: ``{"tp": 0, "pp": 0, "dp": 0, "cp": 0, "state": result of take}``.

    Raises:
        CheckpointError: An entry is damaged, or that of the first rank is missing.
    """
    try:
        states: dict[tuple[int, int, int], Json] = {
            (int(entry["tp"]), int(entry["pp"]), int(entry["dp"])): entry["state"]
            for place in (0, cp)  # the rank's own one comes last, and stays
            for entry in saved
            if int(entry["cp"]) == place
        }
        first = states[0, 0, 0]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the {_WHERE} in the checkpoint are damaged: {error!r}") from error
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
    """Seed the states of a new replica: default generators equally on its tensor-parallel ranks, streams not."""
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
    """Decode the states. Raises CheckpointError unless every generator takes its own."""
    keys = ("python", "numpy", "torch", "cuda", "streams")
    if not isinstance(value, Mapping) or set(value) != set(keys):
        raise CheckpointError(f"the {_WHERE} in the checkpoint are damaged: they are not {', '.join(keys)}")
    states: dict[str, Any] = decode(dict(value), where=_WHERE)
    try:
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        if not 0 <= states["numpy"]["state"]["pos"] <= _MT19937:  # numpy would read beyond its memory
            raise ValueError("the position of numpy's generator is impossible")
        _check(states["torch"], states["cuda"])
        for name, stream in (states["streams"] or {}).items():
            if not isinstance(name, str) or set(stream) != {"seed", "cpu", "cuda"}:
                raise ValueError(f"{name!r} is no stream")
            if type(stream["seed"]) is not int or not -(1 << 63) <= stream["seed"] < 1 << 64:
                raise ValueError(f"the seed of stream {name!r} is {stream['seed']!r}")
            _check(stream["cpu"], stream["cuda"])
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the {_WHERE} in the checkpoint are damaged: {str(error).splitlines()[0]}") from error
    return states


def _check(cpu: Any, cuda: Any) -> None:
    torch.Generator().set_state(cpu)
    if cuda is not None and (not isinstance(cuda, torch.Tensor) or cuda.dtype != torch.uint8):
        raise ValueError("the state of the GPU's generator is no tensor of bytes")
    if cuda is not None and (found := accelerator()) is not None:
        torch.Generator(found.type).set_state(cuda)
