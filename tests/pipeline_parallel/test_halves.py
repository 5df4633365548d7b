"""Two halves of a backward pass, and a pass that adds in the product, give what autograd gives."""

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from autopar.pipeline_parallel import backward
from autopar.pipeline_parallel.backward import add_gradients, stage_backward_input, stage_backward_weight

_SIZE = 5


def _compare(make: Callable[[Any, Any], list[Any]], leaves: int = 1, weights: int = 3, seed: int = 0) -> None:
    """``make(received, weights)`` gives the roots; the first half must leave the weights alone.

    A pass in which products add to earlier gradients is compared too.
    """
    torch.manual_seed(seed)
    values = [torch.randn(3, _SIZE, dtype=torch.float64) for _ in range(leaves)]
    parameters = [torch.nn.Parameter(torch.randn(_SIZE, _SIZE, dtype=torch.float64)) for _ in range(weights)]
    found: list[list[torch.Tensor | None]] = []
    for kind in ("whole", "halves", "in products"):
        received = [value.clone().requires_grad_() for value in values]
        roots = [root for root in make([leaf.clone() for leaf in received], parameters) if root.requires_grad]
        torch.manual_seed(seed + 1)
        gradients = None if all(root.ndim == 0 for root in roots) else [torch.randn_like(root) for root in roots]
        if kind == "halves":
            rest = stage_backward_input(roots, gradients, received)
            assert all(parameter.grad is None for parameter in parameters)
            found.append([leaf.grad for leaf in received])
            stage_backward_weight(rest)
            assert not rest.parts
        else:
            earlier = [torch.randn_like(parameter) if kind == "in products" else None for parameter in parameters]
            for parameter, gradient in zip(parameters, earlier, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            (torch.autograd.backward if kind == "whole" else add_gradients)(roots, gradients)
            found.append([leaf.grad for leaf in received])
            for parameter, gradient in zip(parameters, earlier, strict=True):
                if gradient is not None:
                    parameter.grad = None if torch.equal(parameter.grad, gradient) else parameter.grad - gradient
        found[-1] += [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
    for whole, *others in zip(*found, strict=True):
        for other in others:
            assert (whole is None) == (other is None)
            if whole is not None:
                torch.testing.assert_close(other, whole, rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_SMALLEST", 0)


def test_a_weight_used_again_further_down_beside_others_used_once() -> None:
    _compare(lambda x, w: [torch.addmm(w[2][1], torch.addmm(w[1][0], x[0], w[0]).tanh(), w[0])])
    _compare(lambda x, w: [((x[0] @ w[0]).tanh() * w[1][0] + w[2][0]).tanh() @ w[0] * w[1][0]])


def test_what_does_not_depend_on_the_received_and_nodes_with_several_outputs() -> None:
    _compare(lambda x, w: [(w[0] @ w[1]).tanh(), x[0] @ w[1]])  # a decoder's own start beside an encoder's output
    _compare(lambda x, w: [w[0].exp()])  # no root depends on it
    _compare(lambda x, w: [x[0].tanh(), w[1].sum() * x[0]], leaves=2)  # nothing depends on the second one

    def make(x: list[torch.Tensor], w: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        first, second, _ = (x[0] @ w[0].detach()).unbind(0)  # a frozen weight
        return [first * w[2], (second @ w[1]).sort().values]

    _compare(make)


_KINDS: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b, weight: (a @ weight).tanh(),
    lambda a, b, weight: a + b,
    lambda a, b, weight: a.tanh() * b,
    lambda a, b, weight: torch.addmm(weight[0], b, weight.tanh()) / _SIZE,
    lambda a, b, weight: torch.cat(a.chunk(3)[1:] + b.chunk(3)[:1]),
]


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    drawn = random.Random(seed)
    leaves, weights, steps = drawn.randint(1, 3), drawn.randint(1, 5), drawn.randint(3, 25)
    plan = [(drawn.random(), drawn.random(), drawn.random(), drawn.randrange(5)) for _ in range(steps)]
    ends = drawn.randint(1, 4)

    def make(x: list[torch.Tensor], w: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        made = [*x, w[0][:3]]
        for one, other, which, kind in plan:
            a, b = made[int(one * len(made))], made[int(other * len(made))]
            weight = w[int(which * weights)]
            made.append(_KINDS[kind](a, b, weight))
        return made[-ends:]

    _compare(make, leaves, weights, seed)


def test_weights_accumulate_and_their_hooks_run() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    seen = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for _ in range(2):
        leaf = torch.ones(1, 2, requires_grad=True)
        stage_backward_weight(stage_backward_input([(leaf @ weight).sum()], None, [leaf]))
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))
    assert len(seen) == 2


def test_nothing_is_kept_afterwards() -> None:
    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Any:
        saved = Saved(tensor.detach())
        alive.add(saved)
        return saved

    weights = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    leaf = torch.randn(2, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        root = ((leaf.clone() @ weights[0]).tanh() @ weights[1]).tanh() @ weights[0]
    rest = stage_backward_input([root], [torch.ones_like(root)], [leaf])
    del root
    assert alive
    stage_backward_weight(rest)
    assert not alive


class _UsesUp(torch.autograd.Function):
    """As fused losses do: scales what it saved, in place, when it is asked for gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.gradients = [x.new_ones(x.shape[0], weight.shape[1]) @ weight.detach().T, x.detach().T @ x.new_ones(3, 5)]
        return (x @ weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        for saved in ctx.gradients:
            saved.data.mul_(gradient)
        return tuple(ctx.gradients)


def test_a_function_that_uses_up_what_it_saved() -> None:
    torch.manual_seed(0)
    first, head = (torch.nn.Parameter(torch.randn(_SIZE, _SIZE)) for _ in range(2))
    found = []
    for split in (False, True):
        leaf = torch.linspace(-1, 1, 15).view(3, _SIZE).requires_grad_()
        loss = 0.3 * _UsesUp.apply((leaf * 1 @ first).tanh(), head)
        if split:
            rest = stage_backward_input([loss], None, [leaf])
            assert leaf.grad is not None
            stage_backward_weight(rest)
        else:
            loss.backward()
        found.append([leaf.grad, first.grad, head.grad])
        first.grad = head.grad = None
    for whole, halves in zip(*found, strict=True):
        torch.testing.assert_close(halves, whole)


def test_a_product_adds_where_nothing_else_reads_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights with hooks and recomputed ones get the sum of autograd. An error leaves no hook."""
    added: list[torch.Tensor] = []
    add = backward._add
    monkeypatch.setattr(backward, "_add", lambda weight, *rest: added.append(weight) or add(weight, *rest))
    first, second = (torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
    hooked, wide = (torch.nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))
    seen: list[int] = []
    hooked.weight.register_hook(lambda gradient: seen.append(1))
    modules = [first, second, hooked, wide]
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss(reentrant: bool | None) -> torch.Tensor:
        if reentrant is None:
            return wide(hooked(second(first(x)))).tanh().sum()
        inside = first(x)
        return wide(hooked(checkpoint(second, inside, use_reentrant=reentrant))).tanh().sum()

    for reentrant, expected in ((None, {second.weight, wide.weight}), (False, {wide.weight}), (True, set())):
        ways = []
        for run in (torch.autograd.backward, add_gradients):
            for module in modules:
                module.zero_grad()
            for _ in range(3):
                run([loss(reentrant)], None)
            ways.append([parameter.grad for module in modules for parameter in module.parameters()])
        torch.testing.assert_close(ways[1], ways[0], rtol=1e-13, atol=1e-13)
        assert {id(weight) for weight in added} == {id(weight) for weight in expected}, reentrant
        added.clear()
    assert len(seen) == 18
    total = loss(None)
    first.requires_grad_(False)
    add_gradients([total], None)  # autograd skips leaves that were frozen after the forward
    first.requires_grad_(True)
    inside = first(x)
    total = wide(inside).sum()
    with torch.no_grad():
        inside.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        add_gradients([total], None)
