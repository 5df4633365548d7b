"""``zero: {stage: 1, reduce_scatter: true}``: steps equal those of ``stage: 1``, and each gradient is on its owner."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar.data_parallel import grad_sync
from autopar.errors import ConsistencyError
from tests.data_parallel.whole_optimizers import MATRICES
from tests.parity import close, whole
from tests.pool import pooled
from tests.small import gpt2, llama
from tests.worlds import raises_everywhere

IDS = torch.randint(0, 131, (24, 8), generator=torch.Generator().manual_seed(3))
_Step = Callable[[Any, Any, int], float]


def adamw(parameters: Any) -> Any:
    named = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(named, lr=1e-3, eps=1e-4)


def muon(parameters: Any) -> Any:
    return MATRICES["Muon"]([p for p in parameters if p.ndim == 2])


def start(plain: Any, make: Any = adamw, reduce_scatter: bool = True, **config: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(plain)
    config["zero"] = {"stage": 1, "reduce_scatter": reduce_scatter}
    model, optimizer = autopar.initialize(model, config, optimizer=make(model.parameters()))
    return model, optimizer


def batch(model: Any, step: int) -> dict[str, torch.Tensor]:
    dp = model.mpu.dp
    ids = IDS[6 * step % 24 :][: 2 * dp.size][dp.rank :: dp.size]
    return {"input_ids": ids, "labels": ids}


def loop(model: Any, optimizer: Any, step: int) -> float:
    """Two passes, of which the second one is averaged; a parameter is unused on one replica, then on all."""
    optimizer.scale_loss(model(**batch(model, step)).loss).backward()
    loss = optimizer.scale_loss(model(**batch(model, step + 1)).loss)
    inside = step % 2 == 0
    with autopar.average_in_backward(model) if inside else nullcontext():
        loss.backward()
        unused = [p for name, p in model.named_parameters() if "0.ln_1" in name or "0.input_layernorm" in name]
        for p in unused if model.mpu.dp.rank or step == 3 else ():
            p.grad = None
    if not inside:
        autopar.average_gradients(model)
    return 0.0


def clipping(model: Any, optimizer: Any, step: int) -> float:
    loop(model, optimizer, step)
    return clip_grad_norm_(model.parameters(), 0.3).item()


def pipeline(model: Any, optimizer: Any, step: int) -> float:
    model.execute_pipeline(batch(model, step), optimizer=optimizer)
    return autopar.clip_grad_norm_(model, 0.3).item()


def same(plain: Any, run: _Step = loop, make: Any = adamw, **config: Any) -> tuple[Any, Any]:
    """Train both ways; without clipping, the weights of two replicas must have equal bits."""
    both = [start(plain, make, way, **config) for way in (False, True)]
    for step in range(4):
        norms = [run(model, optimizer, step) for model, optimizer in both]
        model, optimizer = both[1]
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            assert parameter.grad is None or optimizer._autopar.owns(parameter)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        exact = model.mpu.dp_cp.size == 2 and run is loop and "gradient_clipping" not in config
        if not exact:
            norms += [o.gradient_norm.item() for _, o in both if o.gradient_norm is not None]
            assert norms[-2] == pytest.approx(norms[-1], rel=1e-6) and norms[-1] > 0.4, "it clips"
        one, other = (dict(model.named_parameters()) for model, _ in both)
        for name in one:
            assert not exact or torch.equal(one[name], other[name]), (step, name)
            close(one[name].data, other[name].data, name, 1e-6)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=False))
    return both[1]


def adapted() -> Any:
    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def frozen() -> Any:
    model = gpt2()
    model.transformer.wpe.requires_grad_(False)
    return model


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_two_replicas() -> None:
    for build, make, run in ((frozen, adamw, clipping), (adapted, adamw, clipping), (gpt2, muon, loop)):
        same(build(), run, make)
    with mock.patch.object(grad_sync, "_BUCKET_ON_CPU", 4096):
        same(llama())
    for section in ({"gradient_clipping": 0.3}, {"precision": {"dtype": "fp16"}}, {"precision": {"dtype": "bf16"}}):
        same(gpt2(), **section)


@pooled(world_size=3)
def test_three_replicas() -> None:
    same(gpt2(), clipping)
    same(llama(), pipeline)


@pooled(world_size=4)
@pytest.mark.parametrize("mesh", ["tp", "pp", "cp", "muon", "lora"])
def test_other_axes(mesh: str) -> None:
    if mesh == "pp":
        same(llama(tie_word_embeddings=True), pipeline, pp=2, pipeline={"microbatch_size": 1})
    elif mesh == "cp":
        same(llama(), clipping, cp=2)
    else:
        build, make = {"tp": (llama, adamw), "muon": (llama, muon), "lora": (adapted, adamw)}[mesh]
        same(build(), make=make, tp=2)
        same(build(), make=make, tp=2, gradient_clipping=0.3, model_parallelism={"sequence_parallel": True})


@pooled(world_size=4)
def test_it_resumes_on_another_mesh(tmp_path: Path) -> None:
    model, optimizer = same(llama(), tp=2)
    model.save_parallelized(tmp_path, optimizer=optimizer)
    other, its = start(llama(seed=1))
    other.from_parallelized(tmp_path, optimizer=its)
    for each, one in ((model, optimizer), (other, its)):
        ids = IDS[:4]
        with autopar.average_in_backward(each):
            each(ids, labels=ids).loss.backward()
        one.step()
    there = whole(other, lambda p: p.data)
    for name, weight in whole(model, lambda p: p.data).items():
        close(there[name], weight, name)


@pooled(world_size=3)
def test_bytes_of_a_step() -> None:
    """A rank sends the gradients that other ranks own, each once, and the parameters that it owns to each of them."""
    model, optimizer = start(gpt2())
    elements = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for p in model.parameters() if optimizer._autopar.owns(p))
    model(**batch(model, 0)).loss.backward()
    with (
        mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as gradients,
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as weights,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces,
    ):
        autopar.average_gradients(model)
        optimizer.step()
    assert sum(call.args[1].numel() for call in gradients.call_args_list) == elements - own
    sent = [call.args[0].numel() for call in weights.call_args_list if call.args[1] == dist.get_rank()]
    assert sum(sent) == own
    assert all(call.args[0].dtype == torch.int64 for call in reduces.call_args_list)  # agreements


@pooled(world_size=2)
def test_an_overflow_on_one_replica_skips_the_step_on_all() -> None:
    for kind in (torch.amp.GradScaler, autopar.GradScaler):
        model, optimizer = start(gpt2())
        scaler = kind("cpu" if kind is torch.amp.GradScaler else model.mpu, init_scale=8.0)
        for overflow in (True, False):
            before = copy.deepcopy(model.state_dict())
            with autopar.average_in_backward(model):
                scaler.scale(model(**batch(model, 0)).loss).backward()
            if overflow and dist.get_rank() == 1:
                next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 4.0
            assert overflow == all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pooled(world_size=2)
def test_gradients_that_were_averaged_otherwise_are_refused() -> None:
    model, optimizer = start(gpt2())
    before = copy.deepcopy(model.state_dict())
    loss = DistributedDataParallel(model)(**batch(model, 0)).loss
    loss.backward()
    with raises_everywhere(ConsistencyError, "gradients were not averaged by autopar"):
        optimizer.step()
    autopar.average_gradients(model)
    for early in (False, True):
        loss = model(**batch(model, 1)).loss
        with raises_everywhere(ConsistencyError, "were averaged twice without zero_grad"):
            with autopar.average_in_backward(model) if early else nullcontext():
                loss.backward()
            autopar.average_gradients(model)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
