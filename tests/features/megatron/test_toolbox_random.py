from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import dropout

from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.features.megatron import random
from autopar.features.megatron.random import RandomStateTracker, checkpoint, get_cuda_rng_tracker, manual_seed
from tests.harness.worlds import pooled


@pytest.fixture(autouse=True)
def keep_the_random_state():
    with torch.random.fork_rng():
        yield


def stream(seed, *sizes):
    """Consecutive draws of a generator of its own: what a stream of this seed must give."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(size, generator=generator) for size in sizes]


def tracker_of(**seeds):
    torch.manual_seed(1)
    tracker = RandomStateTracker()
    for name, seed in seeds.items():
        tracker.add(name, seed)
    return tracker


def test_forks_draw_what_their_seeds_say_nest_and_end_after_an_exception():
    tracker = tracker_of(a=2, b=3)
    default, a, b = stream(1, 4, 4), stream(2, 4, 4, 4, 4, 4), stream(3, 4, 4)
    assert torch.equal(torch.rand(4), default[0])
    with tracker.fork("a"):
        assert torch.equal(torch.rand(4), a[0])
        with tracker.fork("b"):
            assert torch.equal(torch.rand(4), b[0])
            with tracker.fork("a"):  # goes on where the outer fork is: nothing is drawn twice
                assert torch.equal(torch.rand(4), a[1])
            assert torch.equal(torch.rand(4), b[1])
        assert torch.equal(torch.rand(4), a[2])
        with tracker.fork("a"):
            assert torch.equal(torch.rand(4), a[3])
    assert torch.equal(torch.rand(4), default[1])
    with tracker.fork("a"):
        assert torch.equal(torch.rand(4), a[4]), "a stream continues where it was left"

    tracker = tracker_of(a=2, b=3)
    default, a = stream(1, 4), stream(2, 4, 4)
    with pytest.raises(KeyError), tracker.fork("a"), tracker.fork("b"):
        torch.rand(9)
        raise KeyError
    assert torch.equal(torch.rand(4), default[0])
    with tracker.fork("a"):
        assert torch.equal(torch.rand(4), a[0])
    with pytest.raises(ConfigError), tracker.fork("a"), tracker.fork("nobody"):
        pass
    assert tracker._forks == [None]


def test_names_and_seeds_are_unique_and_unknown_names_are_errors():
    tracker = tracker_of(alpha=2)
    with pytest.raises(ConfigError, match=r"random stream 'alpha' already exists \(seed 2\)"):
        tracker.add("alpha", 5)
    with pytest.raises(ConfigError, match="random stream 'beta': seed 2 is already used by stream 'alpha'"):
        tracker.add("beta", 2)
    before = torch.get_rng_state()
    unknown = r"no random stream 'alpa'; there is 'alpha'\. Did you mean 'alpha'\?"
    with pytest.raises(ConfigError, match=unknown), tracker.fork("alpa"):
        pass
    assert torch.equal(torch.get_rng_state(), before)
    tracker.reset()
    with pytest.raises(ConfigError, match="'model-parallel-rng'; there is no stream: call manual_seed"), tracker.fork():
        pass
    tracker.add("beta", 2)  # name and seed are free again


def test_states_go_round():
    tracker = tracker_of(a=2, b=3)
    draws = stream(2, 4, 4, 4)
    with tracker.fork("a"):
        torch.rand(4)
    states = tracker.get_states()
    with tracker.fork("a"):
        assert torch.equal(torch.rand(4), draws[1])
        inside = tracker.get_states()  # of a fork: as far as it has drawn
    other = RandomStateTracker()
    for source, wanted in ((states, draws[1]), (inside, draws[2]), (states, draws[1])):  # and a copy stays as it is
        other.set_states(source)
        with other.fork("a"):
            assert torch.equal(torch.rand(4), wanted)
    with pytest.raises(ConfigError, match="seed 3 is already used by stream 'b'"):
        other.add("c", 3)
    with tracker.fork("a"):
        torch.rand(50)
        tracker.set_states(states)
        assert torch.equal(torch.rand(4), draws[1])
        with pytest.raises(ConfigError, match="set_states inside a fork of 'a', which is not among the states"):
            tracker.set_states({"b": states["b"]})
        with pytest.raises(ConfigError, match="reset inside a fork of 'a'"):
            tracker.reset()


@pooled(world_size=8)
def test_seeds_of_the_two_streams():
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2)
    t = dist.get_rank() % 4
    assert mpu.random_tracker is None
    with pytest.raises(ConfigError, match=r"MPU has no random state tracker\n  Call manual_seed"):
        get_cuda_rng_tracker(mpu)
    for seed, function in ((1234, manual_seed), (7, random.model_parallel_cuda_manual_seed)):
        tracker = function(seed, mpu)
        assert tracker is mpu.random_tracker is get_cuda_rng_tracker(mpu)
        replicated, sharded = stream(seed, 5, 5), stream(seed + 2718 + t, 5)
        assert torch.equal(torch.rand(5), replicated[0])
        with tracker.fork():
            assert torch.equal(torch.rand(5), sharded[0])
        assert torch.equal(torch.rand(5), replicated[1])
    other = manual_seed(1234, mpu.get_tensor_parallel_group())  # which keeps nothing: the tracker is the caller's
    assert mpu.random_tracker is tracker is not other
    with other.fork("model-parallel-rng"):
        assert torch.equal(torch.rand(5), stream(1234 + 2718 + t, 5)[0])


def layer(tracker, seen):
    """A block with dropout of both streams, the sharded one inside a fork; ``seen`` gets the masks."""

    def drop(x):
        x = dropout(x, 0.5)
        seen.append(x == 0)
        return x

    def forward(x, weight):
        x = drop(torch.tanh(x * weight))
        with tracker.fork():
            x = drop(torch.sin(x * weight))
        return drop(torch.tanh(x * weight)).exp()

    return forward


def train(tracker, wrapped, layers=2):
    """Output, gradients, masks, and the random numbers that come after."""
    x = torch.linspace(-1, 1, 64).requires_grad_()
    weight = torch.linspace(1, 2, 64).requires_grad_()
    seen, y = [], x
    for _ in range(layers):
        forward = layer(tracker, seen)
        y = checkpoint(forward, tracker, y, weight) if wrapped else forward(y, weight)
    between = torch.rand(3)
    before = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"]["cpu"]
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before[0]), "backward moved the default stream"
    assert torch.equal(tracker.get_states()["model-parallel-rng"]["cpu"], before[1]), "backward moved the other stream"
    with tracker.fork():
        later = torch.rand(3)
    return [y.detach(), x.grad, weight.grad, between, torch.rand(3), later], seen


@pooled(world_size=8)
def test_activation_checkpointing_recomputes_the_same_masks():
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2)
    wanted, masks = train(manual_seed(1234, mpu), wrapped=False)
    found, again = train(manual_seed(1234, mpu), wrapped=True)
    assert len(masks) == 6
    wanted += masks + masks[3:] + masks[:3]  # backward recomputes the last layer first
    assert all(torch.equal(one, other) for one, other in zip(found + again, wanted, strict=True))


def test_backward_inside_a_fork_leaves_the_random_state_as_it_was_even_if_the_recomputation_fails():
    for fails in (False, True):
        tracker = tracker_of(a=2)
        calls = []

        def forward(x, calls=calls, tracker=tracker, fails=fails):
            calls.append(None)
            with tracker.fork("a"):
                x = dropout(x.sin(), 0.5)
                if fails and len(calls) > 1:
                    raise KeyError("second time")
            return x.sin().sin()

        y = checkpoint(forward, tracker, torch.ones(4, requires_grad=True))
        default = torch.get_rng_state()
        with tracker.fork("a"):
            inside = torch.get_rng_state()
            with pytest.raises(KeyError) if fails else nullcontext():
                y.sum().backward()
            assert len(calls) == 2
            assert torch.equal(torch.get_rng_state(), inside)
        assert torch.equal(torch.get_rng_state(), default)
        assert torch.equal(tracker.get_states()["a"]["cpu"], inside)
