"""Compare weights, outputs, tokens, gradients, a step and checkpoints with the reference model: ``verify``'s checks.

The last check compares random draws. Replicated activations must get identical draws, and shards must get different
draws, at the rates of the reference model. The check compares generator states, because one process cannot reproduce
the draws of several tensor-parallel ranks. With pipeline stages alone it compares outputs.
"""

from __future__ import annotations

import copy
import hashlib
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from autopar.checkpoint.offline import merge_checkpoint, reshard_checkpoint
from autopar.compat.peft import plain_name
from autopar.compat.tensors import in_backward, local_part as shard_of
from autopar.data_parallel.gradients import average_gradients
from autopar.distributed.collectives import gathered
from autopar.distributed.digest import of_tensor
from autopar.dry_run.operators import arguments_of
from autopar.errors import type_and_text
from autopar.plan.tensors import followed_form
from autopar.storage.progress import hidden_bars
from autopar.stored import stored_weights
from autopar.tensor_tracking import TensorTracking, tensors_in
from autopar.tools.derivation.trace import running
from autopar.tools.verification.outputs import (
    OF_GRADIENTS,
    Distance,
    floats_of,
    local,
    local_part,
    measure,
    named,
    of_first,
    reseed,
    same_floats,
    size_of_loss,
)
from autopar.tools.verification.recording import recording_of
from autopar.tools.verification.report import RankMemory, Row
from autopar.tools.verification.session import Session, switched_on

_SMALL = 0.05  # fraction of the largest gradient or step; the minimum scale of differences
_TOKENS = 6  # to generate
_PADDING = 2  # tokens of left padding of the first prompt


class Named(NamedTuple):
    """The distance of a tensor from the reference model's tensor."""

    name: str
    distance: Distance


def worst_row(check: str, what: str, found: Iterable[Named], allowed: float, *, show: bool = True) -> Row:
    """Return a row for the largest distance. With ``show``, name the tensor even if the comparison passes."""
    listed = list(found)
    worst = max(listed, key=lambda each: each.distance.relative, default=None)
    if worst is None:
        return Row(check, what, None, note="this rank has no tensors")
    (relative, problem), holds = worst.distance, worst.distance.relative <= allowed
    failing = sum(each.distance.relative > allowed for each in listed)
    name = worst.name if show or not holds else ""
    return Row(check, what, holds, relative, allowed, name, problem, failing=failing, of=len(listed))


def weights(session: Session) -> list[Row]:
    """Compare the weights of this rank with the shards of the reference model, bit by bit."""
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
    """Yield name, this rank's parameter and the reference model's parameter. Skip quantized parameters."""
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
    nothing = Row("forward", "outputs", False, note="the model returns no floating-point tensors")
    return _output_rows("forward", _outputs(expected, actual), session.tolerance) or [nothing]


def _outputs(expected: Any, actual: Any) -> list[Named]:
    missing = Distance(math.inf, "the output is missing")
    pairs = same_floats(expected, actual)
    return [Named(name, missing if mine is None else measure(mine, theirs)) for name, theirs, mine in pairs]


def _output_rows(check: str, found: list[Named], allowed: float) -> list[Row]:
    """Return one row each for the logits, the loss and all other outputs."""
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
        with recording_of(session.mpu.tp, session.mpu.dp_cp) as sent:  # keep the last batch
            actual, own = session.train_parallel(number)
        assert own is not None
        floor = _SMALL * size_of_loss(expected, session.lacking)  # terms may cancel, except for rounding
        losses.append(Named(f"batch {number}", measure(session.mean_loss(number, own), loss, floor)))
        if actual is not None and session.mpu.dp.size == 1:
            outputs += [each for each in _outputs(expected, actual) if not each.name.endswith("loss")]
    with recording_of(session.mpu.tp, session.mpu.dp_cp) as averaged:
        if not session.piped and session.mpu.cp.size > 1:  # execute_pipeline averages them
            average_gradients(session.parallel)
    session.sent = [*sent, *averaged]
    rows = [worst_row("backward", "loss", losses, session.tolerance, show=False)]
    rows += [row for row in _output_rows("backward", outputs, session.tolerance) if row.what != "loss"]
    allowed = OF_GRADIENTS * session.tolerance
    scale = (session.config.precision == "fp16" and getattr(session.optimizers[1], "loss_scale", None)) or 1.0
    return [*rows, worst_row("backward", "worst gradient", gradients(session, scale), allowed)]


def gradients(session: Session, scale: float = 1.0) -> Iterator[Named]:
    """Compare the gradients of this rank's parameters, divided by ``scale``, with the reference model's shards."""
    floor = _SMALL * _largest_gradient(session.plain)
    for name, mine, theirs in pairs(session):
        if (mine.grad is None) != (theirs.grad is None):
            lacking = "only the reference model has one" if mine.grad is None else "the reference model has none"
            has_zero = theirs.grad is not None and not theirs.grad.any()
            elsewhere = mine.grad is None and not mine.numel()  # other ranks have all rows
            if not has_zero and not elsewhere:
                yield Named(name, Distance(math.inf, f"gradient mismatch: {lacking}"))
        elif mine.grad is not None and theirs.grad is not None:
            expected = local_part(session.plan, name, theirs.grad, session.mpu.shards.rank)
            yield Named(name, measure(local(mine.grad) / scale, expected, floor))


def _largest_gradient(model: nn.Module) -> float:
    found = (p.grad.abs().max().item() for p in model.parameters() if p.grad is not None and p.grad.numel())
    return max(found, default=0.0)


# -- step -------------------------------------------------------------------------------------------------------------


def step(session: Session) -> list[Row]:
    """Compare the changes of the weights in an optimizer step. Runs after :func:`backward`."""
    before = {name: local(mine).clone() for name, mine, _ in pairs(session)}
    plain, parallel = session.optimizers
    largest = of_first(_largest_gradient(session.plain))
    for group in (*plain.param_groups, *parallel.param_groups):
        group["eps"] = 0.1 * largest or 1.0  # a small eps amplifies rounding errors to a full AdamW step
    if session.config.gradient_clipping:
        torch.nn.utils.clip_grad_norm_(session.plain.parameters(), session.config.gradient_clipping)
    plain.step()
    with recording_of(session.mpu.tp, session.mpu.dp_cp) as sent:
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
        start = before[name] if session.exact else 0  # half-precision weights are rounded
        changes.append((name, local(mine) - start, expected - start, expected))
    largest = max((change.abs().max().item() for _, _, change, _ in changes if change.numel()), default=0.0)
    for name, own, wanted, weight in changes:
        rounding = torch.finfo(weight.dtype).eps if weight.is_floating_point() else 0.0
        size = weight.abs().max().item() if weight.numel() else 0.0
        floor = max(_SMALL * largest, 2 * rounding * size / session.tolerance / OF_GRADIENTS)
        yield Named(name, measure(own, wanted, floor))


def memory_of(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> RankMemory:
    """Count the bytes of weights, gradients and optimizer state."""
    held = [parameter for parameter in model.parameters() if not parameter.is_meta]
    kinds = (held, [parameter.grad for parameter in held], list(optimizer.state.values()))
    return RankMemory(rank, *(sum(shard_of(x).nbytes for x in tensors_in(kind)) for kind in kinds))


# -- generation -------------------------------------------------------------------------------------------------------


def prompt_of(session: Session) -> dict[str, Any]:
    """Return the inputs of the first batch without labels. For text-only models, left-pad the first prompt."""
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
    """Generate tokens greedily. Return tokens and logits."""
    model.eval()
    reseed(0)
    settings: dict[str, Any] = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS, "do_sample": False}
    if "pixel_values" not in inputs:  # some models set a custom value
        settings["pad_token_id"] = 0
    with torch.no_grad():
        return model.generate(  # type: ignore[operator]
            **copy.deepcopy(inputs), **settings, return_dict_in_generate=True, output_logits=True
        )


def generate(session: Session) -> list[Row]:
    """Compare generated tokens and their logits."""
    model, reason = session.plain, ""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        reason = f"{type(model).__name__} does not support generate"
    elif session.mpu.cp.size > 1:
        reason = "context parallelism does not support generate"
    elif "input_ids" not in session.batches[0]:
        reason = "the batch has no input_ids"
    if reason:
        return [Row("generate", "tokens", None, note=reason)]
    inputs = prompt_of(session)
    try:
        expected = generated(session.plain, inputs)
    except Exception as error:  # not caused by parallelism
        return [Row("generate", "tokens", None, note=f"the reference model fails: {type_and_text(error, 120)}")]
    actual = generated(session.parallel, inputs)
    same = torch.equal(actual.sequences, expected.sequences)
    mine, theirs = (output.sequences[0, -_TOKENS:].tolist() for output in (actual, expected))
    note = "" if same else f"expected {theirs}, got {mine}"
    rows = [Row("generate", "tokens", same, note=note)]
    logits = [
        Named(f"token {number}", Distance(math.inf, "missing") if own is None else measure(own, wanted))
        for number, (wanted, own) in enumerate(zip(expected.logits or (), actual.logits or (), strict=False), 1)
    ]
    return [*rows, worst_row("generate", "logits", logits, session.tolerance, show=False)] if logits else rows


def save(session: Session) -> list[Row]:
    """Save a merged checkpoint. Compare its names and bits with the reference model's checkpoint."""
    if not _merges(session):
        adapted = "merging does not support quantized weights with adapters"
        why = adapted if stored_weights(session.plain) else "the model has no save_pretrained"
        return [Row("save", "merged checkpoint", None, note=why)]
    with _folder() as folder:
        session.parallel.save_parallelized(folder / "merged", merge_checkpoints=True)
        found = list[Named]()
        if dist.get_rank() == 0:
            _save_plain(session, folder / "plain")
            found = list(_files(folder / "merged", folder / "plain"))
        dist.barrier()
    return [worst_row("save", "merged checkpoint", found, session.allowed, show=False)]


def reshard(session: Session) -> list[Row]:
    """Save shards, reshard them for a different tp size, merge the result, and load it into the model."""
    tp = 3 if session.mpu.tp.size != 3 else 2
    with _folder() as folder:
        session.parallel.save_parallelized(folder / "shards")
        found = list[Named]()
        if dist.get_rank() == 0:
            reshard_checkpoint(folder / "shards", folder / "again", tp=tp, progress=False)
            if _merges(session):
                _save_plain(session, folder / "plain")
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
                mine.copy_(before[name])  # later checks must not fail because of a failed load
    rows = [replace(loaded, check="reshard", what=f"loaded from tp {tp}")]
    if _merges(session):
        rows.append(worst_row("reshard", f"merged from tp {tp}", found, session.allowed, show=False))
    return rows


def _merges(session: Session) -> bool:
    """Return whether the model supports merged checkpoints."""
    adapted = any(".base_layer" in path for path in stored_weights(session.plain))
    return isinstance(session.plain, PreTrainedModel) and not adapted


def _save_plain(session: Session, folder: Path) -> None:
    """Save the reference model. Keep its in-memory names if their conversion for files is unsupported."""
    plain: Any = session.plain
    names = {own: name for name in session.plan.tensors if (own := plain_name(plain, name)) is not None}
    try:
        followed_form(plain, names)
    except (RuntimeError, ValueError):
        plain.save_pretrained(folder, save_original_format=False)
    else:
        plain.save_pretrained(folder)


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a temporary folder that all ranks share, and disable progress bars inside the block."""
    place = of_first(tempfile.mkdtemp(prefix="autopar-verify-") if dist.get_rank() == 0 else "")
    try:
        with hidden_bars():
            yield Path(place)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)


def _files(mine: Path, plain: Path) -> Iterator[Named]:
    """Compare the tensors of two checkpoints."""
    theirs, ours = _tensors(plain), _tensors(mine)
    for name in theirs.keys() ^ ours.keys():
        where = "is missing" if name in theirs else "is not in the reference checkpoint"
        yield Named(name, Distance(math.inf, where))
    for name in theirs.keys() & ours.keys():
        yield Named(name, measure(ours[name], theirs[name]))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


# -- random draws -----------------------------------------------------------------------------------------------------

_RATE = 0.2  # for a model whose rates are all 0


class Draw(NamedTuple):
    """A random draw: its module, its shape, the generator state before it, and its rate (0: not dropout)."""

    module: str
    shape: tuple[int, ...]
    state: str
    rate: float


class _Draws(TensorTracking):
    """Record random draws. :attr:`backward` has the draws of recomputed blocks."""

    def __init__(self, stack: Sequence[str] = ()) -> None:
        super().__init__()
        self.stack, self.forward, self.backward = stack, list[Draw](), list[Draw]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            named = arguments_of(func, args, kwargs)
            tensors, fused = list(tensors_in(list(named.values()))), "dropout_p" in named
            given = named.get("dropout_p" if fused else "p")
            rate = given if type(given) is float else 0.0
            rate = 1 - rate if func.__name__.startswith("bernoulli") and type(given) is float else rate
            if tensors and (rate or not fused):
                x = tensors[0]
                shape = (*x.shape[:-1], tensors[1].shape[-2]) if fused else tuple(x.shape)  # shape of the scores
                draw = Draw(self.stack[-1] if self.stack else "", shape, generator_state(x.device), rate)
                (self.backward if in_backward() else self.forward).append(draw)
        return func(*args, **kwargs)


def generator_state(device: torch.device) -> str:
    """Return a digest of the state of a device's default generator."""
    on_host = device.type in ("cpu", "meta")
    state = torch.get_rng_state() if on_host else torch.get_device_module(device).get_rng_state(device)
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


class Place(NamedTuple):
    """The coordinates of a rank in its replica."""

    pp: int
    cp: int
    tp: int


def wrong_draws(plain: Sequence[Draw], everyone: Mapping[Place, Sequence[Draw]]) -> Iterator[tuple[str, str]]:
    """Yield module and problem of each draw that wrongly differs, or is wrongly identical, on different ranks.

    Args:
        plain: The draws of the reference model. Draws of a different shape are shards.
        everyone: The draws of each rank of a replica.
    """
    expected = _by_module(plain)
    by_rank = {place: _by_module(draws) for place, draws in everyone.items()}
    for module in {name: None for found in (expected, *by_rank.values()) for name in found}:
        draws_of_plain = expected.get(module, [])
        stages = {place.pp for place, found in by_rank.items() if module in found}
        ranks = [place for place in everyone if place.pp in stages]
        counts = [len(by_rank[place].get(module, [])) for place in ranks or everyone]
        if not draws_of_plain or not all(counts) or any(count % len(draws_of_plain) for count in counts):
            listed = ", ".join(map(str, counts))
            yield module, f"draws {listed} times on the ranks, {len(draws_of_plain)} times in the reference model"
            continue
        for number, full in enumerate(draws_of_plain):
            held = {place: _joined(by_rank[place][module], number, len(draws_of_plain)) for place in ranks}
            draws = list(held.values())
            if any(draw.rate != full.rate for draw in draws):
                yield module, f"has a dropout rate of {draws[0].rate:g}, expected {full.rate:g}"
            elif any(draw.shape != full.shape for draw in draws):
                if not _are_apart(held):
                    yield module, f"draws identical numbers on ranks with different shards {list(draws[0].shape)}"
            elif len({draw.state for draw in draws}) > 1:
                yield module, "draws different numbers on ranks with the same activation"


def _by_module(draws: Sequence[Draw]) -> dict[str, list[Draw]]:
    found: dict[str, list[Draw]] = {}
    for draw in draws:
        found.setdefault(draw.module, []).append(draw)
    return found


def _joined(draws: Sequence[Draw], number: int, count: int) -> Draw:
    """Return one of ``count`` draws of a module. Attention over two sequence shards draws twice."""
    runs = len(draws) // count
    parts = draws[number * runs : (number + 1) * runs]
    if runs == 1:
        return parts[0]
    rate = parts[0].rate if len({part.rate for part in parts}) == 1 else -1.0
    return parts[0]._replace(shape=(runs, *parts[0].shape), rate=rate)  # the first state identifies all runs


def _are_apart(holders: Mapping[Place, Draw]) -> bool:
    """Return whether the draws of all ranks differ, or differ along one axis and are identical along the other."""
    states = {place: draw.state for place, draw in holders.items()}
    if len(set(states.values())) == len(states):
        return True
    for along in ("cp", "tp"):
        pairs = {(getattr(place, along), state) for place, state in states.items()}
        if 1 < len(pairs) == len({place for place, _ in pairs}) == len({state for _, state in pairs}):
            return True
    return False


def dropout(session: Session) -> list[Row]:
    """Compare the random draws of the ranks with the reference model, with dropout on."""
    tp, pp, cp = session.mpu.tp, session.mpu.pp, session.mpu.cp
    if tp.size == pp.size == cp.size == 1:
        return [Row("dropout", "random draws", None, note="requires tp, pp or cp above 1")]
    with switched_on((session.plain, session.parallel), session.rates, _RATE) as switched:
        if not switched:
            return [Row("dropout", "random draws", None, note="the model has no dropout")]
        rows = _of_stages(session) if tp.size == cp.size == 1 else _of_ranks(session)
        if session.config.activation_checkpointing and rows[0].holds is not None:
            with _Draws() as draws:
                session.train_parallel(0)
            session.zero_gradients()
            others = set(draws.backward) - set(draws.forward)
            drawn = f"{len(others)} of {len(draws.backward)} differ from the forward" if others else ""
            note = drawn if draws.backward else "recomputation draws no random numbers"
            rows += [Row("dropout", "recomputed draws", not others if draws.backward else None, note=note)]
    return rows


def _of_stages(session: Session) -> list[Row]:
    """Compare outputs with the reference model, which draws from the streams of the stages."""
    plain, expected = _run(session, session.plain)
    _, outputs = _run(session, session.parallel)
    if not plain:
        return [Row("dropout", "random draws", None, note="the model has no dropout")]
    pairs = same_floats(expected, outputs)
    found = [Named(name, measure(theirs, own)) for name, own, theirs in pairs if theirs is not None]
    row = worst_row("dropout", "outputs, with the same random draws", found, session.tolerance, show=False)
    others = "a stage draws other numbers than the reference model, or in another order"
    return [row if row.holds is not False or row.note else replace(row, note=others)]


def _of_ranks(session: Session) -> list[Row]:
    """Compare the states and rates of draws over all ranks of a replica, then generator states and outputs."""
    session.evaluate(session.parallel, copy.deepcopy(session.own_part(session.batches[0])))  # the first may run twice
    plain, _ = _run(session, session.plain)
    mine, outputs = _run(session, session.parallel)
    mpu = session.mpu
    place, after = Place(mpu.pp.rank, mpu.cp.rank, mpu.tp.rank), generator_state(mpu.device)
    digest = repr([of_tensor(value + 0) for _, value in floats_of(outputs)])
    everyone = gathered((place, mine, after, digest), mpu.model.group)
    if not plain:
        return [Row("dropout", "random draws", None, note="the model has no dropout")]
    draws = {at: _comparable(session, found) for at, found, _, _ in everyone}
    plain = _comparable(session, plain)
    module, wrong = next(wrong_draws(plain, draws), ("", ""))
    note = f"{module or 'the model'} {wrong}" if wrong else f"{len(plain)} draws"
    return [
        Row("dropout", "random draws", not wrong, name=module, note=note),
        _row_alike("generator states after the forward", {(at.pp, state) for at, _, state, _ in everyone}),
        _row_alike("outputs of all ranks", {(at.pp, text) for at, _, _, text in everyone}),
    ]


def _comparable(session: Session, draws: list[Draw]) -> list[Draw]:
    """Return the draws outside of experts. One rank computes an expert for the tokens of all ranks."""
    inside = tuple(f"{path}." for path, rule in session.plan.modules.items() if rule.rule == "expert_modules")
    return [draw for draw in draws if not draw.module.startswith(inside)] if inside else draws


def _row_alike(what: str, found: set[tuple[int, str]]) -> Row:
    """Return a row that fails if the ranks of a stage differ."""
    same = len(found) == len({stage for stage, _ in found})
    return Row("dropout", what, same, note="" if same else "the ranks of one stage differ")


def _run(session: Session, model: nn.Module) -> tuple[list[Draw], Any]:
    """Return the draws and outputs of a forward in training mode. The reference model draws like the stages."""
    model.train()
    reseed(7)
    batch = copy.deepcopy(session.own_part(session.batches[0]))
    streams = session.drawing_as_stages() if model is session.plain else nullcontext()
    with session.own_failure(model), streams, running(model) as stack, _Draws(stack) as draws, torch.no_grad():
        outputs = named(model(**batch))
    return [draw for draw in draws.forward if draw.rate], outputs
