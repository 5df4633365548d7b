"""Steps of whole parameters, sharded and on one process: from equal gradients, and in training."""

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import autopar
from tests.compare import same_weights
from tests.data_parallel.whole_optimizers import MATRICES_ONLY
from tests.small import gpt2, llama

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
    if kind in ("AdaGradNorm", "Prodigy"):
        config["optimizer"] = {"across_parameters": True}
    model, optimizer = autopar.initialize(model, {"tp": dist.get_world_size(), **config}, optimizer=optimizer)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for step in range(5):
        set_gradients(plain, step)
        reference.step()
    torch.set_rng_state(state)
    for step in range(5):
        set_gradients(model, step)
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


def goes_on(meshes: Iterable[dict[str, Any]], make: Callable[[Any], Optimizer], folder: Path) -> None:
    """Step twice on each mesh from what the one before has saved: the bits are those of one process."""
    plain = gpt2()
    reference, saved = make(list(plain.parameters())), None
    for number, mesh in enumerate(meshes):
        model = gpt2(seed=number)
        model, optimizer = autopar.initialize(model, mesh, optimizer=make(list(model.parameters())))
        if saved is not None:
            model.from_parallelized(saved, optimizer=optimizer)
        for step in (2 * number, 2 * number + 1):
            for each, stepping in ((plain, reference), (model, optimizer)):
                set_gradients(each, step)
                stepping.step()
        saved = folder / str(number)
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
