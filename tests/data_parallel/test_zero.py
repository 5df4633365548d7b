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
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2, llama

IDS = torch.randint(0, 131, (40, 9), generator=torch.Generator().manual_seed(3))

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.1),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, fused=True),
    "nadam foreach": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3, eps=1e-4, foreach=True),
}


def groups(model):
    """Without weight decay for biases and norms, as most training scripts have it."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim > 1]},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


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
        if "gradient_clipping" in more:
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), more["gradient_clipping"])
            assert norm > 2 * more["gradient_clipping"], "it clips"
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


def agree_over_replicas(model):
    for name, parameter in model.named_parameters():
        others = [torch.empty_like(parameter) for _ in range(model.mpu.dp.size)]
        dist.all_gather(others, parameter.data.contiguous(), group=model.mpu.dp.group)
        assert all(torch.equal(other, others[0]) for other in others), name


def elements(optimizer):
    return sum(v.numel() for entries in optimizer.state.values() for v in entries.values() if torch.is_tensor(v))


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_two_replicas_equal_one_process_and_keep_half_the_state_each():
    for name, make in OPTIMIZERS.items():
        model, optimizer, reference = train(1, gpt2, make, 10)
        agree_over_replicas(model)
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


@pooled(world_size=4)
def test_with_tensor_parallelism_and_clipping():
    def build():
        return llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=1, tie_word_embeddings=True)

    for name in ("adamw", "adagrad"):
        for model_of in (gpt2, build):  # one KV head on two ranks
            model, optimizer, reference = train(2, model_of, OPTIMIZERS[name], 4, gradient_clipping=0.3)
            agree_over_replicas(model)
            assert elements(optimizer) <= 0.6 * elements(reference) / (2 if model_of is gpt2 else 1)


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
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(parameter.data, other.data, name)
    owned = [p for p in model.parameters() if optimizer._autopar.owns(p)]
    assert {id(p) for p in optimizer.state} == {id(p) for p in owned}
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(7))]})
    with raises_everywhere(ConfigError, "a parameter of shape [7] in SGD is not a parameter of GPT2LMHeadModel"):
        optimizer.step()


@pooled(world_size=2)
def test_a_step_that_raises_leaves_everything_as_it_was():
    class Broken(torch.optim.SGD):
        broken = True

        def step(self, closure=None):
            if self.broken:
                raise ValueError("no step today")
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
    assert not all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pooled(world_size=2)
def test_what_a_step_writes_on_its_groups_and_itself_arrives():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.steps = getattr(self, "steps", 0) + 1
            for group in self.param_groups:
                group["steps"] = self.steps
            return super().step(closure)

    model = gpt2()
    optimizer = Counting(model.parameters(), lr=0.1)
    model, optimizer = autopar.initialize(model, config(1), optimizer=optimizer)
    for _ in range(2):
        model(IDS[:2], labels=IDS[:2]).loss.backward()
        optimizer.step()
    assert optimizer.steps == 2 and optimizer.param_groups[0]["steps"] == 2


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
