"""Optimizers that are not element by element, on shards: the weights are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import ConfigError
from tests.compare import same_weights
from tests.data_parallel.test_users_optimizers import Lookahead
from tests.data_parallel.whole_optimizers import (
    ACROSS,
    MATRICES,
    MODELS,
    Own,
    equal_bits,
    from_equal_gradients,
    goes_on,
    orthogonal,
    set_gradients,
    train,
)
from tests.harness.worlds import pooled
from tests.small import gpt2, llama


@pooled(world_size=2)
def test_from_equal_gradients_the_bits_are_those_of_one_process() -> None:
    for kind, make in {**MATRICES, **ACROSS}.items():
        name = "llama" if kind in ("shampoo", "Adafactor", "Prodigy") else "gpt2"
        model, plain, _ = from_equal_gradients(MODELS[name], make, kind)
        equal_bits(model, plain, f"{kind} of {name}")


@pytest.mark.tier("sweep")
@pooled(world_size=3)
def test_uneven_shards_on_owners_and_on_every_rank() -> None:
    for kind, make in {**MATRICES, **ACROSS}.items():
        model, plain, optimizer = from_equal_gradients(MODELS["gpt2"], make, kind)
        whole, step = optimizer._autopar.whole, optimizer._autopar
        assert whole, kind
        kept = torch.tensor([sum(step.keeps_state(p) for p in step.names if p in whole)])
        dist.all_reduce(kept)
        assert kept == len(whole) * (3 if kind in ACROSS else 1) > 0
        equal_bits(model, plain, kind)
    for kind in ("orthogonal", "Muon", "galore"):
        way = {"full_matrix": "duplicated"}
        model, plain, _ = from_equal_gradients(MODELS["llama"], MATRICES[kind], kind, optimizer=way)
        equal_bits(model, plain, kind)


MESHES = {
    "tp x dp, zero 1": {"tp": 2, "zero": {"stage": 1}},
    "tp x pp": {"tp": 2, "pp": 2},
    "tp x cp": {"tp": 2, "cp": 2},
    "tp 4, sequence": {"model_parallelism": {"tensor_parallel_size": 4, "sequence_parallel": True}},
    "duplicated": {"tp": 2, "optimizer": {"full_matrix": "duplicated"}, "zero": {"stage": 1}, "gradient_clipping": 1e9},
}


@pytest.mark.tier("sweep")
@pytest.mark.parametrize("mesh", MESHES)
@pooled(world_size=4)
def test_training_with_replicas_stages_rows_and_zero_1(mesh: str) -> None:
    for kind in ("orthogonal", "shampoo", "lamb", "Adafactor"):
        model, plain, optimizer = train(llama, MATRICES[kind], MESHES[mesh])
        assert optimizer._autopar.whole  # type: ignore[attr-defined]
        same_weights(model, plain, 1e-5, when=f"{kind} {mesh}")


@pooled(world_size=4)
def test_what_is_saved_goes_on_on_any_mesh(tmp_path: Path) -> None:
    stages: dict[str, Any] = {"tp": 2, "pp": 2, "optimizer": {"full_matrix": "duplicated"}}
    meshes: list[dict[str, Any]] = [{"tp": 2, "zero": {"stage": 1}}, {"tp": 4}, stages, {"tp": 1}]
    for kind in ("galore", "Adafactor"):
        goes_on(meshes, MATRICES[kind], tmp_path / kind)


@pooled(world_size=2)
def test_parameters_keep_their_marks_and_an_optimizer_inside_would_step_shards() -> None:
    model = gpt2()
    for parameter in model.parameters():
        parameter.mine = parameter.ndim  # type: ignore[attr-defined]
    model.transformer.wte.weight.requires_grad_(False)
    seen: set[tuple[int, int]] = set()

    def update(state: dict[str, Any], p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
        if hasattr(p, "mine"):
            seen.add((p.mine, p.ndim))
        return g / g.norm()

    before = model.transformer.wte.weight.clone()
    model, optimizer = autopar.initialize(model, {"tp": 2}, optimizer=Own(model.parameters(), update))
    for step in range(2):
        set_gradients(model, step)
        model.transformer.wte.weight.grad = None
        optimizer.step()
    assert seen == {(1, 1), (2, 2)}
    assert torch.equal(autopar.deparallelize(model).transformer.wte.weight, before)
    inside = Lookahead(Own(model.parameters(), orthogonal))
    model, optimizer = autopar.initialize(model, {"tp": 2}, optimizer=inside)
    set_gradients(model, 0)
    assert optimizer._autopar.whole
    with pytest.raises(ConfigError, match="weights of the model directly"):
        optimizer.step()


@pooled(world_size=2)
def test_a_gradient_that_one_rank_lacks_is_zero_there() -> None:
    plain, model = gpt2(n_layer=1), gpt2(n_layer=1)
    reference = Own(plain.parameters(), orthogonal)
    model, optimizer = autopar.initialize(model, {"tp": 2}, optimizer=Own(model.parameters(), orthogonal))
    for step in range(2):
        for each in (plain, model):
            set_gradients(each, step)
        for name, parameter in model.named_parameters():
            layout = model._autopar.plan.tensors[model._autopar.plan.canonical(name)].layout
            other = dict(plain.named_parameters())[name]
            if name.endswith("mlp.c_fc.weight"):
                for start, stop in layout.ranges(1):
                    other.grad.narrow(layout.dim, start, stop - start).zero_()
                parameter.grad = None if dist.get_rank() == 1 else parameter.grad
            if name.endswith("attn.c_proj.weight"):
                parameter.grad = other.grad = None
        reference.step()
        optimizer.step()
    equal_bits(model, plain, "without some gradients")


class Counting(Own):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()


@pooled(world_size=4)
def test_a_group_that_one_rank_steps_counts_on_all(tmp_path: Path) -> None:
    model = gpt2(n_layer=1)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [{"params": matrices[:1]}, {"params": matrices[1:]}]
    model, optimizer = autopar.initialize(model, {"tp": 4}, optimizer=Counting(groups, orthogonal))
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
    assert [group["steps"] for group in optimizer.param_groups] == [2, 2]
    model.save_parallelized(tmp_path / "saved", optimizer=optimizer)


@pooled(world_size=2)
def test_after_a_step_that_raised_the_next_one_is_right() -> None:
    plain, model = gpt2(n_layer=1), gpt2(n_layer=1)
    raises = [False]

    def update(state: dict[str, Any], p: nn.Parameter, g: torch.Tensor) -> torch.Tensor:
        if raises[0]:
            raise KeyError("in the middle")
        return orthogonal(state, p, g)

    reference = Own(plain.parameters(), orthogonal)
    model, optimizer = autopar.initialize(model, {"tp": 2}, optimizer=Own(model.parameters(), update))
    for step in range(3):
        set_gradients(plain, step)
        reference.step()
        set_gradients(model, step)
        if step == 1:
            raises[0] = True
            kept = {name: p.detach().clone() for name, p in model.named_parameters()}
            count = {p: state["step"] for p, state in optimizer.state.items()}
            with pytest.raises(KeyError):
                optimizer.step()
            raises[0] = False
            changed = [name for name, p in model.named_parameters() if not torch.equal(p, kept[name])]
            assert not [name for name in changed if model.get_parameter(name) in optimizer._autopar.whole]
            for p, state in optimizer.state.items():
                state["step"] = count[p]
        optimizer.step()
    equal_bits(model, plain, "after an error")
