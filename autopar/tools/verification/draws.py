"""Random draws: dropout of replicated activations draws alike on all tensor-parallel ranks, of sharded ones apart.

Stages draw from streams of their own, which the plain model can be given: then it drops the same elements. Where ranks
have rows of sequences, and on stages with tensor parallelism, it is given their masks (:mod:`.replayed_draws`).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.distributed.digest import of_tensor
from autopar.tools.verification.closeness import measure
from autopar.tools.verification.dropout_rates import switched_on
from autopar.tools.verification.outputs import floats_of, named, reseed, same_floats
from autopar.tools.verification.recording import running
from autopar.tools.verification.replayed_draws import recomputed, replayed
from autopar.tools.verification.report import Row
from autopar.tools.verification.session import Session
from autopar.tools.verification.training import Named, worst_row

__all__ = ["Draw", "dropout", "wrong_draws"]

_OTHERS = "a stage draws other numbers than the plain model, or in another order"
_RATE = 0.2  # where a model has none that is on
_DROPOUTS = (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout_)


class Draw(NamedTuple):
    """One draw: by which module, of which shape, and from which state of the generator."""

    module: str
    shape: tuple[int, ...]
    state: str


class _Draws(TorchFunctionMode):
    """Notes the draws of dropout and of attention with dropout."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack, self.found = stack, list[Draw]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS and _on(args, kwargs):
            self._note(args[0] if args else kwargs["input"])
        elif func is F.scaled_dot_product_attention and _probability(args, kwargs) > 0:
            self._note(args[0] if args else kwargs["query"])
        return func(*args, **kwargs)

    def _note(self, x: torch.Tensor) -> None:
        generator = (
            torch.get_rng_state() if x.is_cpu or x.is_meta else torch.get_device_module(x.device).get_rng_state()
        )
        state = hashlib.blake2b(generator.numpy().tobytes(), digest_size=8).hexdigest()
        self.found.append(Draw(self.stack[-1] if self.stack else "", tuple(x.shape), state))


def _on(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(training) and p > 0


def _probability(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    return float(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def wrong_draws(plain: Sequence[Draw], everyone: Sequence[Sequence[Draw]]) -> Iterator[tuple[str, str]]:
    """Yield module and problem of each draw that is alike where it must differ, or the other way round. Pure.

    Args:
        plain: the draws of the plain model, whose shapes say what is sharded.
        everyone: those of each tensor-parallel rank.
    """
    counts = {len(draws) for draws in everyone}
    if counts != {len(plain)}:
        listed = ", ".join(str(len(draws)) for draws in everyone)
        yield "", f"the ranks draw {listed} times, the plain model {len(plain)} times"
        return
    for number, expected in enumerate(plain):
        draws = [draws[number] for draws in everyone]
        states = {draw.state for draw in draws}
        sharded = any(draw.shape != expected.shape for draw in draws)
        if sharded and len(states) < len(draws):
            yield (
                expected.module,
                f"draws alike on tensor-parallel ranks that hold different parts {list(draws[0].shape)}",
            )
        elif not sharded and len(states) > 1:
            yield expected.module, "draws differently on tensor-parallel ranks that hold the same activation"


def dropout(session: Session) -> list[Row]:
    """Compare what the ranks draw with what the plain model does.

    Of tensor-parallel ranks the states of their generators, and that replicated outputs stay equal. The plain model
    that is given the streams of stages, or the masks of ranks that have rows of sequences, drops the same elements.
    """
    tp, pp, cp = session.mpu.tp, session.mpu.pp, session.mpu.cp
    if tp.size == pp.size == cp.size == 1:
        return [Row("dropout", "random draws", None, note="only ranks of a model do")]
    with switched_on((session.plain, session.parallel), session.rates, _RATE) as switched:
        if not switched:
            return [Row("dropout", "random draws", None, note="the model has no dropout")]
        rows = replayed(session) if cp.size > 1 or (tp.size > 1 and pp.size > 1) else _compared(session)
        if session.config.activation_checkpointing and rows[0].holds is not None:
            rows += recomputed(session)
    return rows


def _compared(session: Session) -> list[Row]:
    """The draws of tensor-parallel ranks by their states, or those of stages by what they make of the outputs."""
    tp = session.mpu.tp
    plain, expected = _run(session, session.plain)
    mine, outputs = _run(session, session.parallel)
    if not plain:
        return [Row("dropout", "random draws", None, note="the model has no dropout")]
    if tp.size == 1:
        pairs = same_floats(expected, outputs)
        found = [Named(name, measure(theirs, own)) for name, own, theirs in pairs if theirs is not None]
        row = worst_row("dropout", "outputs, with the plain model's draws", found, session.tolerance, show=False)
        return [row if row.holds is not False or row.note else replace(row, note=_OTHERS)]
    everyone: list[Any] = [None] * tp.size
    digest = repr([of_tensor(value + 0) for _, value in floats_of(outputs)])
    dist.all_gather_object(everyone, (mine, digest), group=tp.group)
    wrong = list(wrong_draws(plain, [draws for draws, _ in everyone]))
    note = f"{wrong[0][0] or 'the model'} {wrong[0][1]}" if wrong else f"{len(plain)} draws"
    same = len({digest for _, digest in everyone}) == 1
    return [
        Row("dropout", "random draws", not wrong, name=wrong[0][0] if wrong else "", note=note),
        Row("dropout", "outputs of all ranks", same, note="" if same else "they differ between tensor-parallel ranks"),
    ]


def _run(session: Session, model: nn.Module) -> tuple[list[Draw], Any]:
    """The draws of a forward in training mode, and what it returns."""
    model.train()
    reseed(7)
    batch = copy.deepcopy(session.own_part(session.batches[0]))
    streams = session.drawing_as_stages() if model is session.plain else nullcontext()
    with session.own_failure(model), streams, running(model) as stack, _Draws(stack) as draws, torch.no_grad():
        return draws.found, named(model(**batch))
