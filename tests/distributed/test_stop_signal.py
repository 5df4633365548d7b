"""A signal that one rank gets stops all of them at the same step."""

import os
import signal
import threading

import pytest
import torch.distributed as dist

from autopar import MPU, StopSignal
from autopar.errors import ConfigError
from tests.pool import pooled


@pooled(world_size=2)
def test_all_ranks_stop_after_the_same_step() -> None:
    mpu, before = MPU(tensor_parallel_size=2), signal.getsignal(signal.SIGTERM)
    with StopSignal(mpu, signal.SIGTERM, signal.SIGUSR1) as stop:
        steps = 0
        for step in range(5):
            steps += 1
            if step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.requested():
                break
        assert steps == 3
        assert stop.requested()  # it stays so
    assert signal.getsignal(signal.SIGTERM) is before
    mpu.destroy()


@pooled(world_size=2)
def test_a_second_signal_does_what_it_did_before() -> None:
    mpu, got = MPU(tensor_parallel_size=2), list[int]()
    before = signal.signal(signal.SIGUSR2, lambda number, _: got.append(number))
    try:
        with StopSignal(mpu, signal.SIGUSR2) as stop:
            assert not stop.requested()
            os.kill(os.getpid(), signal.SIGUSR2)
            assert stop.requested() and not got
            os.kill(os.getpid(), signal.SIGUSR2)
            assert got == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
    mpu.destroy()


@pooled(world_size=1)
def test_only_the_main_thread_handles_signals() -> None:
    mpu, errors = MPU(), list[str]()

    def make() -> None:
        with pytest.raises(ConfigError) as caught:
            StopSignal(mpu)
        errors.append(str(caught.value))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert errors and "main thread" in errors[0] and "in the main thread" in errors[0]
    mpu.destroy()
