"""Expert parallelism of experts that are modules in a list: each rank has some of them, and the rest without weights.

Rows travel as for stacked experts (:mod:`autopar.features.experts.layers`). Weights, masks and dropout after
the experts stay on the rank of the tokens; only the experts compute elsewhere.

Classes choose experts in many ways: by indices, by masks, in a loop over all of them or over the chosen ones, with
weights before or after them. All of them call the experts as modules. So the forward that calls them, of the list or of
the module around it, runs twice: first with outputs of zeros, while the rows of each call are noted; then, when the
rows have been to the ranks of the experts, with their outputs. The first run's result is dropped, and costs no memory
in the backward pass.

[Note: what runs once] Modules that are called before the first expert, a router among them, cannot depend on experts:
the second run gets their outputs, so that their hooks and counters run once. Both runs draw the same random numbers and
work on copies of the arguments, and buffers that the first run writes into are restored.

[Note: gradients of idle experts] An expert without calls has no gradient on one process, and has none here: an
optimizer skips it, weight decay too. An expert that is called without rows has zeros; with FSDP2, which reduces the
same gradients on all ranks, any idle expert has zeros.
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
from autopar.layout import even_shards
from autopar.tensor_parallel.region_modules import RegionModule


class _Call(NamedTuple):
    """One call of an expert.

    Attributes:
        place, number: Indices of its list, and in the list.
        rows: Argument of the call, ``[..., hidden]``.
        version: Number of writes into ``rows`` at the call.
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
        path: Path of ``caller``, the module that calls them, for messages.
        lists: Lists of experts, each in order.
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
        """Run ``forward`` on copies, with outputs of zeros, and return its result."""
        buffers = {n: (b, version_of(b), b.clone()) for n, b in own_buffers(self._caller).items() if b is not None}
        args, kwargs = _copied((args, kwargs))
        with called_instead(self._in_place(self._note, self._keep)):
            out = forward(*args, **kwargs)
        for buffer, version, earlier in buffers.values():
            if version_of(buffer) != version:
                buffer.copy_(earlier)
        written = next((call for call in self._made if version_of(call.rows) != call.version), None)
        if written is not None:
            raise ConfigError(
                f"expert_parallel_size: {self._path} writes into the {list(written.rows.shape)} that it has given to "
                f"expert {written.number} before the ranks that hold it have them.\n  Let it make a new tensor, or "
                "leave expert_parallel_size out: each expert is sharded instead."
            )
        return out

    def rows(self, place: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows for the experts of one list, ``[rows, hidden]``, and their experts, ``[rows]``.

        Args:
            like: Tensor of the form of the rows, ``[..., hidden]``, for a list without calls.
        """
        calls = [call for call in self._made if call.place == place]
        width = like.shape[-1]
        other = next((call.rows for call in calls if call.rows.shape[-1] != width), None)
        if other is not None:
            raise ConfigError(
                f"expert_parallel_size: {self._path} is given {width} features and gives its experts "
                f"{other.shape[-1]}. Those of both must be as many.\n  Leave it out: each expert is sharded instead."
            )
        parts = [call.rows.reshape(-1, width) for call in calls] or [like.reshape(-1, width)[:0]]
        numbers = torch.tensor([call.number for call in calls], dtype=torch.long)
        counts = torch.tensor([len(part) for part in parts[: len(calls)]], dtype=torch.long)
        ids = numbers.repeat_interleave(counts).to(like.device)
        return torch.cat(parts), ids

    def without_rows(self, place: int) -> frozenset[int]:
        """Return the experts of one list that were called with no rows, as some code calls all."""
        return frozenset(call.number for call in self._made if call.place == place and not call.rows.numel())

    def take(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take the experts' outputs for the rows of each list, ``[rows, hidden]``."""
        sizes = [call.rows.numel() // max(call.rows.shape[-1], 1) for call in self._made]
        found = [
            iter(out.split([size for size, call in zip(sizes, self._made, strict=True) if call.place == place]))
            for place, out in enumerate(outputs)
        ]
        self._outputs = [next(found[call.place]).view(call.rows.shape).to(call.dtype) for call in self._made]

    def replay(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` with the experts' outputs."""
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
            raise ConfigError(
                f"expert_parallel_size: {self._path} gives its experts {len(args) + len(kwargs)} arguments, and only "
                "one tensor, [..., hidden], can travel.\n  Leave it out: each expert is sharded instead."
            )
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
        return ConfigError(
            f"expert_parallel_size: {self._path} calls its experts in another way when its forward is run again, as "
            "it is to learn what\n  travels. Leave expert_parallel_size out: each expert is sharded instead."
        )


def _copied(values: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)


def _outermost(module: nn.Module, experts: set[int]) -> Iterator[nn.Module]:
    """Yield the outermost modules inside that have a forward, but no experts."""
    for child in module.children():
        if id(child) in experts:
            continue
        if type(child).forward is nn.Module.forward:
            yield from _outermost(child, experts)
        elif not any(id(inside) in experts for inside in child.modules()):
            yield child


class ModuleExperts(ExpertParallel):
    """A list of experts, of which this rank holds some. Each parameter lies on one rank.

    Attributes:
        idle_zeros: True if an expert without calls has a gradient of zeros.
    """

    autopar_names: tuple[str, ...]
    autopar_state = (*ExpertParallel.autopar_state, "autopar_names", "idle_zeros", "_called", "_inside")
    idle_zeros = False
    _called: frozenset[int] = frozenset()  # without rows, in the forward that runs
    _inside: TorchGenerators | None = None  # generators of this rank's experts; None if they draw nothing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the list's own forward; without one, return :meth:`computed`."""
        if not self.calls_itself:
            return self.computed(*args)
        return _run(self, [self], super(RegionModule, self).forward, args, kwargs)  # type: ignore[misc]

    @property
    def calls_itself(self) -> bool:
        """Whether the list has its forward, which calls the experts."""
        kind: Any = type(self)
        return kind._autopar_plain.forward is not nn.Module.forward

    @property
    def experts(self) -> list[Any]:
        """All experts, in order."""
        if "autopar_names" not in vars(self):
            self.autopar_names = expert_names(self)  # type: ignore[arg-type]
        return [own_modules(self)[name] for name in self.autopar_names]

    def computed(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the outputs of experts ``ids``, ``[rows]``, for ``rows``, ``[rows, hidden]``."""
        self._refuse_hooks()
        return self._exchanged(rows, ids.unsqueeze(-1), torch.ones_like(rows[:, :1]))

    def _outputs(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        assert self.autopar.layout is not None
        ((start, stop),) = self.autopar.layout.ranges(self.tp.rank)
        if rows.is_meta:  # even routes
            counts = [high - low for low, high in even_shards(len(rows), stop - start)]
        else:
            counts = torch.bincount(local, minlength=stop - start).tolist()
        order = torch.argsort(local, stable=True)
        mine = zip(range(start, stop), self.experts[start:stop], rows[order].split(counts), strict=True)
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
    """A module around lists of experts, whose forward calls them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        lists: list[Any] = [each for each in own_modules(self).values() if isinstance(each, ModuleExperts)]
        outer = [each for each in lists if not each.calls_itself]
        return _run(self, outer, super().forward, args, kwargs)


class _Present(torch.autograd.Function):
    """Put ``x`` into the graph, as on other ranks; neither it nor the weight gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(caller: Any, lists: Sequence[Any], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run the forward of a module that calls experts, with outputs from their ranks. The calls depend on data."""
    path, given = caller.autopar.path, (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    like = next((x for x in given if x.is_floating_point() and x.ndim > 1), None)
    if like is None:
        raise ConfigError(f"expert_parallel_size: {path} is given no hidden states, [..., hidden], for its experts")
    inside = _of_this_rank(caller)
    calls = Calls(path, caller, [each.experts for each in lists])
    out = calls.note(forward, args, kwargs)
    if like.is_meta and not torch.is_grad_enabled():  # a dry run: the routes depend on data
        return out
    weight = next((p for p in caller.parameters() if p.requires_grad), None)
    outputs = []
    for place, experts in enumerate(lists):
        rows, ids = calls.rows(place, like)
        if weight is not None and torch.is_grad_enabled() and not rows.requires_grad:
            rows = _Present.apply(rows, weight)
        experts._called, experts._inside = calls.without_rows(place), inside
        outputs.append(experts.computed(rows, ids) if experts is caller else experts(rows, ids))
    calls.take(outputs)
    out = calls.replay(forward, args, kwargs)
    idle = [y.sum() for y in outputs if not len(y) and y.requires_grad]
    return _tied(out, idle) if idle else out


def _of_this_rank(caller: Any) -> TorchGenerators | None:
    """Return the generators of this rank's experts, as in a sharded region; None if they draw nothing."""
    if not caller.region.draws(caller.training):
        return None
    caller.region.draw_per_rank(caller.training)
    inside = TorchGenerators.now()
    caller.region.draw_alike()
    return inside


def _tied(out: Any, zeros: list[torch.Tensor]) -> Any:
    """Add zeros to the first floating-point tensor: the backward pass goes to ranks whose rows experts here have."""
    left = list(zeros)

    def add(x: Any) -> Any:
        if not left or not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        total = sum(left, x.new_zeros(()))
        left.clear()
        return x + total.to(x.dtype)

    return tree_map(add, out)
