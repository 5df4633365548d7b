"""The checks of ``verify``: weights, outputs, tokens, gradients, a step and checkpoints against the plain model's."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from autopar.checkpoint.offline import merge_checkpoint, reshard_checkpoint
from autopar.data_parallel.gradients import average_gradients
from autopar.errors import type_and_text
from autopar.quantized.layers import stored_weights
from autopar.tools.verification.outputs import (
    OF_GRADIENTS,
    Distance,
    local,
    local_part,
    measure,
    of_first,
    reseed,
    same_floats,
    size_of_loss,
)
from autopar.tools.verification.recording import recording_of
from autopar.tools.verification.report import RankMemory, Row
from autopar.tools.verification.session import Session

_SMALL = 0.05  # of the largest gradient or step: what is smaller is measured by this
_TOKENS = 6  # that are generated
_PADDING = 2  # columns on the left of the first prompt


class Named(NamedTuple):
    """How far something is from the plain model's."""

    name: str
    distance: Distance


def worst_row(check: str, what: str, found: Iterable[Named], allowed: float, *, show: bool = True) -> Row:
    """Return the row of the one that is farthest off.

    Args:
        show: its name even if it holds.
    """
    listed = list(found)
    worst = max(listed, key=lambda each: each.distance.relative, default=None)
    if worst is None:
        return Row(check, what, None, note="this rank has none")
    (relative, problem), holds = worst.distance, worst.distance.relative <= allowed
    failing = sum(each.distance.relative > allowed for each in listed)
    name = worst.name if show or not holds else ""
    return Row(check, what, holds, relative, allowed, name, problem, failing=failing, of=len(listed))


def weights(session: Session) -> list[Row]:
    """Compare the weights of this rank with its parts of the plain model's: equal to the bit."""
    shard, found = session.mpu.shards.rank, list[Named]()
    for name, mine, theirs in pairs(session):
        expected = local_part(session.plan, name, theirs.detach(), shard)
        found.append(Named(name, measure(local(mine), expected)))
    plain = stored_weights(session.plain)
    for path, stored in stored_weights(session.parallel).items():
        expected = local_part(session.plan, f"{path}.weight", plain[path].dequantized(), shard)
        found.append(Named(f"{path}.weight", measure(stored.dequantized(), expected)))
    return [worst_row("weights", "sharded", found, session.allowed, show=False)]


def pairs(session: Session) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """Yield name, this rank's parameter and the plain model's, of those that this rank holds and that are numbers."""
    plain = dict(session.plain.named_parameters())
    quantized = {f"{path}.weight" for path in stored_weights(session.parallel)}
    for name, mine in session.parallel.named_parameters():
        if not mine.is_meta and name not in quantized:
            yield name, mine, plain[name]


# -- forward ----------------------------------------------------------------------------------------------------------


def forward(session: Session) -> list[Row]:
    """Compare the outputs of a forward in evaluation mode."""
    batch = session.batches[0]
    expected = session.evaluate(session.plain, batch)
    actual = session.evaluate(session.parallel, batch)
    return _output_rows("forward", _outputs(expected, actual), session.tolerance)


def _outputs(expected: Any, actual: Any) -> list[Named]:
    missing = Distance(math.inf, "the output is missing")
    pairs = same_floats(expected, actual)
    return [Named(name, missing if mine is None else measure(mine, theirs)) for name, theirs, mine in pairs]


def _output_rows(check: str, found: list[Named], allowed: float) -> list[Row]:
    """One row for logits, one for the loss, one for all others."""
    chief = {what: [each for each in found if each.name == what] for what in ("logits", "loss")}
    rest = [each for each in found if each.name not in chief]
    rows = [worst_row(check, what, each, allowed, show=False) for what, each in chief.items() if each]
    return rows + ([worst_row(check, "outputs", rest, allowed)] if rest else [])


# -- backward ---------------------------------------------------------------------------------------------------------


def backward(session: Session) -> list[Row]:
    """Compare outputs and losses in training mode, and the gradients after all batches."""
    session.zero_gradients()
    session.find_lacking()
    outputs, losses = list[Named](), list[Named]()
    for number in range(len(session.batches)):
        expected, loss = session.train_plain(number)
        with recording_of(session.mpu.tp) as sent:  # the last one is kept
            actual, own = session.train_parallel(number)
        assert own is not None
        floor = _SMALL * size_of_loss(expected, session.lacking)  # terms that cancel leave their rounding
        losses.append(Named(f"batch {number}", measure(session.mean_loss(number, own), loss, floor)))
        if actual is not None and session.mpu.dp.size == 1:
            outputs += [each for each in _outputs(expected, actual) if not each.name.endswith("loss")]
    with recording_of(session.mpu.tp) as averaged:
        if not session.piped and session.mpu.cp.size > 1:  # what execute_pipeline does by itself
            average_gradients(session.parallel)
    session.sent = [*sent, *averaged]
    rows = [worst_row("backward", "loss", losses, session.tolerance, show=False)]
    rows += [row for row in _output_rows("backward", outputs, session.tolerance) if row.what != "loss"]
    allowed = OF_GRADIENTS * session.tolerance
    return [*rows, worst_row("backward", "worst gradient", _gradients(session), allowed)]


def _gradients(session: Session) -> Iterator[Named]:
    gradients = [parameter.grad for parameter in session.plain.parameters() if parameter.grad is not None]
    floor = _SMALL * max((gradient.abs().max().item() for gradient in gradients if gradient.numel()), default=0.0)
    scale = session.gradient_scale()
    for name, mine, theirs in pairs(session):
        if (mine.grad is None) != (theirs.grad is None):
            lacking = "the plain model's has one" if mine.grad is None else "the plain model's has none"
            has_zero = theirs.grad is not None and not theirs.grad.any()
            elsewhere = mine.grad is None and not mine.numel()  # all of it lies on other ranks
            if not has_zero and not elsewhere:
                yield Named(name, Distance(math.inf, f"gradient present or missing: {lacking}"))
        elif mine.grad is not None and theirs.grad is not None:
            expected = local_part(session.plan, name, theirs.grad, session.mpu.shards.rank)
            yield Named(name, measure(local(mine.grad) / scale, expected, floor))


# -- step -------------------------------------------------------------------------------------------------------------


def step(session: Session) -> list[Row]:
    """Compare what an optimizer step adds to the weights; after :func:`backward`."""
    before = {name: local(mine).clone() for name, mine, _ in pairs(session)}
    plain, parallel = session.optimizers
    gradients = (p.grad.abs().max().item() for p in session.plain.parameters() if p.grad is not None and p.grad.numel())
    largest = of_first(max(gradients, default=1.0))
    for group in (*plain.param_groups, *parallel.param_groups):
        group["eps"] = 0.1 * largest or 1.0  # with a small one AdamW makes a full step of what is only rounding
    if session.config.gradient_clipping:
        torch.nn.utils.clip_grad_norm_(session.plain.parameters(), session.config.gradient_clipping)
    plain.step()
    with recording_of(session.mpu.tp) as sent:
        parallel.step()
    session.sent += sent
    allowed = OF_GRADIENTS * session.tolerance
    row = worst_row("step", "worst change of a weight", _changes(session, before), allowed)
    session.memory = memory_of(session.mpu.rank, session.parallel, parallel)
    session.plain_memory = memory_of(session.mpu.rank, session.plain, plain)
    return [row]


def _changes(session: Session, before: dict[str, torch.Tensor]) -> Iterator[Named]:
    changes = []
    for name, mine, theirs in pairs(session):
        expected = local_part(session.plan, name, theirs.detach(), session.mpu.shards.rank)
        if session.exact:
            changes.append((name, local(mine) - before[name], expected - before[name], expected))
        else:  # the optimizer steps fp32 weights; the model's are rounded
            changes.append((name, local(mine), expected, expected))
    largest = max((change.abs().max().item() for _, _, change, _ in changes if change.numel()), default=0.0)
    for name, own, wanted, weight in changes:
        rounding = torch.finfo(weight.dtype).eps if weight.is_floating_point() else 0.0
        size = weight.abs().max().item() if weight.numel() else 0.0
        floor = max(_SMALL * largest, 2 * rounding * size / session.tolerance / OF_GRADIENTS)
        yield Named(name, measure(own, wanted, floor))


def memory_of(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> RankMemory:
    """Count the bytes of weights, gradients and the optimizer's state."""
    held = [parameter for parameter in model.parameters() if not parameter.is_meta]
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor)]
    sizes = [[getattr(x, "to_local", lambda x=x: x)().nbytes for x in each] for each in (held, gradients, tensors)]
    return RankMemory(rank, *map(sum, sizes))


# -- generation -------------------------------------------------------------------------------------------------------


def prompt_of(session: Session) -> dict[str, Any]:
    """Return the inputs of the first batch without targets; for text alone, the first prompt is padded on the left."""
    batch = session.batches[0]
    inputs = {
        name: value
        for name, value in batch.items()
        if "label" not in name and not name.startswith(("decoder_", "output_", "next_sentence"))
    }
    encoder_decoder = getattr(session.plain.config, "is_encoder_decoder", False)
    if set(inputs) <= {"input_ids", "attention_mask"} and not encoder_decoder:
        ids = inputs["input_ids"]
        ids = ids[: session.mpu.dp.size + 1, : max(_PADDING + 1, ids.shape[1] // 2)]
        mask = torch.ones_like(ids)
        mask[0, :_PADDING] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs


def generated(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Return tokens and the logits of each, chosen greedily."""
    model.eval()
    reseed(0)
    settings: dict[str, Any] = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS, "do_sample": False}
    if "pixel_values" not in inputs:  # some models pass one of their own on
        settings["pad_token_id"] = 0
    with torch.no_grad():
        return model.generate(  # type: ignore[operator]
            **copy.deepcopy(inputs), **settings, return_dict_in_generate=True, output_logits=True
        )


def generate(session: Session) -> list[Row]:
    """Compare tokens and logits."""
    model, reason = session.plain, ""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        reason = f"{type(model).__name__} does not generate"
    elif session.mpu.cp.size > 1:
        reason = "context parallelism does not shorten what is generated token by token"
    elif "input_ids" not in session.batches[0]:
        reason = "its batch has no input_ids"
    if reason:
        return [Row("generate", "tokens", None, note=reason)]
    inputs = prompt_of(session)
    try:
        expected = generated(session.plain, inputs)
    except Exception as error:  # what the plain model cannot do is no matter of parallelism
        return [Row("generate", "tokens", None, note=f"the plain model does not: {type_and_text(error, 120)}")]
    actual = generated(session.parallel, inputs)
    same = torch.equal(actual.sequences, expected.sequences)
    mine, theirs = (output.sequences[0, -_TOKENS:].tolist() for output in (actual, expected))
    note = "" if same else f"{mine}, the plain model's are {theirs}"
    rows = [Row("generate", "tokens", same, note=note)]
    logits = [
        Named(f"token {number}", Distance(math.inf, "missing") if own is None else measure(own, wanted))
        for number, (wanted, own) in enumerate(zip(expected.logits or (), actual.logits or (), strict=False), 1)
    ]
    return [*rows, worst_row("generate", "logits", logits, session.tolerance, show=False)] if logits else rows


def save(session: Session) -> list[Row]:
    """Save merged; compare names and bits with what the plain model saves."""
    if not _merges(session):
        adapted = "quantized weights with adapters are not merged"
        why = adapted if stored_weights(session.plain) else "the plain module has no save_pretrained"
        return [Row("save", "merged checkpoint", None, note=why)]
    plain: Any = session.plain
    with _folder() as folder:
        session.parallel.save_parallelized(folder / "merged", merge_checkpoints=True)
        found = list[Named]()
        if dist.get_rank() == 0:
            plain.save_pretrained(folder / "plain")
            found = list(_files(folder / "merged", folder / "plain"))
        dist.barrier()
    return [worst_row("save", "merged checkpoint", found, session.allowed, show=False)]


def reshard(session: Session) -> list[Row]:
    """Save shards, write them again for another mesh, merge those, and load them into the model."""
    tp = 3 if session.mpu.tp.size != 3 else 2
    plain: Any = session.plain
    with _folder() as folder:
        session.parallel.save_parallelized(folder / "shards")
        found = list[Named]()
        if dist.get_rank() == 0:
            reshard_checkpoint(folder / "shards", folder / "again", tp=tp, progress=False)
            if _merges(session):
                plain.save_pretrained(folder / "plain")
                merge_checkpoint(folder / "again", folder / "merged", progress=False)
                found = list(_files(folder / "merged", folder / "plain"))
        dist.barrier()
        with torch.no_grad():
            before = {name: local(mine).clone() for name, mine, _ in pairs(session)}
            for _, mine, _ in pairs(session):
                mine.zero_()
        session.parallel.from_parallelized(folder / "again")
    loaded = weights(session)[0]
    with torch.no_grad():
        for name, mine, _ in pairs(session):
            if not hasattr(mine, "full_tensor"):
                mine.copy_(before[name])  # where loading fails, what follows is not to fail with it
    rows = [replace(loaded, check="reshard", what=f"loaded from tp {tp}")]
    merged = worst_row("reshard", f"merged from tp {tp}", found, session.allowed, show=False)
    return [*rows, merged] if _merges(session) else rows


def _merges(session: Session) -> bool:
    """Return whether the model has a merged checkpoint: transformers' own do, without adapters on quantized weights."""
    adapted = any(".base_layer" in path for path in stored_weights(session.plain))
    return isinstance(session.plain, PreTrainedModel) and not adapted


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that all ranks know; they are on one machine, or share where temporary files are. No progress bars."""
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    place = of_first(tempfile.mkdtemp(prefix="autopar-verify-") if dist.get_rank() == 0 else "")
    try:
        yield Path(place)
    finally:
        if shown:
            transformers.logging.enable_progress_bar()
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)


def _files(mine: Path, plain: Path) -> Iterator[Named]:
    """Compare the tensors of two checkpoints, one at a time."""
    theirs, ours = _tensors(plain), _tensors(mine)
    for name in theirs.keys() ^ ours.keys():
        where = "is missing" if name in theirs else "is not one of the plain model's"
        yield Named(name, Distance(math.inf, where))
    for name in theirs.keys() & ours.keys():
        with safe_open(theirs[name], "pt") as one, safe_open(ours[name], "pt") as other:
            yield Named(name, measure(other.get_tensor(name), one.get_tensor(name)))


def _tensors(folder: Path) -> dict[str, Path]:
    """Name -> file."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found
