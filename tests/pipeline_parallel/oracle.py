"""A model in pipeline stages against the plain one, built from the same seed inside the same rank.

``check_pipeline(build, batches, ...)`` compares losses, every gradient after several steps without ``zero_grad``, and
the weights after an optimizer step.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from tests.exchange import everyones
from tests.parity import TOLERANCE, _everyones, close, reseed, total_loss


def whole_tensors(
    model: nn.Module, tensor_of: Callable[[nn.Parameter], torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """Name -> whole tensor on every rank, from all stages and all tensor-parallel shares."""
    plan, stages, mpu = model._autopar.plan, model._autopar.stages, model.mpu
    local = {n: tensor_of(p) for n, p in model.named_parameters()}
    present = {n: t.detach().clone() for n, t in local.items() if t is not None}
    parts = _everyones(present, plan, mpu.tp)
    mine: dict[str, Any] = dict.fromkeys(local)
    for name in present:
        layout = plan.tensors[plan.canonical(name)].layout
        shares = [part[name] for part in parts]
        for rank, share in enumerate(shares if layout is None else []):
            close(share, shares[0], f"{name}: replicated, but different on tp rank {rank}", 1e-6)
        mine[name] = shares[0] if layout is None else layout.unshard(shares)
    everyone = everyones(mine, mpu.pp.group) if mpu.pp.size > 1 else [mine]
    found: dict[str, torch.Tensor | None] = {}
    for rank, theirs in enumerate(everyone):
        for name, tensor in theirs.items():
            assert rank in stages.holders(name), f"{name} is on stage {rank}"
            if name in found:
                other = found[name]
                assert (tensor is None) == (other is None), f"{name}: on one stage only"
                assert tensor is None or torch.equal(tensor, other), f"{name}: stages hold different values"
            found[name] = tensor
    return found


def check_pipeline(
    build: Callable[[], nn.Module],
    batches: list[dict[str, Any]],
    *,
    tp: int = 1,
    pp: int = 2,
    tolerance: float = TOLERANCE,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    plain_batches: list[dict[str, Any]] | None = None,
    without: str = "",
    **config: Any,
) -> nn.Module:
    """Compare everything; returns the model in stages after one optimizer step.

    Args:
        without: an entry of the outputs that the last stage cannot give; it has no part in the loss.
    """

    def loss_of(outputs: Any) -> torch.Tensor:
        if "loss" in outputs:
            return total_loss({name: outputs[name] for name in outputs if name.endswith("loss")})
        return total_loss({name: outputs[name] for name in outputs if name != without} if without else outputs)

    make_optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3))
    plain = build().train()
    piped = copy.deepcopy(plain)
    made_before = make_optimizer(piped.parameters())
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    piped = autopar.initialize(piped, {"model_parallelism": sizes, **config})
    reference = make_optimizer(plain.parameters())
    dp = piped.mpu.dp
    for number, batch in enumerate(batches):
        reseed(number)
        expected = plain(**copy.deepcopy(batch))
        loss = loss_of(expected)
        loss.backward()
        mine = {k: _replica(v, dp) for k, v in batch.items()} if dp.size > 1 else batch
        reseed(number)
        out = piped.execute_pipeline(
            copy.deepcopy(mine), lambda outputs, inputs: loss_of(outputs), made_before, broadcast_loss=True
        )
        actual = out.loss
        if dp.size > 1:
            dist.all_reduce(actual, group=dp.group)
            actual /= dp.size
        close(actual, loss.detach(), "loss", tolerance)
    gradients = whole_tensors(piped, lambda parameter: parameter.grad)
    for name, parameter in plain.named_parameters():
        actual = gradients[name]
        assert (actual is None) == (parameter.grad is None), f"{name}: gradient present or missing"
        if actual is not None:
            close(actual, parameter.grad, f"gradient of {name}", tolerance)
    reference.step()
    made_before.step()
    weights = whole_tensors(piped, lambda parameter: parameter.data)
    for name, parameter in plain.named_parameters():
        close(weights[name], parameter.data, f"{name} after the step", tolerance)
    return piped


def _replica(value: Any, dp: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    return value.chunk(dp.size)[dp.rank]


def take_step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
