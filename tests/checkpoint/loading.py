"""What the tests of loading share: loading in both ways, comparing the models, what is read and what is logged."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import autopar
from autopar.features.user_code.reads import ShardedParameter
from autopar.storage.files import RangeFile


def tp(size: int) -> dict[str, Any]:
    return {"model_parallelism": {"tensor_parallel_size": size}}


def shared(path: Path | str, model: Any = None, **options: Any) -> str:
    """A folder that rank 0 has written the model to."""
    if model is not None and dist.get_rank() == 0:
        model.save_pretrained(path, **options)
    dist.barrier()
    return str(path)


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Parameters, buffers, what is tied to what, and where all of it lies."""
    ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (one, other))
    assert list(ours) == list(theirs)
    for names in (ours, theirs):
        for name, parameter in names.items():
            assert type(parameter) in (torch.nn.Parameter, ShardedParameter), name
            assert "_autopar_sources" not in str(vars(parameter)), name
    assert _ties(ours) == _ties(theirs)
    for kind, left, right in (
        ("parameter", ours, theirs),
        ("buffer", dict(one.named_buffers()), dict(other.named_buffers())),
    ):
        assert list(left) == list(right)
        for name, tensor in left.items():
            expected = right[name]
            assert (tensor.dtype, tensor.device, tensor.requires_grad) == (
                *(expected.dtype, expected.device, expected.requires_grad),
            ), f"{kind} {name}"
            assert torch.equal(tensor, expected), f"{kind} {name}"


def _ties(named: dict[str, Any]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in named.items():
        groups.setdefault(id(parameter), []).append(name)
    return sorted(groups.values())


def both(model_class: Any, path: str, size: int, **kwargs: Any) -> tuple[Any, Any]:
    torch.manual_seed(5 + dist.get_rank())  # rank 0's counts
    plain = autopar.initialize(model_class.from_pretrained(path, **kwargs), tp(size))
    torch.manual_seed(5 + dist.get_rank())
    lazy = autopar.from_pretrained(model_class, path, tp(size), **kwargs)
    same(lazy, plain)
    return plain, lazy


def saved(folder: Path | str, model: Any, size: int) -> str:
    """A folder of shards that the ranks have written."""
    autopar.initialize(model, tp(size)).save_parallelized(str(folder))
    return str(folder)


@contextlib.contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes that this process reads from each file of weights."""
    counts: dict[str, int] = {}
    read_runs = RangeFile.read_runs

    def counting(self: RangeFile, target: memoryview, places: Iterable[tuple[int, int]], length: int) -> None:
        places = list(places)
        counts[self.path.name] = counts.get(self.path.name, 0) + len(places) * length
        read_runs(self, target, places, length)

    with mock.patch.object(RangeFile, "read_runs", counting):
        yield counts


@contextlib.contextmanager
def logged(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect the messages of a logger from a level on."""
    logger, messages, handler = logging.getLogger(name), list[str](), logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
