"""Run the reference model and this rank's parallelized model on the same inputs, for the checks of ``verify``."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

import autopar.api
from autopar.compat.tensors import Dropout
from autopar.config import ParallelConfig
from autopar.data_parallel.precision import DTYPES
from autopar.distributed import gloo_collectives
from autopar.distributed.collectives import run
from autopar.distributed.digest import sync_parameters
from autopar.distributed.rng import base_seed
from autopar.errors import type_and_text
from autopar.pipeline_parallel.microbatch import label_count, loss_in
from autopar.pipeline_parallel.outputs import unavailable
from autopar.pipeline_parallel.stage_forward import Streams
from autopar.plan.stages import StagePlan
from autopar.policy.load import read_user_policy
from autopar.policy.match import DERIVE
from autopar.policy.schema import Policy
from autopar.stored import stored_weights
from autopar.tensor_parallel.apply import draw_seeds_alike
from autopar.tensor_tracking import TensorTracking, tensors_in
from autopar.tools.verification.batches import Batch, fit, on_device, part_of
from autopar.tools.verification.outputs import Slices, named, reseed, tolerance_of, total_loss
from autopar.tools.verification.recording import Collective
from autopar.tools.verification.report import RankMemory

_USUAL = ("p", "dropout", "attention_dropout")
_LAYERS = re.compile(r"layer_?drop")


class Rate(NamedTuple):
    """A dropout rate; ``place``: the path of its module, or ``config``."""

    place: str
    owner: Any
    name: str
    value: float

    def set(self, value: float) -> None:
        """Set the rate. Keep the type of 0, because configs may declare integers."""
        setattr(self.owner, self.name, type(self.value)(0) if value == 0 else float(value))


def rates(model: nn.Module) -> list[Rate]:
    """Return all dropout rates of a model: ``p`` of dropouts, and ``*drop*`` of modules and their configs."""
    found = list[Rate]()
    owners: dict[int, tuple[str, Any]] = {id(module): (path, module) for path, module in model.named_modules()}
    open_ = [getattr(module, "config", None) for module in model.modules()]
    for config in open_:
        if isinstance(config, PretrainedConfig) and id(config) not in owners:
            owners[id(config)] = ("config", config)
            open_ += vars(config).values()
    for place, owner in owners.values():
        for name, value in vars(owner).items():
            called = "drop" in name or "jitter" in name or (name == "p" and isinstance(owner, Dropout))
            if called and type(value) in (float, int):
                found.append(Rate(place, owner, name, value))
    return found


def switch_off(model: nn.Module) -> list[Rate]:
    """Set all rates to 0, and return them with their previous values."""
    found = rates(model)
    for rate in found:
        rate.set(0)
    return found


@contextmanager
def switched_on(models: Sequence[nn.Module], known: Sequence[Rate], default: float) -> Iterator[bool]:
    """Enable dropout inside the block, and yield whether the model has any dropout.

    The rates are the ``known`` rates, or ``default`` if all of them are 0. Layer dropout stays off, because the two
    models would drop different layers.
    """
    values = {(rate.place, rate.name): rate.value for rate in known if rate.value and not _LAYERS.search(rate.name)}
    if all(place == "config" and "att" not in name for place, name in values):
        values = {}  # modules have their own copies; no module reads these
    found = [rate for model in models for rate in rates(model)]
    for rate in found:
        own = default if rate.place != "config" and rate.name in _USUAL else 0.0
        rate.set(values.get((rate.place, rate.name), 0.0) if values else own)
    try:
        yield bool(values) or any(rate.place != "config" and rate.name in _USUAL for rate in found)
    finally:
        for rate in found:
            rate.set(0)


_RATE = 1e-2  # learning rate; a step changes fp32 weights by much more than rounding


class PlainModelError(Exception):
    """The reference model does not run, so there is nothing to compare."""


class Session:
    """The reference model and the parallelized model on this rank.

    Args:
        model: The full model, which is only read.
        batches: The model's arguments, with the samples of all replicas.

    Attributes:
        plain, parallel, rates: The reference and the parallelized model, without dropout, and their original rates.
        exact, allowed: A flag, set if weights keep the reference dtype, and the maximum difference of weights.
        lacking: The outputs that the last stage does not have (:meth:`find_lacking`).
        piped: A flag, set if ``execute_pipeline`` runs the batches, with several stages or replicas.
        sent: The collectives of the last batch and the step.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ParallelConfig,
        policy: str | Mapping[str, Any] | Policy | None,
        batches: Sequence[Batch],
    ) -> None:
        self.plain = copy.deepcopy(model)
        self.batches = list(batches)
        self.rates: list[Rate] = switch_off(self.plain)
        given = None if policy in (None, DERIVE) else read_user_policy(policy)
        self.parts, self.config = fit(self.plain, config, self.batches, given)
        self.parallel: Any = copy.deepcopy(self.plain)
        plain, parallel = (torch.optim.AdamW(m.parameters(), lr=_RATE) for m in (self.plain, self.parallel))
        self.optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] = plain, parallel
        self.parallel, _ = autopar.api.initialize(self.parallel, self.config, policy=policy, optimizer=parallel)
        self.state, self.mpu = self.parallel._autopar, self.parallel.mpu
        draw_seeds_alike(self.plain)  # else each process uses a different seed
        self.plain.to(self.mpu.device)
        sync_parameters(self.plain, self.mpu)  # the parallel model has rank 0's weights
        self.plan, self.stages = self.state.plan, self.state.stages
        self.policy = str(self.state.policy.where)
        self.slices = Slices(self.plan, self.mpu)
        self.batches = [on_device(batch, self.mpu.device) for batch in self.batches]
        half = DTYPES.get(config.precision)
        dtypes = {parameter.dtype for parameter in self.plain.parameters() if parameter.is_floating_point()}
        if dtypes == {torch.float64}:
            with _Dtypes() as computed:  # code may compute norms and losses in float32
                self.evaluate(self.plain, self.batches[0])
            dtypes |= computed.found
        if any(stored.kind.takes_rows for stored in stored_weights(self.plain).values()):
            dtypes.add(torch.float16)  # such layers round their inputs to fp16, and then to 8 bits
        self.tolerance = tolerance_of(*dtypes, *([half] if half is not None else []))
        self.exact = half is None
        self.allowed = 0.0 if self.exact else self.tolerance
        self.piped = self.mpu.pp.size > 1 or self.mpu.dp.size > 1
        self.lacking: tuple[str, ...] = ()
        self.sent: list[Collective] = []
        self.memory: RankMemory | None = None
        self.plain_memory: RankMemory | None = None
        self.has_loss = loss_in(self.evaluate(self.plain, self.batches[0])) is not None

    # -- evaluation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> Any:
        """Run a forward without gradients, in evaluation mode."""
        model.eval()
        reseed(0)
        with self.own_failure(model):
            return named(model(**copy.deepcopy(dict(batch))))  # some models modify their labels

    @contextmanager
    def own_failure(self, model: nn.Module) -> Iterator[None]:
        """Raise PlainModelError if the reference model raises an error."""
        try:
            yield
        except Exception as error:
            if model is not self.plain:
                raise
            raise PlainModelError(f"the reference model raises {type_and_text(error, 200)}") from error

    # -- training --------------------------------------------------------------------------------------------------

    def find_lacking(self) -> None:
        """Find outputs that the last stage does not have. They are left out of the loss."""
        if self.mpu.pp.size > 1 and not self.has_loss:
            self.lacking = unavailable(self.evaluate(self.parallel, self.own_part(self.batches[0])))

    def train_plain(self, number: int) -> tuple[Any, torch.Tensor]:
        """Run forward and backward of the reference model on one batch. Return outputs and loss."""
        self.plain.train()
        losses = []
        for part in range(self.parts):
            reseed(number)  # every replica uses this seed
            with self.own_failure(self.plain), self.drawing_as_stages():
                output = named(self.plain(**part_of(copy.deepcopy(dict(self.batches[number])), part, self.parts)))
            losses.append(self.loss_of(output) / self.parts)
            losses[-1].backward()
        return output, torch.stack(losses).sum().detach()

    @contextmanager
    def drawing_as_stages(self) -> Iterator[None]:
        """Make the reference model draw the same random numbers as the parallel model's stages, for one micro-batch."""
        if self.stages is None or self.stages.stages == 1:
            yield
            return
        with base_seed() as seed, switching(self.plain, self.stages, Streams(seed, self.stages.stages)):
            yield

    def loss_of(self, output: Any) -> torch.Tensor:
        """Return the model's loss over replicas and micro-batches; without one, a weighted sum of all outputs."""
        own = loss_in(output) if self.piped else None
        return total_loss(output, self.lacking) if own is None else own

    def criterion(self, outputs: Any, inputs: Batch) -> torch.Tensor:
        """Return the loss of a micro-batch for a model without a loss."""
        return total_loss(outputs, self.lacking)

    def train_parallel(self, number: int) -> tuple[Any, torch.Tensor | None]:
        """Run forward and backward on this replica's samples. Return outputs (on the last stage) and loss."""
        self.parallel.train()
        reseed(number)
        batch = copy.deepcopy(self.own_part(self.batches[number]))
        scale: Callable[[torch.Tensor], torch.Tensor] = getattr(self.optimizers[1], "scale_loss", lambda loss: loss)
        if self.piped:
            criterion = None if self.has_loss else self.criterion
            out = self.parallel.execute_pipeline(
                batch, criterion, self.optimizers[1], return_outputs=True, broadcast_loss=True
            )
            return out.outputs, out.loss
        output = named(self.parallel(**batch))
        loss = total_loss(output)
        scale(loss).backward()
        return output, loss.detach()

    def mean_loss(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean of the replicas' losses, weighted by the number of labels, in the same way as gradients."""
        dp = self.mpu.dp
        if dp.size == 1:
            return loss
        pipeline = self.state.pipeline(self.parallel)
        sums = torch.stack([loss.double(), torch.ones_like(loss).double()])
        if self.parts == 1:
            sums *= label_count(self.own_part(self.batches[number]), pipeline.main_input, pipeline.loss.shifted)
        run(gloo_collectives.all_reduce, dp, sums)
        return (sums[0] / sums[1]).to(loss.dtype)

    def own_part(self, batch: Batch) -> dict[str, Any]:
        """Return the samples of this replica."""
        return part_of(batch, self.mpu.dp.rank, self.mpu.dp.size)

    def zero_gradients(self) -> None:
        """Clear the gradients of both models."""
        for model in (self.plain, self.parallel):
            for parameter in model.parameters():
                parameter.grad = None


class _Dtypes(TensorTracking):
    """Record the dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[torch.dtype]()

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.found |= {x.dtype for x in tensors_in(result) if x.is_floating_point()}


@contextmanager
def switching(model: nn.Module, plan: StagePlan, streams: Streams) -> Iterator[None]:
    """Make the reference model draw random numbers as stages do: hooks switch ``streams`` where a stage begins."""
    modules = dict(model.named_modules(remove_duplicate=False))
    with ExitStack() as hooks, streams.front():
        if plan.encoder is not None:
            encoder = modules[plan.elements[plan.encoder]]
            hooks.callback(encoder.register_forward_hook(lambda *_: streams.decoder()).remove)
        for number, start in enumerate(plan.bounds[1:-1], 1):

            def begin(*_: Any, number: int = number) -> None:
                streams.stage(number)

            if start - 1 == plan.encoder:
                hooks.callback(modules[plan.elements[start]].register_forward_pre_hook(begin).remove)
            else:
                hooks.callback(modules[plan.elements[start - 1]].register_forward_hook(begin).remove)
        yield
