"""Optimizers that are not element by element, as papers and users write them: small, with state of their own."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.optim import Optimizer

State = dict[str, Any]
Update = Callable[[State, nn.Parameter, torch.Tensor], torch.Tensor]


class Own(Optimizer):
    """Subtracts ``lr`` times what ``update(state, parameter, gradient)`` returns."""

    def __init__(self, params: Iterable[Any], update: Update, lr: float = 0.02) -> None:
        self.update = update
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(group["lr"] * self.update(state, parameter, parameter.grad))


def _adam(state: State, gradient: torch.Tensor) -> torch.Tensor:
    first = state.setdefault("first", torch.zeros_like(gradient))
    second = state.setdefault("second", torch.zeros_like(gradient))
    first.lerp_(gradient, 0.1)
    second.lerp_(gradient.square(), 0.05)
    return (first / (1 - 0.9 ** state["step"])) / ((second / (1 - 0.95 ** state["step"])).sqrt() + 1e-3)


def lamb(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    update = _adam(state, g)
    return update * p.norm().clamp(0.01, 10) / update.norm().clamp(min=1e-6)


def lars(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    buffer: torch.Tensor = state.setdefault("buffer", torch.zeros_like(g))
    return buffer.mul_(0.9).add_(g * p.norm() / (g.norm() + 1e-6)).clone()


def cautious(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    update = _adam(state, g)
    mask = (update * g > 0).to(g.dtype)
    return update * mask / mask.mean().clamp(min=1e-3)


def clipped(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    update = _adam(state, g)
    return update / update.square().mean().sqrt().clamp(min=0.5)


def orthogonal(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    """Muon with Newton-Schulz in fp64; momentum for other shapes."""
    momentum = state.setdefault("momentum", torch.zeros_like(g)).lerp_(g, 0.1)
    if g.ndim != 2:
        return momentum
    x = momentum.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = x.T if g.shape[0] > g.shape[1] else x
    return x.to(g.dtype) * max(1.0, g.shape[0] / g.shape[1]) ** 0.5


def _root(matrix: torch.Tensor, power: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=1e-4) ** power) @ vectors.T


def shampoo(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    if g.ndim != 2:
        return g
    sides = state.setdefault("sides", [torch.eye(size, dtype=torch.float64) for size in g.shape])
    left, right = sides[0].add_((g @ g.T).double()), sides[1].add_((g.T @ g).double())
    return (_root(left, -0.25) @ g.double() @ _root(right, -0.25)).to(g.dtype)


def soap(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    """Adam in the eigenbasis of the smaller of Shampoo's matrices."""
    if g.ndim != 2:
        return _adam(state, g)
    square = (g @ g.T if g.shape[0] <= g.shape[1] else g.T @ g).double()
    mean = state.setdefault("square", torch.zeros_like(square)).lerp_(square, 0.1)
    mean = mean + torch.diag(torch.arange(len(mean), dtype=torch.float64) * 1e-3)  # eigenvalues that differ
    basis = torch.linalg.eigh(mean)[1].to(g.dtype)
    inside = basis.T @ g if g.shape[0] <= g.shape[1] else g @ basis
    update = _adam(state, inside)
    return basis @ update if g.shape[0] <= g.shape[1] else update @ basis.T


def galore(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    """Adam on a projection of low rank, which is made anew every third step."""
    if g.ndim != 2:
        return _adam(state, g)
    if state["step"] % 3 == 1:
        state["projection"] = torch.linalg.svd(g.double(), full_matrices=False)[0][:, :4].to(g.dtype)
    return state["projection"] @ _adam(state, state["projection"].T @ g)


def blocks(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    """Momentum in 8 bits: a scale for each 64 numbers in a row."""
    count = -(-g.numel() // 64)
    old = state.get("codes")
    momentum = torch.zeros(count * 64) if old is None else (old.view(count, 64) * state["scales"][:, None]).view(-1)
    momentum = 0.9 * momentum + nn.functional.pad(g.reshape(-1), (0, count * 64 - g.numel()))
    state["scales"] = momentum.view(count, 64).abs().amax(1).clamp(min=1e-8) / 127
    state["codes"] = (momentum.view(count, 64) / state["scales"][:, None]).round().to(torch.int8).view(-1)
    return (state["codes"].view(count, 64) * state["scales"][:, None]).view(-1)[: g.numel()].view_as(g)


def rows(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    return g / (g.norm(dim=-1, keepdim=True) + 1e-3)


def centred(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    return g - g.mean(0, keepdim=True)


class Fromage(Optimizer):
    """Keeps the norm of each matrix; its own defaults by the number of inputs."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = group["lr"] / p.shape[-1] ** 0.5
                    p.sub_(scale * p.grad * p.norm() / (p.grad.norm() + 1e-6)).div_((1 + scale**2) ** 0.5)


class AdaGradNorm(Optimizer):
    """One rate for all parameters, from the norm of all gradients so far."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = self.param_groups[0]["total"] + float(sum(p.grad.double().square().sum() for p in found))
        for group in self.param_groups:
            group["total"] = total
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / total**0.5 * p.grad)


class Prodigy(Optimizer):
    """A distance to the solution that all parameters estimate together."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "above": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        d, above, below = self.param_groups[0]["d"], self.param_groups[0]["above"], 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                start = state.setdefault("start", p.clone())
                total = state.setdefault("total", torch.zeros_like(p)).add_(d * p.grad)
                above += d * float((p.grad.double() * (start - p).double()).sum())
                below += float(total.double().abs().sum())
                p.sub_(group["lr"] * d * p.grad)
        d = max(d, above / below) if below else d
        for group in self.param_groups:
            group["d"], group["above"] = d, above


class Noisy(Optimizer):
    """Gradients with noise (Langevin)."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * (p.grad + 0.1 * torch.randn_like(p)))


_UPDATES = (lamb, lars, cautious, clipped, orthogonal, shampoo, soap, galore, blocks, rows, centred)
MATRICES: dict[str, Callable[[Any], Optimizer]] = {
    **{update.__name__: partial(Own, update=update) for update in _UPDATES},
    "fromage": Fromage,
    "Muon": partial(torch.optim.Muon, lr=0.02),
    "Muon like Adam": partial(torch.optim.Muon, lr=0.01, adjust_lr_fn="match_rms_adamw", nesterov=False),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.02),
    "Adafactor of transformers": partial(transformers.Adafactor, lr=0.02, relative_step=False, scale_parameter=True),
    "Adafactor without a rate": partial(transformers.Adafactor, relative_step=True, warmup_init=True),
}
MATRICES_ONLY = ("Muon", "Muon like Adam")
ACROSS: dict[str, Callable[[Any], Optimizer]] = {"AdaGradNorm": AdaGradNorm, "Prodigy": Prodigy, "Noisy": Noisy}
