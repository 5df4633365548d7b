"""ZeRO-1: the user's own optimizer, its state sharded over the replicas, against one process."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.data_parallel.whole_parameters import assign
from autopar.errors import ConfigError
from tests.compare import same_weights
from tests.exchange import everyones, raises_everywhere
from tests.harness.worlds import pooled
from tests.small import gpt2

IDS = torch.randint(0, 131, (40, 9), generator=torch.Generator().manual_seed(3))

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.1),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, fused=True),
    "nadam foreach": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3, eps=1e-4, foreach=True),
}


def groups(model):
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is kind] for kind in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]


def config(tp, **more):
    return {"model_parallelism": {"tensor_parallel_size": tp}, "zero": {"stage": 1}, **more}


def train(tp, build, make, steps, **more):
    """``steps`` steps against one process on the whole batch, with a scheduler made before; returns both sides."""
    plain = build()
    model = copy.deepcopy(plain)
    optimizer, reference = make(groups(model)), make(groups(plain))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)) for o in (optimizer, reference)]
    before, identities = optimizer, [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    model, optimizer = autopar.initialize(model, config(tp, **more), optimizer=optimizer, lr_scheduler=schedulers[0])
    assert optimizer is before
    engine = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    dp = model.mpu.dp
    for step in range(steps):
        batch = IDS[4 * (step % 10) : 4 * (step % 10) + 4]
        mine = batch[dp.rank :: dp.size]
        engine(mine, labels=mine).loss.backward()
        plain(batch, labels=batch).loss.backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        for scheduler in schedulers:
            scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in reference.param_groups]
        assert optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.defaults["lr"] / (step + 2))
        if step in (0, steps - 1):
            same_weights(model, plain, 1e-5, when=f"after step {step}")
    assert identities == [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    return model, optimizer, reference


def elements(optimizer):
    return sum(v.numel() for entries in optimizer.state.values() for v in entries.values() if torch.is_tensor(v))


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_two_replicas_equal_one_process_and_keep_half_the_state_each():
    for name, make in OPTIMIZERS.items():
        model, optimizer, reference = train(1, gpt2, make, 10)
        for key, parameter in model.named_parameters():
            one, other = everyones(parameter.data)
            assert torch.equal(one, other), key
        everyone = torch.zeros(2, dtype=torch.int64)
        everyone[dist.get_rank()] = elements(optimizer)
        dist.all_reduce(everyone)
        assert everyone.sum() == elements(reference), name  # nothing twice, nothing lost
        assert everyone.max() <= 0.55 * elements(reference), name
        owners = [optimizer._autopar.owner(parameter) for parameter in model.parameters()]
        assert set(owners) == {0, 1}
        for parameter in model.parameters():
            assert (parameter in optimizer.state) == optimizer._autopar.owns(parameter)
        assert optimizer.loss_scale == 1.0 and optimizer.skipped_steps == 0 and not optimizer.step_was_skipped


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_an_optimizer_that_has_stepped_before_goes_on():
    """The third step after two on one process, at tp 2 and at dp 2."""
    for tp in (1, 2):
        for name in ("adamw", "sgd"):
            plain = gpt2()
            reference = OPTIMIZERS[name](groups(plain))
            for _ in range(2):
                plain(IDS[:2], labels=IDS[:2]).loss.backward()
                reference.step()
                reference.zero_grad()
            model, optimizer = copy.deepcopy((plain, reference))
            model, optimizer = autopar.initialize(model, config(tp), optimizer=optimizer)
            for m, o in ((model, optimizer), (plain, reference)):
                m(IDS[:2], labels=IDS[:2]).loss.backward()
                o.step()
            same_weights(model, plain, when=f"with {name}")
            autopar.deparallelize(model)
            assert not hasattr(optimizer, "_autopar") and not optimizer._optimizer_step_pre_hooks


@pooled(world_size=2)
def test_state_that_is_not_per_element_is_refused_before_anything_changes():
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(IDS[:2], labels=IDS[:2]).loss.backward()
    optimizer.step()
    optimizer.state[model.transformer.wte.weight]["row_var"] = torch.ones(131, 1)
    with raises_everywhere(ConfigError, "SGD has stepped already, and its 'row_var' of transformer.wte.weight"):
        autopar.initialize(model, config(2), optimizer=optimizer)
    assert model.transformer.wte.weight.shape == (131, 36) and not hasattr(model, "mpu")


@pooled(world_size=2)
def test_a_group_added_later_gets_owners_too():
    plain = gpt2()
    model = copy.deepcopy(plain)

    def make(m):
        return torch.optim.SGD([p for p in m.parameters() if p.ndim > 1], lr=0.1, momentum=0.9)

    optimizer, reference = make(model), make(plain)
    model, optimizer = autopar.initialize(model, config(1), optimizer=optimizer)
    for step in range(3):
        if step == 1:
            for m, o in ((model, optimizer), (plain, reference)):
                o.add_param_group({"params": [p for p in m.parameters() if p.ndim == 1], "lr": 0.05})
        for m, o in ((model, optimizer), (plain, reference)):
            m(IDS[:2], labels=IDS[:2]).loss.backward()
            o.step()
            m.zero_grad()
    same_weights(model, plain)
    owned = [p for p in model.parameters() if optimizer._autopar.owns(p)]
    assert {id(p) for p in optimizer.state} == {id(p) for p in owned}
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(7))]})
    with raises_everywhere(ConfigError, "a parameter of shape [7] in SGD is not a parameter of GPT2LMHeadModel"):
        optimizer.step()


@pooled(world_size=2)
def test_a_step_that_raises_leaves_everything_as_it_was_and_what_one_writes_arrives():
    class Broken(torch.optim.SGD):
        broken, steps = True, 0

        def step(self, closure=None):
            if self.broken:
                raise ValueError("no step today")
            self.steps += 1
            for group in self.param_groups:
                group["steps"] = self.steps
            return super().step(closure)

    model = gpt2()
    optimizer = Broken(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(o))
    model, optimizer = autopar.initialize(model, config(1, precision={"dtype": "bf16"}), optimizer=optimizer)
    identities = [id(p) for p in optimizer.param_groups[0]["params"]]
    before = copy.deepcopy(model.state_dict())
    model(IDS[:2], labels=IDS[:2]).loss.backward()
    with pytest.raises(ValueError, match="no step today"):
        optimizer.step()
    assert identities == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    optimizer.broken = False
    optimizer.step()
    assert seen == [optimizer]  # the hooks of the user run once, with the user's optimizer
    optimizer.step()
    assert optimizer.steps == optimizer.param_groups[0]["steps"] == 2
    assert not all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_no_rank_owns_more_than_the_mean_and_the_largest_size():
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 40))]
        ranks = draw.randrange(1, 9)
        owners = assign(sizes, ranks)
        loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(ranks)]
        assert sum(loads) == sum(sizes) and len(owners) == len(sizes)
        assert max(loads) <= sum(sizes) / ranks + max(sizes)
    assert assign([3, 2], 2, loads=[4, 0]) == [1, 1]
