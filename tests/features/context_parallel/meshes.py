"""A model over rows of the sequence on four ranks, against the plain one: the meshes that have a context axis.

``compare(case, mesh, method)`` runs two micro-batches and compares outputs, losses, every gradient and, with ZeRO-1,
the weights after a step. Texts are 7, 16 or 33 tokens long, by model type: one micro-batch packed where the model takes
positions, the other padded on the left, without labels on the rows of one rank.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.cache_utils import Cache

import autopar
import autopar.dry_run.plan_model
from autopar.errors import AutoparError, PipelineError
from autopar.features.context_parallel import plan as context_parallel
from autopar.features.context_parallel.state import RowState
from autopar.features.sequence_parallel import plan as sequence_parallel
from autopar.layout import rows_layout
from autopar.pipeline_parallel.p2p import map_tensors
from autopar.tools.verification.outputs import floats_of, named, same_floats
from tests.exchange import by_rank_0, everyones
from tests.parity import all_close, close, reseed, total_loss, whole
from tests.pipeline_parallel.oracle import whole_tensors
from tests.random_models import Case, batches, build, kind

LENGTHS = (7, 16, 33)
_UNEVEN, _FOR_FOUR = (6, 3), (8, 2)  # heads and KV heads: more to one rank than to another; fewer KV heads than ranks
_TEXT = {"input_ids", "attention_mask", "labels", "position_ids", "use_cache"}
_OF_STAGES = {"output_router_logits"}  # what the batches of some ask for, and stages refuse
_WITHHELD = {"colpali": "image_hidden_states"}  # what the last stage cannot give; it has no part in the loss


class Mesh(NamedTuple):
    """The sizes of a mesh of four ranks, whether sequences are cut over tp, and by what replicas are averaged."""

    cp: int = 2
    tp: int = 1
    pp: int = 1
    sp: bool = False
    by: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """Sections of the config; the method is not in it."""
        sizes = {"tensor_parallel_size": self.tp, "context_parallel_size": self.cp, "pipeline_parallel_size": self.pp}
        sections: dict[str, Any] = {"model_parallelism": sizes | ({"sequence_parallel": True} if self.sp else {})}
        return sections | ({"zero": {"stage": 1}} if self.by == "zero1" else {})


MESHES = {
    "cp2xtp2": Mesh(tp=2),
    "cp2xpp2": Mesh(pp=2),
    "cp2xdp2-ddp": Mesh(by="ddp"),
    "cp2xdp2-zero1": Mesh(by="zero1"),
    "cp4": Mesh(cp=4),
    "sp4": Mesh(cp=1, tp=4, sp=True),
    "cp2xsp2": Mesh(tp=2, sp=True),
}


class Verdict(NamedTuple):
    """What a comparison says: ``equal``, ``refused`` (by ``initialize``), ``late`` (in a forward) or ``wrong``.

    Attributes:
        why: the error, or the first difference.
        inputs: what the micro-batches were.
        cut: lengths of sequences of which each rank had its rows.
    """

    verdict: str
    why: str = ""
    inputs: tuple[str, ...] = ()
    cut: tuple[int, ...] = ()


@dataclass
class Plain:
    """A model and what it makes of each micro-batch."""

    model: nn.Module
    names: tuple[str, ...]
    batches: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    gradients: list[dict[str, torch.Tensor | None]]

    def gradient(self, times: tuple[float, ...]) -> dict[str, torch.Tensor | None]:
        """Add up the micro-batches' gradients, each so many times."""
        found: dict[str, torch.Tensor | None] = {}
        for name in self.gradients[0]:
            parts = [(each[name], n) for each, n in zip(self.gradients, times, strict=True)]
            parts = [(gradient, n) for gradient, n in parts if gradient is not None]
            found[name] = sum(gradient * n for gradient, n in parts) if parts else None
        return found


@functools.lru_cache(maxsize=2)
def plain_of(case: Case, cp: int, heads: tuple[int, int]) -> Plain:
    """Return the plain model, two micro-batches that it takes, and what it makes of them."""
    model = build(case, *heads).train()
    place = sum(map(ord, case.model_type))
    found = [
        _first_taken(case, model, _packed_or_padded(case, model, place)),
        _first_taken(case, model, _left(case, model, cp, place)),
    ]
    names, inputs, outputs, gradients = zip(*found, strict=True)
    return Plain(model, names, list(inputs), list(outputs), list(gradients))


def _lengths(first: int) -> list[int]:
    return list(dict.fromkeys((LENGTHS[first % 3], 16, 7)))  # some models have tables for 32 positions


def _packed_or_padded(case: Case, model: Any, place: int) -> Iterator[tuple[str, dict[str, Any]]]:
    taken = inspect.signature(model.forward).parameters
    for length in _lengths(place):
        (batch,) = batches(case, model.config, 1, seq=length)
        if kind(case.head) == "causal" and set(batch) <= _TEXT and {"position_ids", "use_cache"} <= taken.keys():
            yield f"{length} packed", _packed(batch, length)
        yield f"{_length(batch)} padded", batch


def _packed(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """Two documents in each sequence, and other ones in the second sequence."""
    border = torch.tensor([[length // 2], [length // 3]])
    positions = torch.arange(length).expand(2, -1)
    made = {"position_ids": torch.where(positions < border, positions, positions - border), "use_cache": False}
    ids = torch.where(batch["attention_mask"] == 0, 5, batch["input_ids"])
    return {"input_ids": ids, "labels": ids.clone(), **made}


def _left(case: Case, model: Any, cp: int, place: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for length in _lengths(place + 1):
        (batch,) = batches(case, model.config, 1, seq=length, left=True)
        kept = _without_labels_on_one_rank(batch, cp)
        if kept is not None:
            yield f"{_length(batch)} padded left, a rank without labels", kept
        yield f"{_length(batch)} padded left", batch
    (batch,) = batches(case, model.config, 1)
    yield from _rolled(batch)
    yield "padded", batch


def _rolled(batch: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Padding behind the words goes in front of them, and what belongs to the words goes along."""
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask[:, 0].all():
        kept = mask.sum(1).tolist()

        def roll(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([row.roll(len(row) - n, 0) for row, n in zip(x, kept, strict=True)])

        words = {key: x for key, x in batch.items() if isinstance(x, torch.Tensor) and x.shape[:2] == mask.shape}
        yield f"{mask.shape[1]} padded left", {**batch, **{key: roll(x) for key, x in words.items()}}


def _without_labels_on_one_rank(batch: dict[str, Any], cp: int) -> dict[str, Any] | None:
    labels = batch.get("labels")
    of_tokens = isinstance(labels, torch.Tensor) and labels.ndim == 2 and not labels.is_floating_point()
    if not of_tokens or labels.shape[1] < 2 * cp:
        return None
    kept = labels.clone()
    for zigzag in (False, True):
        for start, stop in rows_layout(labels.shape[1], cp, zigzag=zigzag).ranges(0):
            kept[:, start : stop + 1] = -100  # also where the label of a row is that of the next
    return {**batch, "labels": kept} if (kept != -100).any() else None


def _length(batch: dict[str, Any]) -> int:
    ids = batch.get("input_ids", next(iter(batch.values())))
    return ids.shape[1] if isinstance(ids, torch.Tensor) and ids.ndim > 1 else 0


def loss_of(output: Any, case: Case) -> torch.Tensor:
    """Return one number to differentiate."""
    output, without = named(output), _WITHHELD.get(case.model_type)
    if "loss" in output:
        return total_loss({key: output[key] for key in output if key.endswith("loss")})
    return total_loss({key: output[key] for key in output if key != without})


def _first_taken(case: Case, model: nn.Module, candidates: Iterator[tuple[str, dict[str, Any]]]) -> Any:
    """The first batch of which the plain model makes finite numbers."""
    failed = ""
    for name, batch in candidates:
        each = copy.deepcopy(model)
        try:
            reseed(0)
            output = each(**copy.deepcopy(batch))
            loss_of(output, case).backward()
        except Exception as error:
            failed = failed or f"{name}: {type(error).__name__}: {error}"
            continue
        outputs = {key: value for key, value in named(output).items() if not isinstance(value, Cache)}
        outputs = map_tensors(outputs, torch.Tensor.detach)
        gradients = {key: p.grad for key, p in each.named_parameters()}
        if any(model.get_parameter(key).shape != p.shape for key, p in each.named_parameters()):
            continue  # tables that grow with the length
        made = [value for _, value in floats_of(outputs)] + [x for x in gradients.values() if x is not None]
        if all(bool(torch.isfinite(value).all()) for value in made):
            return name, batch, outputs, gradients
    raise AssertionError(f"the plain model takes no batch: {failed}")


def compare(case: Case, mesh: Mesh, method: str) -> Verdict:
    """Compare a model over a mesh with the plain one; the same verdict on each of the four ranks."""
    transformers.logging.set_verbosity_error()
    plain = plain_of(case, mesh.cp, _FOR_FOUR if max(mesh.cp, mesh.tp) == 4 else _UNEVEN)
    config = mesh.config
    if mesh.cp > 1:
        config["model_parallelism"]["context_parallel_method"] = method
    if mesh.pp > 1:  # what is no text may belong to no sample
        text = all(set(batch) <= _TEXT and "labels" in batch for batch in plain.batches)
        config["pipeline"] = {"microbatch_size": 1 if text else 1000, "timeout": 30}
    model = copy.deepcopy(plain.model)
    optimizer = _optimizer(model)
    try:
        with _rehearsed_by_rank_0():
            model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    except AutoparError as error:
        return Verdict("refused", _agreed(error), plain.names)
    with _noted_lengths() as lengths:
        try:
            return _compare(plain, model, optimizer, mesh, case, lengths)
        except AutoparError as error:
            return Verdict("late", _agreed(error), plain.names, _everyones(lengths))
        finally:
            model.mpu.destroy()


@contextlib.contextmanager
def _rehearsed_by_rank_0() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autopar.dry_run.plan_model, "check_plan", lambda *_: True)  # the tests of rehearsals have it
        for module, name in ((sequence_parallel, "plan_sequence"), (context_parallel, "plan_rows")):
            patch.setattr(module, name, by_rank_0(getattr(module, name)))
        yield


def _agreed(error: AutoparError) -> str:
    """What is wrong, in the words of the rank that saw it; every rank raises something."""
    return min(everyones((isinstance(error, PipelineError), str(error))), key=lambda each: each[0])[1]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


@contextlib.contextmanager
def _noted_lengths() -> Iterator[set[int]]:
    """The lengths of sequences that this rank cuts inside: a stage may have an encoder that runs whole."""
    found, rows_of = set[int](), RowState.rows_of

    def noted(state: RowState, length: int) -> Any:
        rows = rows_of(state, length)
        found.update([length] if rows else [])
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowState, "rows_of", noted)
        yield found


def _everyones(lengths: set[int]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*everyones(sorted(lengths)))))


class _Differences:
    """What is not equal on this rank; comparing goes on, so that no rank waits for another."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.found.append(str(error))

    def everyones(self) -> str:
        """Return the first difference of the first rank that has any, and how many it has."""
        all_of_them = enumerate(everyones(self.found))
        return next((f"rank {rank}: {found[0]} ({len(found)} in all)" for rank, found in all_of_them if found), "")


def _compare(plain: Plain, model: Any, optimizer: Any, mesh: Mesh, case: Case, lengths: set[int]) -> Verdict:
    differences = _Differences()
    model.train()
    if mesh.pp > 1:
        _run_stages(plain, model, case, differences)
        expected = plain.gradient((1.0, 1.0))
        held = whole_tensors(model, lambda parameter: parameter.grad)
    else:
        order = (0, 1) if model.mpu.dp.rank == 0 else (1, 1)  # the replicas have other sums
        _run(plain, model, mesh, case, order, differences)
        expected = plain.gradient((1.0, 1.0) if model.mpu.dp.size == 1 else (0.5, 1.5))
        for name, parameter in model.named_parameters():
            with differences.noted():
                message = f"{name}: gradient present or missing"
                assert (parameter.grad is None) == (expected[name] is None), message
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        held = whole(model, lambda parameter: parameter.grad)
    _compare_gradients(held, expected, differences)
    if mesh.by == "zero1":
        _compare_step(plain, model, optimizer, expected, differences)
    cut = _everyones(lengths)
    why = differences.everyones()
    return Verdict("wrong" if why else "equal", why, plain.names, cut)


def _run(plain: Plain, model: Any, mesh: Mesh, case: Case, order: tuple[int, ...], differences: _Differences) -> None:
    """Forward and backward of both micro-batches, then the average over the ranks with the same weights."""
    engine = model
    if mesh.by == "ddp":
        unused = any(gradient is None for each in plain.gradients for gradient in each.values())
        group = model.mpu.get_data_parallel_group(with_context_parallel=True)
        engine = DistributedDataParallel(model, process_group=group, find_unused_parameters=unused)
    for step, number in enumerate(order):
        last = step == len(order) - 1
        with contextlib.nullcontext() if last or engine is model else engine.no_sync():
            reseed(0)
            actual = named(engine(**copy.deepcopy(plain.batches[number])))
            loss = loss_of(actual, case)
            _compare_outputs(plain.outputs[number], actual, plain.names[number], differences)
            loss.backward()
    if engine is model and model.mpu.dp_cp.size > 1:
        autopar.average_gradients(model)


def _run_stages(plain: Plain, model: Any, case: Case, differences: _Differences) -> None:
    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        return loss_of(outputs, case)

    for number, given in enumerate(plain.batches):
        reseed(0)
        batch = {name: value for name, value in copy.deepcopy(given).items() if name not in _OF_STAGES}
        losses = [key for key in plain.outputs[number] if str(key).endswith("loss")]
        own = losses == ["loss"] and "labels" in batch
        out = model.execute_pipeline(batch, None if own else criterion, broadcast_loss=True, return_outputs=True)
        if own:
            with differences.noted():
                close(out.loss, plain.outputs[number]["loss"], f"loss of the pipeline, {plain.names[number]}")
        if out.outputs is not None:
            _compare_outputs(plain.outputs[number], out.outputs, plain.names[number], differences, stages=True)


def _compare_outputs(
    expected: dict[str, Any], actual: Any, name: str, differences: _Differences, *, stages: bool = False
) -> None:
    for key, value, other in same_floats(expected, actual):
        if other is None and stages:
            continue  # the first stage made it
        with differences.noted():
            assert other is not None, f"{key}, {name}: there is none"
            close(other.detach(), value, f"{key}, {name}")


def _compare_gradients(held: Any, expected: Any, differences: _Differences) -> None:
    used = {name: gradient for name, gradient in expected.items() if gradient is not None}
    for name in expected:
        with differences.noted():
            assert name in used or held[name] is None or not held[name].any(), f"{name}: a gradient that is not plain's"
            assert name not in used or held[name] is not None, f"{name}: no gradient"
    with differences.noted():
        all_close(held, {name: used[name] for name in used if held[name] is not None}, "gradient of {}")


def _compare_step(plain: Plain, model: Any, optimizer: Any, expected: Any, differences: _Differences) -> None:
    """One step of ZeRO-1; what has no gradient has zeros, on both sides."""
    reference = copy.deepcopy(plain.model)
    for name, parameter in reference.named_parameters():
        parameter.grad = torch.zeros_like(parameter) if expected[name] is None else expected[name].clone()
    _optimizer(reference).step()
    optimizer.step()
    with differences.noted():
        weights = whole(model, lambda parameter: parameter.data)
        all_close(weights, {name: p.data for name, p in reference.named_parameters()}, "{} after the step")
