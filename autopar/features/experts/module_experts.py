"""Expert parallelism for experts that are modules in a list; a rank keeps the experts of other ranks without weights.

Rows are sent as for stacked experts (:mod:`autopar.features.experts.layers`). Only the experts compute on other ranks;
weighting, masks and dropout after them run on the rank of the tokens.

Classes choose experts in many ways: by indices or masks, in a loop over all or over the chosen experts, with weights
before or after them. All of them call the experts as modules. So the forward that calls them, of the list or of the
module around it, runs twice. In the first run the experts return zeros, and the rows of each call are recorded. Then
the rows go to the ranks of the experts. In the second run the experts return the real outputs. The result of the first
run is dropped and takes no memory in the backward pass.

[Note: modules that run once] Modules that are called before the first expert, such as a router, cannot depend on
experts. The second run reuses their outputs, so their hooks and counters run once. Both runs draw the same random
numbers and work on copies of the arguments; buffers that the first run changes are restored.

[Note: gradients of idle experts] An expert without calls gets no gradient, as on a single process, so an optimizer
skips it with its weight decay. An expert that is called without rows gets zeros. With FSDP2, which reduces identical
gradients on all ranks, every idle expert gets zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.compat.tensors import called_instead, own_buffers, own_modules, tree_leaves, tree_map, version_of
from autopar.distributed.rng import TorchGenerators
from autopar.errors import ConfigError
from autopar.features.experts.layers import ExpertParallel
from autopar.features.experts.plan import expert_names
from autopar.tensor_parallel.region_modules import RegionModule


class _Call(NamedTuple):
    """One call of an expert.

    Attributes:
        place, number: Index of the list, and of the expert in it.
        rows: Argument of the call, ``[..., hidden]``.
        version: Version of ``rows`` at the call.
        dtype: Dtype of the result.
    """

    place: int
    number: int
    rows: torch.Tensor
    version: int
    dtype: torch.dtype


class Calls:
    """The calls of experts in one forward.

    Args:
        path, caller: Path of the module that calls the experts, for messages, and the module.
        lists: Lists of experts, in order.
    """

    def __init__(self, path: str, caller: nn.Module, lists: Sequence[Sequence[nn.Module]]) -> None:
        self._path, self._caller, self._lists = path, caller, lists
        self._own = {id(expert) for experts in lists for expert in experts}
        self._made: list[_Call] = []
        self._before: list[tuple[nn.Module, Any, TorchGenerators]] = []
        self._outputs: list[torch.Tensor] = []
        self._next, self._given = 0, 0
        self._start = TorchGenerators.now()

    def note(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` on copies of its arguments; experts return zeros and their calls are recorded."""
        buffers = {n: (b, version_of(b), b.clone()) for n, b in own_buffers(self._caller).items() if b is not None}
        args, kwargs = _copied((args, kwargs))
        with called_instead(self._in_place(self._note, self._keep)):
            out = forward(*args, **kwargs)
        for buffer, version, earlier in buffers.values():
            if version_of(buffer) != version:
                buffer.copy_(earlier)
        written = next((call for call in self._made if version_of(call.rows) != call.version), None)
        if written is not None:
            raise self._refusal(f"it changes the input {list(written.rows.shape)} of expert {written.number} in place")
        return out

    def rows(self, place: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows for the experts of one list, ``[rows, hidden]``, and the expert of each row, ``[rows]``.

        Args:
            like: Tensor with the width and dtype of the rows, ``[..., hidden]``, for a list without calls.
        """
        calls = [call for call in self._made if call.place == place]
        width = like.shape[-1]
        other = next((call.rows for call in calls if call.rows.shape[-1] != width), None)
        if other is not None:
            raise self._refusal(f"expected {width} features, as in its input, for its experts, got {other.shape[-1]}")
        parts = [call.rows.reshape(-1, width) for call in calls] or [like.reshape(-1, width)[:0]]
        numbers = torch.tensor([call.number for call in calls], dtype=torch.long)
        counts = torch.tensor([len(part) for part in parts[: len(calls)]], dtype=torch.long)
        ids = numbers.repeat_interleave(counts).to(like.device)
        return torch.cat(parts), ids

    def take(self, outputs: Sequence[torch.Tensor]) -> None:
        """Store the outputs of the experts for the rows of each list, ``[rows, hidden]``."""
        sizes = [call.rows.numel() // max(call.rows.shape[-1], 1) for call in self._made]
        found = [
            iter(out.split([size for size, call in zip(sizes, self._made, strict=True) if call.place == place]))
            for place, out in enumerate(outputs)
        ]
        self._outputs = [next(found[call.place]).view(call.rows.shape).to(call.dtype) for call in self._made]

    def replay(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` again; experts return the stored outputs."""
        self._start.restore()
        with called_instead(self._in_place(self._give, self._give_kept)):
            out = forward(*args, **kwargs)
        if self._next != len(self._made):
            raise self._another()
        return out

    def _in_place(self, of_expert: Any, of_other: Any) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        for place, experts in enumerate(self._lists):
            for number, expert in enumerate(experts):
                yield expert, functools.partial(of_expert, place, number)
        for module in _outermost(self._caller, self._own):
            yield module, functools.partial(of_other, module)

    def _note(self, place: int, number: int, call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(rows, torch.Tensor) or not rows.ndim:
            raise self._refusal("it must call its experts with one positional tensor, [..., hidden]")
        device = rows.device.type
        kind = torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None
        dtype = rows.dtype if kind is None else kind
        self._made.append(_Call(place, number, rows, version_of(rows), dtype))
        return torch.zeros(rows.shape, dtype=dtype, device=rows.device)

    def _keep(self, module: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        if self._made:
            return out
        self._before.append((module, out, TorchGenerators.now()))
        return _copied(out)

    def _give(self, place: int, number: int, call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = self._made[self._next] if self._next < len(self._made) else None
        self._next += 1
        if made is None or (made.place, made.number) != (place, number) or args[0].shape != made.rows.shape:
            raise self._another()
        return self._outputs[self._next - 1]

    def _give_kept(self, module: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        if self._given == len(self._before):
            return call(*args, **kwargs)
        kept, out, after = self._before[self._given]
        self._given += 1
        if kept is not module:
            raise self._another()
        after.restore()
        return out

    def _another(self) -> ConfigError:
        return self._refusal("it must call its experts the same way when its forward runs twice")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"expert_parallel_size is not supported with {self._path}: {reason}\n"
            "  Remove expert_parallel_size: then each expert is sharded."
        )


def _copied(values: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)


def _outermost(module: nn.Module, experts: set[int]) -> Iterator[nn.Module]:
    """Yield the outermost modules inside that have a forward and contain no experts."""
    for child in module.children():
        if id(child) in experts:
            continue
        if type(child).forward is nn.Module.forward:
            yield from _outermost(child, experts)
        elif not any(id(inside) in experts for inside in child.modules()):
            yield child


class ModuleExperts(ExpertParallel):
    """A list of experts distributed over ranks; each parameter is on one rank.

    Attributes:
        idle_zeros: True if an expert without calls gets zero gradients.
    """

    autopar_names: tuple[str, ...]
    autopar_state = (*ExpertParallel.autopar_state, "autopar_names", "idle_zeros", "_called", "_inside")
    idle_zeros = False
    _called: frozenset[int] = frozenset()  # experts that the current forward calls with zero rows
    _inside: TorchGenerators | None = None  # generators of the local experts; None if they draw nothing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the list's class, or :meth:`computed` if it has none."""
        if not self.calls_itself:
            return self.computed(*args)
        return _run(self, [self], super(RegionModule, self).forward, args, kwargs)  # type: ignore[misc]

    @property
    def calls_itself(self) -> bool:
        """True if the list's class has a forward, which calls the experts."""
        kind: Any = type(self)
        return kind._autopar_plain.forward is not nn.Module.forward

    @property
    def experts(self) -> list[Any]:
        """All experts, in order."""
        if "autopar_names" not in vars(self):
            self.autopar_names = expert_names(self)  # type: ignore[arg-type]
        return [own_modules(self)[name] for name in self.autopar_names]

    def computed(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Compute the outputs of the experts ``ids``, ``[rows]``, for ``rows``, ``[rows, hidden]``."""
        self._refuse_hooks()
        return self._exchanged(rows, ids.unsqueeze(-1), torch.ones_like(rows[:, :1]))

    def _outputs(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        assert self.autopar.layout is not None
        ((start, stop),) = self.autopar.layout.ranges(self.tp.rank)
        order = torch.argsort(local, stable=True)
        parts = rows[order].split(self._counts(rows, local))
        mine = zip(range(start, stop), self.experts[start:stop], parts, strict=True)
        outside = TorchGenerators.now() if self._inside is not None else None
        if self._inside is not None:
            self._inside.restore()
        made = [expert(part) for n, expert, part in mine if len(part) or self.idle_zeros or n in self._called]
        if outside is not None:
            outside.restore()
        if not made:
            return rows
        return torch.cat(made).to(rows.dtype)[torch.argsort(order)]


class ExpertCaller(RegionModule):
    """A module whose forward calls the experts in lists inside it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        lists: list[Any] = [each for each in own_modules(self).values() if isinstance(each, ModuleExperts)]
        outer = [each for each in lists if not each.calls_itself]
        return _run(self, outer, super().forward, args, kwargs)


class _Present(torch.autograd.Function):
    """Put ``x`` into the graph, as on the other ranks; neither ``x`` nor the weight gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(caller: Any, lists: Sequence[Any], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run the forward of a module that calls experts, with outputs from the ranks of the experts."""
    path, given = caller.autopar.path, (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    like = next((x for x in given if x.is_floating_point() and x.ndim > 1), None)
    if like is None:
        raise ConfigError(f"expert_parallel_size requires hidden states, [..., hidden], in the arguments of {path}")
    inside = _of_this_rank(caller)
    calls = Calls(path, caller, [each.experts for each in lists])
    out = calls.note(forward, args, kwargs)
    if like.is_meta and not torch.is_grad_enabled():  # a dry run, in which the choices have no values
        return out
    weight = next((p for p in caller.parameters() if p.requires_grad), None)
    outputs = []
    for place, experts in enumerate(lists):
        rows, ids = calls.rows(place, like)
        if weight is not None and torch.is_grad_enabled() and not rows.requires_grad:
            rows = _Present.apply(rows, weight)
        empty = (call.number for call in calls._made if call.place == place and not call.rows.numel())
        experts._called, experts._inside = frozenset(empty), inside  # some code calls all experts
        outputs.append(experts.computed(rows, ids) if experts is caller else experts(rows, ids))
    calls.take(outputs)
    out = calls.replay(forward, args, kwargs)
    idle = [y.sum() for y in outputs if not len(y) and y.requires_grad]
    return _tied(out, idle) if idle else out


def _of_this_rank(caller: Any) -> TorchGenerators | None:
    """Return the generators of the local experts, as in a sharded region; None if they draw nothing."""
    if not caller.region.draws(caller.training):
        return None
    caller.region.draw_per_rank(caller.training)
    inside = TorchGenerators.now()
    caller.region.draw_alike()
    return inside


def _tied(out: Any, zeros: list[torch.Tensor]) -> Any:
    """Add zeros to the first floating-point tensor, so that backward reaches experts with rows of other ranks."""
    left = list(zeros)

    def add(x: Any) -> Any:
        if not left or not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        total = sum(left, x.new_zeros(()))
        left.clear()
        return x + total.to(x.dtype)

    return tree_map(add, out)
