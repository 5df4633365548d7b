"""The auxiliary loss of a mixture's routers over the batches of all replicas and of all ranks of a sequence.

Fedus et al., "Switch Transformers" (2021), equations 4 to 6, multiply the fraction of tokens of each expert by its mean
probability. A product of means over all batches differs from the mean of the products of replicas. So both vectors are
summed over the ranks with identical weights before the multiplication. Gradients are averaged over these ranks later,
so the gradient of the local part is scaled by their number.

Models of transformers call ``load_balancing_loss_func`` of their module, which is patched here. A function with another
result on a sample stays unpatched.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.compat.patches import hold, patch_member, patches, release
from autopar.compat.transformers import ROUTER_LOSS, router_loss_module
from autopar.distributed.failures import FailureLog
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.setup.steps import Given, Parallelized
from autopar.swap import NotCopied, replaced

_balancing: contextvars.ContextVar[RouterLoss | None] = contextvars.ContextVar("balancing", default=None)


def balance_routers(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Compute the routers' loss from the batches of all replicas. The step runs before the model is split."""
    inner = state.inner_of(model)
    module = balancing_module(inner) if state.mpu.dp_cp.size > 1 else None
    if module is not None:
        apart = state.config.loss_router_aux == "replica"
        state.features["router_loss"] = RouterLoss(inner, module, state.mpu, state.failures, apart=apart)
        state.undo.append(lambda model, own: own.features.pop("router_loss").remove())


class RouterLoss(NotCopied):
    """The auxiliary loss of one model over the ranks with identical weights; every rank must create one.

    Args:
        apart: True if each replica balances only its own tokens.
    """

    def __init__(self, model: nn.Module, module: ModuleType, mpu: MPU, failures: FailureLog, *, apart: bool) -> None:
        self.axis, self.failures, self.apart = mpu.dp_cp, failures, apart
        self._factor, self._always = 1.0, False
        self._before: contextvars.Token[RouterLoss | None] | None = None
        hold(self)
        if all(patch.name != f"{module.__name__}.{ROUTER_LOSS}" for patch in patches()):
            patch_member(module, ROUTER_LOSS, _loss)
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, model: nn.Module, _: Any) -> None:
        trains = model.training and torch.is_grad_enabled()
        self._before = _balancing.set(self if trains or self._always else None)

    def _leave(self, *_: Any) -> None:
        if self._before is not None:
            _balancing.reset(self._before)
            self._before = None

    def over_ranks(
        self, logits: tuple[torch.Tensor, ...], experts: int, k: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the loss over the batches of all ranks, identical on all ranks. A collective of the axis."""
        chosen, probability, rows = _sums(logits, experts, k, mask)
        own = torch.cat([chosen, probability.detach(), rows.view(1)])
        total = own.clone()
        with self.failures.wait("the routers' auxiliary loss over replicas", self.axis.ranks):
            all_reduce(total, group=self.axis.group)
        chosen, others, rows = total[:experts], total[experts:-1], total[-1]
        probability = probability * self.axis.size
        probability = others + (probability - probability.detach())
        return _product(chosen, probability, rows)

    def share_of_sum(self, shares: int) -> AbstractContextManager[None]:
        """Divide the loss inside by ``shares``, and sum over ranks in evaluation too, which all ranks must run."""
        return replaced(vars(self), {"_factor": 1 / shares, "_always": True})

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        release(self)


def _loss(plain: Any, logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None) -> Any:
    """Compute the auxiliary loss: the body of the patched ``load_balancing_loss_func``."""
    over = _balancing.get()
    if over is None or not isinstance(logits, tuple) or num_experts is None:
        return plain(logits, num_experts, top_k, attention_mask)
    if over.apart:
        return plain(logits, num_experts, top_k, attention_mask) * over._factor
    return over.over_ranks(logits, num_experts, top_k, attention_mask) * over._factor


def _sums(
    logits: tuple[torch.Tensor, ...], experts: int, k: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the number of choices and the summed probability of each expert, and the number of tokens over all layers.

    Args:
        logits: Logits of each layer, ``[tokens, experts]``.
        k: Number of experts per token.
        mask: Mask of the tokens that count, ``[batch, seq]``; None counts all tokens.
    """
    device = logits[0].device
    weight = None if mask is None else mask.reshape(-1).to(device, torch.float32)
    chosen, rows = torch.zeros(experts, device=device), torch.zeros((), device=device)
    probability = torch.zeros(experts, device=device)
    for layer in logits:
        p = torch.softmax(layer.to(device), dim=-1)
        w = torch.ones(len(p), device=device) if weight is None else weight
        ids = torch.topk(p.detach(), k, dim=-1).indices
        chosen = chosen.index_add(0, ids.reshape(-1), w.repeat_interleave(k))
        probability = probability + (p.float() * w.unsqueeze(-1)).sum(0)
        rows = rows + w.sum()
    return chosen, probability, rows


def _product(chosen: torch.Tensor, probability: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return len(chosen) * torch.sum(chosen / rows * (probability / rows))


def balancing_module(model: nn.Module) -> ModuleType | None:
    """Return the module of transformers whose function computes this auxiliary loss for ``model``, or None."""
    module = router_loss_module(model)
    function = getattr(module, ROUTER_LOSS, None)
    return module if function is not None and is_switch_loss(getattr(function, "__wrapped__", function)) else None


def is_switch_loss(function: Callable[..., Any]) -> bool:
    """Return whether a function computes the same as :class:`RouterLoss` on samples with and without a mask."""
    drawn = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=drawn) for _ in range(2))
    for mask in (None, torch.tensor([[1, 1, 0], [1, 0, 1]])):
        try:
            found = function(logits, 4, 2, mask)
        except Exception:  # the function has other arguments
            return False
        if not isinstance(found, torch.Tensor) or not torch.allclose(found, _product(*_sums(logits, 4, 2, mask))):
            return False
    return True
