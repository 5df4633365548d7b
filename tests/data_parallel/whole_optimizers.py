"""Optimizers that are not element by element, as papers and users write them, and steps of them and of one process."""

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed import checkpoint
from torch.optim import Optimizer

import autopar
from autopar.checkpoint import to_dtensor_training_state
from tests.compare import same_weights
from tests.small import gpt2, llama

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


def orthogonal(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    """Muon with Newton-Schulz in fp64; momentum for other shapes."""
    momentum = state.setdefault("momentum", torch.zeros_like(g)).lerp_(g, 0.1)
    if g.ndim != 2:
        return momentum
    x = _newton_schulz(momentum, (3.4445, -4.7750, 2.0315), 5, 1e-7)
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


def noisy(state: State, p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
    return g + 0.1 * torch.randn_like(p)


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


MATRICES: dict[str, Callable[[Any], Optimizer]] = {
    **{update.__name__: partial(Own, update=update) for update in (lamb, orthogonal, shampoo, galore, blocks)},
    "Muon": partial(torch.optim.Muon, lr=0.02),
    "Muon like Adam": partial(torch.optim.Muon, lr=0.01, adjust_lr_fn="match_rms_adamw", nesterov=False),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.02),
    "Adafactor of transformers": partial(transformers.Adafactor, lr=0.02, relative_step=False, scale_parameter=True),
    "Adafactor without a rate": partial(transformers.Adafactor, relative_step=True, warmup_init=True),
}
MATRICES_ONLY = ("Muon", "Muon like Adam")
ACROSS: dict[str, Callable[[Any], Optimizer]] = {"Prodigy": Prodigy, "noisy": partial(Own, update=noisy)}


IDS = torch.randint(0, 131, (40, 9), generator=torch.Generator().manual_seed(3))
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: gpt2(n_layer=1),  # fused q | k | v as in a Conv1D, tied embeddings, 9 heads
    "llama": lambda: llama(num_hidden_layers=1, num_key_value_heads=1),  # one KV head on all ranks
}


def stepped(model: nn.Module, kind: str) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2 or kind not in MATRICES_ONLY]


def set_gradients(model: nn.Module, seed: int) -> None:
    """Give each parameter its part of the same whole gradient."""
    state = vars(model).get("_autopar")
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        due = None if state is None else state.plan.tensors[state.plan.canonical(name)]
        whole = torch.randn(parameter.shape if due is None else due.shape, generator=generator).to(parameter.dtype)
        layout = None if due is None else due.layout
        parameter.grad = whole if layout is None else layout.shard(whole, model.mpu.tp.rank)


def equal_bits(model: Any, plain: nn.Module, what: str) -> None:
    weights = dict(autopar.deparallelize(model).named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(weights[name], parameter), f"{what}: {name}"


def from_equal_gradients(build: Callable[[], Any], make: Callable[[Any], Optimizer], kind: str, **config: Any) -> Any:
    plain, model = build(), build()
    reference, optimizer = make(stepped(plain, kind)), make(stepped(model, kind))
    if kind == "Prodigy":
        config["optimizer"] = {"across_parameters": True}
    model, optimizer = autopar.initialize(model, {"tp": dist.get_world_size(), **config}, optimizer=optimizer)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for step in range(5):
        set_gradients(plain, step * (kind != "Prodigy"))  # whose distance grows with equal gradients only
        reference.step()
    torch.set_rng_state(state)
    for step in range(5):
        set_gradients(model, step * (kind != "Prodigy"))
        optimizer.step()
    return model, plain, optimizer


def train(
    build: Callable[[], Any], make: Callable[[Any], Optimizer], config: dict[str, Any], steps: int = 5
) -> tuple[Any, nn.Module, Optimizer]:
    plain = build()
    model = copy.deepcopy(plain)
    reference, optimizer = make(list(plain.parameters())), make(list(model.parameters()))
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    dp, limit = model.mpu.dp, config.get("gradient_clipping", 0.0)
    for step in range(steps):
        batch = IDS[4 * step : 4 * step + 4]
        mine = batch[dp.rank :: dp.size]
        for half in (batch[:2], batch[2:]):
            (plain(half, labels=half).loss / 2).backward()
        if model.mpu.pp.size > 1:
            model.execute_pipeline({"input_ids": mine, "labels": mine})
        else:
            for half in (mine[: len(mine) // 2], mine[len(mine) // 2 :]):
                (model(half, labels=half).loss / 2).backward()
            autopar.average_gradients(model)
        if limit:
            nn.utils.clip_grad_norm_([p for group in reference.param_groups for p in group["params"]], limit)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    return model, plain, optimizer


def goes_on(
    meshes: Iterable[dict[str, Any]], make: Callable[[Any], Optimizer], folder: Path, dcp: bool = False
) -> None:
    """Step twice on each mesh from what the one before has saved: the bits are those of one process."""
    plain = gpt2()
    reference, saved = make(list(plain.parameters())), None
    for number, mesh in enumerate(meshes):
        model = gpt2(seed=number)
        model, optimizer = autopar.initialize(model, mesh, optimizer=make(list(model.parameters())))
        if saved is not None and dcp:
            checkpoint.load(to_dtensor_training_state(model, optimizer), checkpoint_id=saved)
        elif saved is not None:
            model.from_parallelized(saved, optimizer=optimizer)
        for step in (2 * number, 2 * number + 1):
            for each, stepping in ((plain, reference), (model, optimizer)):
                set_gradients(each, step)
                stepping.step()
        saved = folder / str(number)
        if dcp:
            checkpoint.save(to_dtensor_training_state(model, optimizer), checkpoint_id=saved)
        else:
            model.save_parallelized(saved, optimizer=optimizer)
        same_weights(model, plain, 0.0, when=str(mesh))
        autopar.deparallelize(model)


def _newton_schulz(direction: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
    a, b, c = coefficients
    x = direction.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if direction.shape[0] > direction.shape[1] else x


@contextmanager
def precise_muon() -> Iterator[None]:
    """Let torch's Muon iterate in fp64: in bfloat16 the last bit of a gradient may move a weight by 1e-4."""
    with mock.patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", _newton_schulz):
        yield
