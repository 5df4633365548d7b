"""Saving while training goes on: one thread, its own connections between the ranks, errors at the next call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from autopar.distributed.consensus import Ranks
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError

__all__ = ["Background"]

_log = logging.getLogger(__name__)
_PATIENCE = timedelta(hours=2)

Copy = TypeVar("Copy")


class _Channel:
    """The ranks of the world over a group of its own: what the thread sends never meets what training sends.

    The group is used by itself, not through the functions of ``torch.distributed``: those refuse it once the script has
    called ``destroy_process_group``, and the last checkpoint of many a script is being written then.
    """

    def __init__(self, mpu: MPU) -> None:
        self.rank, self.world_size = mpu.rank, mpu.world_size
        self.control: dist.ProcessGroup | None = None
        if mpu.world_size > 1:
            self.control = dist.new_group(backend="gloo", timeout=_PATIENCE, group_desc="autopar/background")

    def close(self) -> None:
        if self.control is not None and dist.is_initialized():
            dist.destroy_process_group(self.control)


class Background:
    """At most one save of a model that is being written while training goes on."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._channel: _Channel | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Background:
        return Background()

    def start(self, mpu: MPU, copied: Copy, work: Callable[[Ranks, Copy], None]) -> None:
        """Start ``work(channel, copied)`` in a thread and return. Collective, after :meth:`wait`."""
        if self._channel is None:
            self._channel = _Channel(mpu)
        channel = self._channel

        def run() -> None:
            try:
                work(channel, copied)
            except BaseException as error:
                self._error = error
                if mpu.rank == 0:
                    _log.error("a save in the background failed: %s", error)

        # Not a daemon: a script that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=run, name="autopar save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save that is being written, if there is one.

        Raises:
            CheckpointError: it failed; on every rank the same. A later call does not raise it again.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"the save in the background failed: {error}") from error
        if error is not None:
            raise CheckpointError(f"the save in the background failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Wait, and close the connections. Collective."""
        try:
            self.wait()
        finally:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
