"""One rank's rehearsal: ``initialize``, a training step, an evaluation, a save and a load, without memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from autopar.deferred_init.sources import clear_sources
from autopar.distributed.profiling import record
from autopar.distributed.trace import Call, Group, Recorder
from autopar.dry_run.inputs import keep_kernels, meta_copy, sample_inputs, without_cache
from autopar.dry_run.operators import on_meta
from autopar.foreign.c10d import fake_world, without_data
from autopar.tools.planner.hardware import Gpu
from autopar.tools.rehearsal.cast import Answers, LeftAloneError
from autopar.tools.rehearsal.disk import without_disk
from autopar.tools.rehearsal.work import Held, Work, WorkCount

__all__ = ["Job", "Part", "Rehearsed", "inputs_of", "optimizer_of", "run_cast", "train", "without_memory"]

Part = tuple[str, Call]
"""A call, and the part of the program that it is in: ``initialize``, ``step``, ``evaluation``, ``save``, ``load``."""


class Rehearsed(NamedTuple):
    """A rank's rehearsal.

    Attributes:
        parts: its calls.
        work: before each of them; none without a GPU whose speeds say how long that takes.
        after: work between the step's last call and its end.
        held: bytes in the training step.
        written: bytes of its files, in the save that writes most.
        told: what rank 0 answers each time that all ranks agree.
    """

    parts: list[Part]
    work: list[Work]
    after: Work
    held: Held
    written: int = 0
    told: Sequence[Any] = ()


@dataclass(frozen=True)
class Job:
    """A program that is rehearsed.

    Attributes:
        model: without memory; each rank changes its own copy.
        config: of ``initialize``.
        world: ranks.
        inputs: a replica's batch, without memory.
        average: whether the loop averages gradients; not where stages or FSDP2 do.
        own: a loop of the user's instead, called with the model, the optimizer and a batch.
        gpu: under whose speeds work is counted; None: it is not.
        folder: of the checkpoint.
    """

    model: Any
    config: Any
    world: int
    inputs: dict[str, torch.Tensor]
    average: bool
    own: Callable[[Any, Any, dict[str, Any]], None] | None = None
    gpu: Gpu | None = None
    folder: str = "checkpoint"


def run_cast(
    job: Job, cast: Sequence[int], coordinates: Sequence[tuple[int, ...]], told: Sequence[Any] = ()
) -> dict[int, Rehearsed]:
    """Rehearse some ranks at a time, in a process each, which are forks of this one.

    Args:
        told: what rank 0 has answered, in an earlier cast.

    Raises:
        RuntimeError: a rank failed; its traceback is told.
    """
    context = multiprocessing.get_context("fork")
    links: dict[int, dict[int, Connection]] = {rank: {} for rank in cast}
    for place, one in enumerate(cast):
        for other in cast[place + 1 :]:
            links[one][other], links[other][one] = context.Pipe()
    results, processes = {}, []
    for rank in cast:
        results[rank], end = context.Pipe(duplex=False)
        process = context.Process(
            target=_main, args=(job, rank, cast, links[rank], coordinates, told, end), daemon=True
        )
        process.start()
        end.close()
        processes.append(process)
    found, failed = {}, {}
    for rank, result in results.items():
        try:
            error, found[rank] = result.recv()
        except EOFError:
            error = "its process ended"
        if error:
            failed[rank] = error
    for process in processes:
        process.join()
    if failed:
        rank = min(failed, key=lambda rank: ("Timed out" in failed[rank], rank))
        raise RuntimeError(f"rank {rank} of {job.world} fails in its rehearsal:\n{failed[rank]}")
    return found


def _main(
    job: Job,
    rank: int,
    cast: Sequence[int],
    links: dict[int, Connection],
    coordinates: Sequence[tuple[int, ...]],
    told: Sequence[Any],
    result: Connection,
) -> None:
    gc.freeze()  # the collector would go through all that the parent has, and so copy it
    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    parts: list[Part] = []
    work: list[Work] = []
    count = None if job.gpu is None else WorkCount(job.gpu, _precision(job.config))
    answers = Answers(rank, cast, links, coordinates, told)
    error, now, written = "", ["initialize"], [0]
    try:
        without_disk(written.append)

        def note(call: Call) -> None:
            parts.append((now[0], answers.as_issued(call)))
            if count is not None:
                work.append(count.take())

        def note_group(name: str, ranks: list[int]) -> None:
            note(Call("new_group", Group(name, tuple(ranks)), (), ""))

        def note_reduce(operation: Any) -> None:
            answers.operation = operation

        def note_resize(tensor: torch.Tensor) -> None:
            if count is not None:
                count.resized(tensor)

        world = fake_world(rank, job.world, note_reduce, note_group, answers.gives_for, note_resize)
        counted = nullcontext() if count is None else count.counted()
        with world, counted, Recorder(note, answers, _without_data if count is None else without_data):
            train(job, job.model, now, _unseen if count is None else count.see)
    except LeftAloneError:
        pass  # the traces say where
    except BaseException:
        error = traceback.format_exc()
    try:
        after, held = (Work(), Held()) if count is None else (count.after or count.take(), count.held)
        result.send((error, Rehearsed(parts, work, after, held, max(written), answers.told)))
        answers.end()
    finally:
        os._exit(0)


def _unseen(moment: str, model: Any, optimizer: Any) -> None:
    """Nobody looks."""


def _without_data(function: Any, args: Any, kwargs: Any) -> Any:
    """Answer an operator on tensors without memory, where nobody counts what it does."""
    found = without_data(function, args, kwargs)
    return on_meta(function, args, kwargs) if found is NotImplemented else found


def _precision(config: Any) -> str:
    return str(getattr(config, "precision", "fp32"))


def without_memory(model: PreTrainedModel, *, counted: bool = False) -> PreTrainedModel:
    """Copy a model whose weights never get memory, whatever has been told to fill them.

    Args:
        counted: whether work and memory are counted: it keeps no cache, as the planner's.
    """
    copied = meta_copy(model, gradients=True)
    keep_kernels(copied, model, grouped=counted)
    if counted:
        without_cache(copied)
    for one, other in zip(copied.modules(), model.modules(), strict=True):
        clear_sources(one)
        one.training = other.training
    for parameter, its in zip(copied.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(its.requires_grad)
    return copied


def optimizer_of(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Make the optimizer of a rehearsal."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def train(job: Job, model: Any, now: list[str], see: Callable[[str, Any, Any], None] = _unseen) -> None:
    """Run the program with ``model``; ``now`` is told which part begins, ``see`` what there is (``WorkCount.see``)."""
    import autopar

    model.train()
    optimizer = optimizer_of(model.parameters())
    model, optimizer = autopar.initialize(model, job.config, optimizer=optimizer)
    device = model.mpu.device.type
    batch = {name: x if device == "meta" else torch.ones(x.shape, dtype=x.dtype) for name, x in job.inputs.items()}
    now[0] = "step"
    see("ready", model, optimizer)
    if job.own is not None:
        job.own(model, optimizer, batch)
        return
    if model.mpu.pp.size > 1:
        model.execute_pipeline(batch, optimizer=optimizer)
    else:
        with record("forward".format):
            loss = model(**batch).loss
        with record("backward".format):
            loss.backward()
        del loss  # it keeps what recomputed blocks have made
    if job.average:
        autopar.average_gradients(model)
    see("backward", model, optimizer)
    with record("the optimizer's step".format):
        optimizer.step()
    see("step", model, optimizer)
    optimizer.zero_grad()
    now[0] = "evaluation"
    model.eval()
    with torch.no_grad():
        if model.mpu.pp.size > 1:
            model.execute_pipeline(batch)
        else:
            model(**batch)
    now[0] = "save"
    model.save_parallelized(job.folder, optimizer=optimizer)
    now[0] = "load"
    model.from_parallelized(job.folder, optimizer=optimizer)


def inputs_of(model: PreTrainedModel, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Make a batch without memory, with labels of causal and sequence-to-sequence models."""
    inputs = sample_inputs(model, batch, sequence)
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return inputs if labels is None else inputs | {"labels": labels}
