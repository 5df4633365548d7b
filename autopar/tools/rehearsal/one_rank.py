"""Rehearse one rank: ``initialize``, a step, an evaluation, a save and a load, without memory or disk."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

import autopar.api  # imported before the fork, so that the processes share its modules
import autopar.checkpoint.methods
import autopar.data_parallel.optimizer
import autopar.pipeline_parallel.pipeline
from autopar import registry
from autopar.checkpoint import hf_weights, load as loading, save
from autopar.checkpoint.format import QuantizedBase
from autopar.checkpoint.save import Snapshot
from autopar.checkpoint.state import state_of
from autopar.compat.patches import load
from autopar.distributed.autograd_functions import record
from autopar.dry_run.operators import autocast_on_meta, on_meta
from autopar.errors import ConfigError
from autopar.tools.compat.fake_world import World, fake_world, without_data
from autopar.tools.compat.operators import FakeWork
from autopar.tools.planner.hardware import Gpu
from autopar.tools.rehearsal.simulated_ranks import Answers, LeftAloneError, Links, Transcript, deliver
from autopar.tools.rehearsal.timeline import Held, Work, WorkCount
from autopar.tools.rehearsal.trace import Call, Group, Recorder, where

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""A function that makes an optimizer from a list of parameters."""

Part = tuple[str, Call]
"""A part of the program (``initialize``, ``step``, ``evaluation``, ``save``, ``load``), and a call in it."""


class Rehearsed(NamedTuple):
    """Result of one rank's rehearsal.

    Attributes:
        work, after: The work before each call, and after the last call; empty without a GPU.
        transcript: The transcript for later rounds.
        waited: The calls before which the rank waits for each message (:data:`.matching.Waited`).
        blocked_at: The number of the call in which the rank deadlocks; -1: the program ended.
    """

    parts: list[Part]
    work: list[Work]
    after: Work
    held: Held
    transcript: Transcript = Transcript([], {})
    waited: Mapping[int, int] = {}
    blocked_at: int = -1


@dataclass(frozen=True)
class Job:
    """A program to rehearse.

    Attributes:
        model: A model without memory. Each rank changes a copy.
        inputs: The batch of a replica, without memory.
        own: The user's loop (``loop`` of :func:`autopar.rehearse`), or None.
        gpu: The GPU whose speed determines the time of work, or None.
    """

    model: Any
    config: Any
    world: int
    inputs: dict[str, torch.Tensor]
    own: Callable[[Any, Any, dict[str, Any]], None] | None = None
    gpu: Gpu | None = None
    folder: str = "checkpoint"
    gpus_per_node: int = 8
    optimizer: str | MakeOptimizer = "adamw"


_MOST = 200_000  # calls of one rank


def run_round(
    job: Job, ranks: Sequence[int], coordinates: Sequence[tuple[int, ...]], earlier: Mapping[int, Transcript]
) -> tuple[dict[int, Rehearsed], dict[int, str]]:
    """Rehearse the ranks of one round, each in a fork of this process.

    Returns the result of each rank until its end or failure, and the tracebacks of failed ranks.
    """
    load()
    context = multiprocessing.get_context("fork")
    links, processes = {}, []
    try:
        for rank in ranks:
            links[rank], end = context.Pipe()
            processes.append(context.Process(target=_main, args=(job, rank, ranks, end, coordinates, earlier)))
            processes[-1].start()
            end.close()
        results = deliver(links)
        failed = {rank: results[rank][0] if rank in results else "its process ended" for rank in ranks}
        found = {rank: results[rank][1] for rank in ranks if rank in results}
        return found, {rank: error for rank, error in failed.items() if error}
    finally:
        for process in processes:
            if sys.exc_info()[0] is not None:
                process.terminate()
            process.join()


def _main(
    job: Job,
    rank: int,
    ranks: Sequence[int],
    link: Connection,
    coordinates: Sequence[tuple[int, ...]],
    earlier: Mapping[int, Transcript],
) -> None:
    gc.freeze()  # a collection would touch, and so copy, all pages of the parent
    torch.set_num_threads(1)
    count = None if job.gpu is None else WorkCount(job.gpu, str(getattr(job.config, "precision", "fp32")))
    notes = _Notes(count)
    lines = Links(link)
    answers = Answers(rank, ranks, lines, coordinates, earlier, notes.finishes)
    error, blocked_at = "", -1
    try:
        on_node = min(job.world, job.gpus_per_node)
        numbers = {"RANK": rank, "WORLD_SIZE": job.world, "LOCAL_RANK": rank % on_node, "LOCAL_WORLD_SIZE": on_node}
        os.environ.update({name: str(number) for name, number in numbers.items()})  # as torchrun does
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")
        without_disk()

        callbacks = World(notes.note_group, answers.gives_for, notes.note_resize, notes.note_wait)
        world = fake_world(rank, job.world, callbacks)
        counted = nullcontext() if count is None else count.counted()
        read = _without_data if count is None else without_data
        recorder = Recorder(lambda call: notes.note(answers.as_issued(call)), answers, read)
        with world, counted, autocast_on_meta(), recorder:
            train(job, job.model, notes.now, *([] if count is None else [count.see]))
    except LeftAloneError:
        blocked_at = notes.last
    except BaseException:
        error = traceback.format_exc()
    try:
        after, held = (Work(), Held()) if count is None else (count.after or count.take(), count.held)
        found = Rehearsed(notes.parts, notes.work, after, held, answers.transcript, notes.waited, blocked_at)
        lines.end((error, found))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


class _Notes:
    """Recorder of a rank's calls; ``last``: the number of the running call."""

    def __init__(self, count: WorkCount | None) -> None:
        self.parts: list[Part] = []
        self.work: list[Work] = []
        self.waited: dict[int, int] = {}
        self.now = ["initialize"]
        self.last = -1
        self._count = count
        self._pending: dict[int, tuple[FakeWork, int, Callable[[], None] | None]] = {}

    def note(self, call: Call) -> None:
        self.last = len(self.parts)
        self.parts.append((self.now[0], call))
        if self._count is not None:
            self.work.append(self._count.take())
        if len(self.parts) > _MOST:
            fix = "Check for a loop that waits for a value: in a rehearsal all values are 1."
            raise RuntimeError(f"A rank issued more than {_MOST:,} calls: {call.where}\n  {fix}")

    def note_group(self, name: str, ranks: list[int]) -> None:
        self.note(Call("new_group", Group(name, tuple(ranks)), (), "", where=where(sys._getframe(1))))

    def note_resize(self, tensor: torch.Tensor) -> None:
        if self._count is not None:
            self._count.storages.resized(tensor)

    def finishes(self, work: FakeWork, finish: Callable[[], None] | None) -> None:
        """Store the handle of the last recorded message."""
        self._pending[id(work)] = (work, len(self.parts) - 1, finish)

    def note_wait(self, work: FakeWork) -> None:
        _, number, finish = self._pending.pop(id(work), (work, -1, None))
        if number >= 0:
            self.waited[number] = len(self.parts)
        if finish is not None:
            self.last = number
            finish()


def _without_data(function: Any, args: Any, kwargs: Any) -> Any:
    """Answer an operator on tensors without memory, in a rehearsal without a GPU."""
    found = without_data(function, args, kwargs)
    return on_meta(function, args, kwargs) if found is NotImplemented else found


_OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-4),
    "adam": functools.partial(torch.optim.Adam, lr=1e-4),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-4),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "muon": lambda parameters: torch.optim.Muon([each for each in parameters if each.ndim == 2], lr=1e-4),
}


def optimizer_of(
    parameters: Iterable[nn.Parameter], optimizer: str | MakeOptimizer = "adamw", *, on_gpu: bool = False
) -> torch.optim.Optimizer:
    """Make an optimizer by name, or by a function of the parameters. Raises ConfigError if the name is unknown.

    Args:
        on_gpu: A flag to use the ``foreach`` implementation, torch's default on GPUs.
    """
    if callable(optimizer):
        return optimizer([*parameters])
    if optimizer not in _OPTIMIZERS:
        known = ", ".join(_OPTIMIZERS)
        raise ConfigError(f"rehearse: optimizer must be one of {known}, or a function; got {optimizer!r}")
    made = _OPTIMIZERS[optimizer]([*parameters])
    for group in made.param_groups:
        if on_gpu and "foreach" in group:
            group["foreach"] = True
    return made


def loss_of(output: Any, inputs: Any = None) -> torch.Tensor:
    """Return a model's loss. Without labels, return the mean of its first output."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = output.values() if hasattr(output, "values") else output
    return next(x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()).float().mean()


def train(job: Job, model: Any, now: list[str], see: Callable[[str, Any], None] = lambda *_: None) -> None:
    """Run the program. Write the name of the current part to ``now[0]``, and call ``see`` (:meth:`WorkCount.see`)."""
    model.train()
    optimizer = optimizer_of(model.parameters(), job.optimizer, on_gpu=job.gpu is not None)
    model, optimizer = autopar.initialize(model, job.config, optimizer=optimizer)
    device = model.mpu.device.type
    batch = {name: x if device == "meta" else torch.ones(x.shape, dtype=x.dtype) for name, x in job.inputs.items()}
    now[0] = "step"
    see("ready", model)
    if job.own is not None:
        job.own(model, optimizer, batch)
        return
    criterion, config = None if "labels" in batch else loss_of, model._autopar.config
    if config.pipeline_parallel_size > 1 or config.pipeline.microbatch_size or config.pipeline.num_microbatches:
        model.execute_pipeline(batch, criterion, optimizer=optimizer)
    else:
        with record("forward".format):
            loss = loss_of(model(**batch))
        with record("backward".format):
            loss.backward()
        del loss  # the graph keeps the results of recomputed blocks
        if not config.fully_sharded:
            autopar.average_gradients(model)
    see("backward", model)
    with record("the optimizer's step".format):
        optimizer.step()
    see("step", model)
    optimizer.zero_grad()
    now[0] = "evaluation"
    model.eval()
    with torch.no_grad():
        if model.mpu.pp.size > 1:
            model.execute_pipeline(batch, criterion)
        else:
            model(**batch)
    now[0] = "save"
    model.save_parallelized(job.folder, optimizer=optimizer)
    now[0] = "load"
    model.from_parallelized(job.folder, optimizer=optimizer)


def without_disk() -> None:
    """Patch this process to save and load without files. The process ends as a rehearsed rank."""

    class Writer(save.Writer):
        def make_folder(self) -> list[str]:
            return [self.request.directory, "0" * 16]

        def write_shards(self, local: Snapshot, folder: Path, save_id: str) -> dict[str, Any]:
            return {}

        def finish(self, folder: Path, save_id: str, reports: list[dict[str, Any]]) -> None:
            """Skip the manifest, because there are no files."""

    save.Writer, loading.Loader = Writer, _Loader  # type: ignore[misc, assignment]
    # After the last exchange rank 0 writes PEFT's files and uploads. Skip both.
    if any(feature.name == "peft" for feature in registry.features()):
        from autopar.features.peft.saving import Adapters

        Adapters.write_files = lambda self, full, target: None  # type: ignore[method-assign]
    hf_weights.MergedModel.push_to_hub = lambda self, *args, **options: ""  # type: ignore[method-assign]


class _Loader:
    """A loader of an empty checkpoint that matches the model."""

    def __init__(self, model: nn.Module, folder: Path, training: Any) -> None:
        manifest = SimpleNamespace(save_id="", order=0, base=QuantizedBase(), parts={}, tensors={})
        nothing = {"close": lambda: None, "verify_share": lambda *_: None}
        self.parts, self.shards = (), SimpleNamespace(folder=folder, manifest=manifest, **nothing)
        self.state, self.weights = state_of(model), None
        self.tensors: dict[str, torch.Tensor] = {}

    def fill(self) -> None:
        """Keep the weights unchanged."""
