"""Values with tensors in them, of every rank, on every rank."""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist


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


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta or value.layout is not torch.strided:
            return NotImplemented
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
