"""What all ranks of a world have: values with tensors, the same error, the result of one of them."""

import contextlib
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import ConfigError


def everyones(value: Any, group: Any = None) -> list[Any]:
    """``value`` of each rank of the group, in the order of ranks; collective."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, file.getvalue(), group=group)
    return [pickle.loads(data) for data in gathered]


def same_random_states(group: Any = None) -> None:
    """Assert that all ranks of the group draw the same from here on; collective."""
    states = everyones(torch.get_rng_state(), group)
    assert all(torch.equal(state, states[0]) for state in states)


@contextlib.contextmanager
def raises_everywhere(error: type[BaseException], *parts: str) -> Iterator[Any]:
    """``pytest.raises`` that also asserts that every rank of the world got the same first line."""
    with pytest.raises(error) as info:
        yield info
    text = str(info.value)
    for part in parts:
        assert part in text, f"{part!r} is not in:\n{text}"
    lines = everyones(text.splitlines()[0])
    assert len(set(lines)) == 1, f"ranks got different errors: {lines}"


def by_rank_0(step: Callable[..., Any]) -> Callable[..., Any]:
    """Take ``step`` on rank 0 only; every rank gets its result or its error. For steps without collectives."""

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        made: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                made[0] = step(*args, **kwargs)
            except Exception as error:
                made[1] = (ConfigError if isinstance(error, ConfigError) else RuntimeError)(f"{error}")
        dist.broadcast_object_list(made)
        if made[1] is not None:
            raise made[1]
        return made[0]

    return run


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta or value.layout is not torch.strided:
            return NotImplemented
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
