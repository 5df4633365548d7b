"""Shards that user code reads as if they were full parameters: a warning for each line, and none for what is right."""

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

import autopar
from autopar.checkpoint import ShardedDict
from autopar.errors import ConfigError
from autopar.features.user_code.reads import ShardedParameter, ShardedTensor, switch, unwatch
from tests.exchange import raises_everywhere
from tests.features.user_code.techniques import IDS, NOTICED, head, silent, told
from tests.harness.worlds import pooled
from tests.small import gpt2, llama, parallel


def trained() -> Any:
    model = parallel(llama(), 2).train()
    model(IDS, labels=IDS).loss.backward()
    return model


@pooled(world_size=2)
def test_each_line_is_told_once() -> None:
    rank = dist.get_rank()
    model = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    for name, technique in NOTICED.items():
        texts = told(technique, model)
        assert len(texts) == 1, (name, texts)
        assert f"sees the shard of tensor-parallel rank {rank}: shape (" in texts[0]
        assert "autopar.full_params(model, " in texts[0]
        model.load_state_dict(before)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
    texts = told(NOTICED["norm"], trained())
    rows, held = ("(66, 24)", "0 to 65") if rank == 0 else ("(65, 24)", "66 to 130")
    words = f"sees the shard of tensor-parallel rank {rank}: shape {rows} of (131, 24), {held} of"
    assert texts[0].startswith(f"norm of lm_head.weight {words}")
    assert '`with autopar.full_params(model, "lm_head.weight"):`, inside which it and its gradient are' in texts[0]
    assert "autopar.full_tensor(parameter)" in texts[0] and "get_total_norm" in texts[0]


def weights_are_averaged(model: Any, average: dict[str, torch.Tensor]) -> None:
    for name, p in model.named_parameters():
        average[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        average[name].lerp_(p, 0.01)


def own_update(model: Any, average: dict[str, torch.Tensor]) -> None:
    for p in model.parameters():
        p.data -= 0.1 * p.grad
        p.data = p.data - 0.01 * p.grad.data
        p.grad = p.grad.clamp(-1, 1) + 0.01 * p.detach()


def meta_step(model: Any, average: dict[str, torch.Tensor]) -> None:
    inputs = dict(model.named_parameters())
    gradients = torch.autograd.grad(model(IDS, labels=IDS).loss, list(inputs.values()))
    moved = {name: p - 0.1 * gradient for (name, p), gradient in zip(inputs.items(), gradients, strict=True)}
    torch.func.functional_call(model, moved, (IDS,), {"labels": IDS}).loss.backward()


def pulled_to_the_start(model: Any, average: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.grad.add_(p - average[name], alpha=0.1)
            p.mul_(1 - 0.01)
            p.copy_(torch.where(p.abs() < 1e-3, torch.zeros_like(p), p))
            p[p.abs() < 1e-3] = 0


def rows_by_themselves(model: Any, average: dict[str, torch.Tensor]) -> None:
    """Normalise rows, of which each rank has all of some."""
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.div_(weight.norm(dim=1, keepdim=True))
        weight[:, 3] = 0
        nn.init.zeros_(model.model.norm.weight)


def steps(model: Any, average: dict[str, torch.Tensor]) -> None:
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop]
    for kind in kinds:
        for how in ({"foreach": True}, {"foreach": False}, *[{"fused": True}] * (kind is not torch.optim.RMSprop)):
            optimizer = kind(model.parameters(), lr=1e-3, **how)
            model(IDS, labels=IDS).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()


def sizes_and_losses_by_element(model: Any, average: dict[str, torch.Tensor]) -> None:
    weight = model.lm_head.weight
    assert weight.size(1) == 24 and len(weight.size()) == 2
    weight.grad.add_(F.mse_loss(weight.detach(), average["lm_head.weight"], reduction="none"))
    kept = torch.zeros_like(weight).scatter_(1, weight.abs().topk(12, dim=1).indices, 1.0)  # a row is on one rank
    weight.data.mul_(kept)


SILENT = (sizes_and_losses_by_element, weights_are_averaged, own_update, meta_step, pulled_to_the_start)


@pooled(world_size=2)
def test_elementwise_code_is_silent_and_the_same() -> None:
    model = parallel(llama(), 2).train()
    plain = copy.deepcopy(model)
    for p in plain.parameters():
        unwatch(p)
    results = []
    with silent():
        for each in (model, plain):
            torch.manual_seed(0)
            average = {name: p.detach().clone() for name, p in each.named_parameters()}
            for technique in (*SILENT, rows_by_themselves, steps):
                each(IDS, labels=IDS).loss.backward()
                technique(each, average)
            results.append((average, each.state_dict()))
    assert any(type(p) is ShardedParameter for p in model.parameters())
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pooled(world_size=2)
def test_what_is_saved_is_plain_and_told(tmp_path: Path) -> None:
    model = trained()
    with silent():
        kept = {"data": head(model).data, "half": head(model).detach() * 0.5, "parameter": head(model)}
        assert type(kept["half"]) is ShardedTensor and repr(kept["half"]).startswith("tensor(")
    file = io.BytesIO()
    with pytest.warns(autopar.ShardWarning, match=r"torch.save or pickle of values of lm_head.weight sees the shard"):
        torch.save(kept, file)
    with silent():
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert type(loaded["half"]) is torch.Tensor and type(loaded["parameter"]) is nn.Parameter
        assert b"autopar" not in file.getvalue() and torch.equal(loaded["half"], head(model) / 2)
        file = io.BytesIO()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.save({"model": model.state_dict()}, file)
        assert len(found) == 1 and "state_dict() is written to a file" in str(found[0].message)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert all(type(tensor) is torch.Tensor for tensor in loaded["model"].values())
        assert type(copy.deepcopy(kept["half"])) is ShardedTensor
        assert type(copy.copy(kept["half"])) is torch.Tensor
        own = nn.Parameter(head(model).detach() * 2)
        assert type(own) is nn.Parameter and own.is_leaf and own.requires_grad
        assert f"rank {dist.get_rank()}'s shard of (131, 24)" in repr(head(model))
    copied = copy.deepcopy(model)
    assert len(told(NOTICED["norm"], copied)) == 1
    for each in (copied, model):
        same = head(each)
        autopar.deparallelize(each)
        assert head(each) is same and type(same) is nn.Parameter and repr(same).startswith("Parameter containing:\n")


def norms_of_copies(model: Any) -> list[torch.Tensor]:
    """As a loop takes them that clips gradients of ``autograd.grad``, or logs how far weights have moved."""
    parameters = list(model.parameters())
    start = [p.detach().clone() for p in parameters]
    gradients = torch.autograd.grad(model(IDS, labels=IDS).loss, parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient.clone() * 0.5
    torch.optim.SGD(parameters, lr=0.1).step()
    moved = [p.detach() - old for p, old in zip(parameters, start, strict=True)]
    norm = nn.utils.get_total_norm
    both = norm([*parameters, *gradients, *moved])
    return [norm(gradients), norm([p.grad.clone() for p in parameters]), norm(moved), norm(parameters), both]


@pooled(world_size=2)
def test_full_tensors_and_the_models_own_code_are_silent(tmp_path: Path) -> None:
    model = trained()
    with silent():
        with autopar.full_params(model):
            head(model).norm(), head(model).grad.norm(), nn.init.normal_(head(model))
            head(model).data[:5] = 0
            head(model).data.abs().flatten().quantile(0.3)
        autopar.full_tensor(head(model)).norm().backward()
        autopar.full_tensor(head(model).grad).svd()
        model.model.norm.weight.norm()  # each rank has all of it
        model.model.layers[0].mlp(torch.ones(1, 2, 24)), model.lm_head(torch.ones(2, 24))  # layers know their shards
    with pytest.warns(autopar.ShardWarning, match="down_proj.weight"):
        model.model.layers[0].mlp.down_proj.weight.sum()

    with silent():
        for build in (llama, gpt2):
            model: Any = parallel(build(), 2, activation_checkpointing={"enable": True}).train()
            model(IDS, labels=IDS).loss.backward()
            model.tie_weights()
            model.generate(IDS, max_new_tokens=2, pad_token_id=0, attention_mask=torch.ones_like(IDS))
            assert autopar.clip_grad_norm_(model, 1.0) > 0
            model.get_input_embeddings()(IDS)
            model.load_state_dict(model.state_dict())
            folder = tmp_path / build.__name__
            half = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
            model.save_parallelized(str(folder), extra={"half": ShardedDict(half)})
            model.from_parallelized(str(folder))
            moved = {name: p * 0.9 for name, p in model.named_parameters()}
            torch.func.functional_call(model, moved, kwargs={"input_ids": IDS}).logits.sum()
            autopar.deparallelize(model)

    due, model = norms_of_copies(llama().train()), parallel(llama(), 2).train()
    with silent():
        torch.testing.assert_close(norms_of_copies(model), due, rtol=1e-5, atol=0)
        assert torch.equal(autopar.full_tensor(head(model).grad * 2), 2 * autopar.full_tensor(head(model).grad))


@pooled(world_size=2)
def test_the_weight_of_a_sharded_layer_can_be_replaced() -> None:
    model = parallel(llama(), 2)
    layer = model.lm_head
    layer.weight = new = nn.Parameter(torch.zeros(len(layer.weight), 24))
    assert layer._parameters["weight"] is new
    rows = len(new)
    del layer.weight
    assert not hasattr(layer, "weight")
    layer.weight = torch.ones(rows, 24)  # as weight normalization leaves it
    assert layer.weight.shape == (rows, 24)
    with raises_everywhere(ConfigError, "lm_head of LlamaForCausalLM, a ColumnParallelLinear since"):
        model(torch.arange(6).view(1, 6))


BATCH = torch.arange(36).view(4, 9) % 131


class Sharpness(Optimizer):
    """SAM, as users write it: a class of optimizers around which it steps, and a closure that has to be given."""

    def __init__(self, params: Any, base: type[Optimizer], rho: float = 0.05) -> None:
        super().__init__(list(params), {"rho": rho})
        self.base = base(self.param_groups, lr=0.1)  # type: ignore[call-arg]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        moved = [(p, p.grad * (0.05 / (float(norm) + 1e-12))) for p in held]
        for p, by in moved:
            p.add_(by)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, by in moved:
            p.sub_(by)
        self.base.step()


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_norms_in_a_step_that_cannot_be_tried() -> None:
    model = autopar.initialize(llama(num_hidden_layers=4).train(), {"tp": 2, "consistency_check": {"enable": False}})
    own, usual = Sharpness(model.parameters(), torch.optim.SGD), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def backward() -> None:
        model(BATCH, labels=BATCH).loss.backward()

    def step(optimizer: Any, *given: Any) -> None:
        backward()
        optimizer.step(*given)
        optimizer.zero_grad()

    texts = told(lambda _: step(own, backward), model)
    assert len([text for text in texts if "norm of values of " in text]) == 1, texts
    assert told(lambda _: step(usual), model) == []
    assert not switch.off and not switch.in_hook


def a_step(optimizer: Any) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


@pooled(world_size=2)
@pytest.mark.parametrize("reads", [False, True])
def test_compiled_steps_have_as_many_graphs(reads: bool) -> None:
    found = []
    for watched in (False, True, False):  # the first in a process also looks at frames that torch then skips
        torch._dynamo.reset()
        counters.clear()
        model = parallel(llama(), 2).train()
        for p in model.parameters() if not watched else ():
            unwatch(p)
        step = torch.compile(a_step(torch.optim.AdamW(model.parameters(), lr=1e-3)), backend="eager")
        with silent():
            for _ in range(4):
                model(IDS, labels=IDS).loss.backward()
                for p in model.parameters() if reads else ():
                    p.grad.mul_(0.5)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                step()
        stats = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), counters["frames"]["total"]
        found.append((stats, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
    assert found[1][0] == found[2][0] and found[1][0][-1] > 0
    assert all(torch.equal(tensor, found[2][1][name]) for name, tensor in found[1][1].items())


@pooled(world_size=2)
def test_what_a_compiled_function_does_with_the_model_is_silent() -> None:
    torch._dynamo.reset()
    model = parallel(llama(num_hidden_layers=1), 2).eval()
    call = torch.compile(lambda ids: model(ids).logits, backend="eager")
    with silent(), torch.no_grad():
        assert torch.allclose(call(IDS), model(IDS).logits[:], atol=1e-5)
