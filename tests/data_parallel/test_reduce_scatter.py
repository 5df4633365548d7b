"""``zero: {stage: 1, reduce_scatter: true}``: steps equal those of ``stage: 1``, and each gradient is on its owner."""

import copy
import math
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
from tests.exchange import raises_everywhere
from tests.features.experts.mixtures import mixtral
from tests.harness.worlds import pooled
from tests.parity import all_close, close, whole
from tests.small import gpt2, llama

IDS = torch.randint(0, 131, (24, 8), generator=torch.Generator().manual_seed(3))


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3, eps=1e-4)


def start(plain: Any, make: Any = adamw, reduces: bool = True, **config: Any) -> tuple[Any, Any]:
    model, config = copy.deepcopy(plain), {"zero": {"stage": 1, "reduce_scatter": reduces}, **config}
    config.setdefault("model_parallelism", {"cpu_transport": "gloo"})  # so that all buckets start in the backward
    return autopar.initialize(model, config, optimizer=make(model.parameters()))


def batch(model: Any, step: int) -> dict[str, torch.Tensor]:
    ids = IDS[6 * step % 24 :][: 2 * model.mpu.dp.size][model.mpu.dp.rank :: model.mpu.dp.size]
    return {"input_ids": ids, "labels": ids}


def loop(model: Any, optimizer: Any, step: int) -> None:
    """Two passes, of which the second one is averaged; a parameter is unused on one replica, then on all."""
    optimizer.scale_loss(model(**batch(model, step)).loss).backward()
    with autopar.average_in_backward(model):
        optimizer.scale_loss(model(**batch(model, step + 1)).loss).backward()
        unused = [p for name, p in model.named_parameters() if "0.ln_1" in name or "0.input_layernorm" in name]
        for p in unused if model.mpu.dp.rank or step == 3 else ():
            p.grad = None


def same(plain: Any, make: Any = adamw, clips: Any = None, **config: Any) -> tuple[Any, Any]:
    """Train both ways; without clipping, the weights of two replicas must have equal bits."""
    both = [start(plain, make, reduces, **config) for reduces in (False, True)]
    for step in range(4):
        norms = []
        for model, optimizer in both:
            if model.mpu.pp.size > 1:
                model.execute_pipeline(batch(model, step), optimizer=optimizer)
            else:
                loop(model, optimizer, step)
            norms += [clips(model.parameters(), 0.3)] if clips else []
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            assert p.grad is None or optimizer._autopar.owns(p)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        norms = [optimizer.gradient_norm for _, optimizer in both] if "gradient_clipping" in config else norms
        if norms:
            assert norms[0] > 0.4, "it clips"
            close(norms[1], norms[0], "norm", 1e-6)
        for (name, one), other in zip(both[0][0].named_parameters(), model.parameters(), strict=True):
            assert norms or model.mpu.dp_cp.size > 2 or torch.equal(one, other), (step, name)
            close(one.data, other.data, name, 1e-6)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=False))
    return both[1]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_two_replicas() -> None:
    plain = gpt2()
    plain.transformer.wpe.requires_grad_(False)
    same(plain, clips=clip_grad_norm_)
    with mock.patch.object(grad_sync, "_BUCKET", 4096):
        same(llama())
    for section in ({"gradient_clipping": 0.3}, {"precision": {"dtype": "fp16"}}, {"precision": {"dtype": "bf16"}}):
        same(gpt2(), **section)
    wide = {"cpu_transport": "gloo", "reduce_dtype": "fp32"}
    same(gpt2(), precision={"dtype": "bf16"}, model_parallelism=wide)


LORA = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
AXES: dict[str, Any] = {
    "tp": lambda: same(llama(), tp=2, gradient_clipping=0.3, model_parallelism={"sequence_parallel": True}),
    "pp": lambda: same(llama(tie_word_embeddings=True), pp=2, pipeline={"microbatch_size": 1}),
    "cp": lambda: same(llama(), clips=clip_grad_norm_, cp=2),
    "ep": lambda: same(mixtral(vocab_size=131), clips=clip_grad_norm_, ep=2),
    "muon": lambda: same(llama(), lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.02), tp=2),
    "lora": lambda: same(get_peft_model(llama(), LORA), tp=2, gradient_clipping=0.3),
}


@pytest.mark.every_case
@pooled(world_size=4)
@pytest.mark.parametrize("mesh", AXES)
def test_other_axes(mesh: str) -> None:
    AXES[mesh]()


@pooled(world_size=4)
def test_it_resumes_on_another_mesh(tmp_path: Path) -> None:
    (model, optimizer), (other, its) = same(llama(), tp=2), start(llama(seed=1))
    model.save_parallelized(tmp_path, optimizer=optimizer)
    other.from_parallelized(tmp_path, optimizer=its)
    for each, one in ((model, optimizer), (other, its)):
        each.execute_pipeline({"input_ids": IDS[:4], "labels": IDS[:4]})
        one.step()
    all_close(whole(other, lambda p: p.data), whole(model, lambda p: p.data), "{}")


@pooled(world_size=3)
def test_three_replicas_and_the_bytes_of_a_step() -> None:
    """A rank sends the gradients that other ranks own, each once, and the parameters that it owns."""
    model, optimizer = same(llama(), clips=clip_grad_norm_)
    elements, own = (sum(p.numel() for p in model.parameters() if optimizer._autopar.owns(p) or k) for k in (1, 0))
    model(**batch(model, 0)).loss.backward()
    names = ("all_to_all_single", "broadcast")
    with mock.patch.multiple(dist, **{name: mock.Mock(wraps=getattr(dist, name)) for name in names}):
        autopar.average_gradients(model)
        optimizer.step()
        called = {name: [call.args for call in getattr(dist, name).call_args_list] for name in names}
    assert sum(args[1].numel() for args in called["all_to_all_single"]) == elements - own
    assert sum(args[0].numel() for args in called["broadcast"] if args[1] == dist.get_rank()) == own


@pooled(world_size=2)
def test_an_overflow_on_one_replica_skips_the_step_on_all() -> None:
    for kind in (torch.amp.GradScaler, autopar.GradScaler):
        model, optimizer = start(gpt2())
        scaler = kind("cpu" if kind is torch.amp.GradScaler else model.mpu, init_scale=8.0)
        for overflow in (True, False):
            before = copy.deepcopy(model.transformer.wpe.weight)
            with autopar.average_in_backward(model):
                scaler.scale(model(**batch(model, 0)).loss).backward()
            if overflow and dist.get_rank() == 1:
                next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 4.0
            assert torch.equal(model.transformer.wpe.weight, before) == overflow


@pooled(world_size=2)
def test_gradients_that_were_averaged_otherwise_are_refused() -> None:
    model, optimizer = start(gpt2())
    DistributedDataParallel(model)(**batch(model, 0)).loss.backward()
    with raises_everywhere(ConsistencyError, "gradients were not averaged by autopar"):
        optimizer.step()
    optimizer.zero_grad()
    with autopar.average_in_backward(model):
        model(**batch(model, 0)).loss.backward()
    parameter = next(p for p, owner in optimizer._autopar.owners().items() if owner == 0)
    if dist.get_rank() == 1:
        parameter.grad = torch.zeros_like(parameter)
    place = f"Rank 1 has 1 that it does not own, first of {optimizer._autopar.names[parameter]}."
    with raises_everywhere(ConsistencyError, "gradients were not averaged by autopar", place):
        optimizer.step()
    loss = model(**batch(model, 1)).loss
    with raises_everywhere(ConsistencyError, "were averaged twice"), autopar.average_in_backward(model):
        loss.backward()
    optimizer.zero_grad()
    loop(model, optimizer, 0)
    with raises_everywhere(ConsistencyError, "were averaged twice without zero_grad"):
        autopar.average_gradients(model)
