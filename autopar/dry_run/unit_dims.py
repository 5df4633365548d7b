"""Where the units of a tensor are after an operation: the dim that holds them, or why none does. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from autopar.foreign.operators import schema_of

__all__ = ["SHAPE_ONLY", "VIEWS", "Followed", "SplitUnits", "follow"]

Given = list[tuple[torch.Tensor, "Followed | None"]]


class Followed(NamedTuple):
    """The dim of a tensor that holds units.

    Attributes:
        dim: counted from the front.
        parts: runs of units side by side in it: 2 for ``gate | up``; 0: of several sizes.
        units: in the (first) part, here.
        run: of a dim that other dims were folded into (``batch * heads``), how long the innermost repetition is.
        share: features here and in the full model; None where ranks hold the same ones.
    """

    dim: int
    parts: int
    units: int
    run: int | None
    share: tuple[int, int] | None


class SplitUnits(Exception):
    """An operation that does not leave units whole and apart, or of which that is not known."""


def follow(
    func: Any, name: str, args: Any, kwargs: Any, given: Given, made: Sequence[torch.Tensor], hints: Any
) -> list[Followed | None]:
    """Return where the units are in each tensor that an operation has made.

    Args:
        given: the tensors among the arguments with what is followed in them; at least one is.
        hints: what was followed in the same results of the full model.

    Raises:
        SplitUnits: the operation cuts or mixes them, or is not known.
    """
    held = [(x, f) for x, f in given if f is not None]
    first, followed = held[0]
    named = {a.name: a.default_value for a in schema_of(func).arguments if a.has_default_value()}
    named.update(zip((a.name for a in schema_of(func).arguments), args, strict=False))
    named.update(kwargs)
    if name in VIEWS:
        hint = hints[0] if hints else None
        return [_viewed(first, followed, made[0], hint)]
    rule = _RULES.get(name)
    if rule is not None:
        return rule(name, first, followed, named, given, made)
    if torch.Tag.pointwise in func.tags or name in _ALIKE:
        return _pointwise(name, held, made)
    if name.startswith("_scaled_dot_product"):
        return _attention(name, held, made)
    raise SplitUnits(f"{name} is not known to work on each unit by itself")


def _pointwise(name: str, held: Any, made: Sequence[torch.Tensor]) -> list[Followed | None]:
    places = {(f.dim - x.ndim, f.run, f.parts) for x, f in held}
    if len(places) != 1:
        raise SplitUnits(f"{name} joins units that lie along other dims, or beside other parts")
    back = places.pop()[0]
    best = next((f for _, f in held if f.share is not None), held[0][1])
    return [best._replace(dim=x.ndim + back) if x.ndim else None for x in made]


def _viewed(x: torch.Tensor, f: Followed, made: torch.Tensor, hint: Followed | None) -> Followed:
    old, new = tuple(x.shape), tuple(made.shape)
    inner = prod(old[f.dim + 1 :])
    if f.run is not None:
        dims = [e for e, size in enumerate(new) if size == f.run and prod(new[e + 1 :]) == inner]
        if not dims and prod(new[1:]) != 0:
            dims = [e for e, size in enumerate(new) if size % f.run == 0 and prod(new[e + 1 :]) == inner]
            if dims:
                return f._replace(dim=dims[0])
        if not dims:
            raise SplitUnits(f"a view of {list(old)} as {list(new)} leaves no dim of units")
        return f._replace(dim=dims[0], run=None)
    dims = [e for e in range(len(new)) if prod(new[e:]) == old[f.dim] * inner]
    if dims:
        if hint is not None and hint.dim in dims and hint.run is None:
            return f._replace(dim=hint.dim)
        exact = [e for e in dims if new[e] == f.units]
        whole = [e for e in dims if new[e] > 1]
        return f._replace(dim=(exact or whole or dims)[0])
    dims = [e for e, size in enumerate(new) if prod(new[e + 1 :]) == inner and size % old[f.dim] == 0]
    if not dims:
        raise SplitUnits(f"a view of {list(old)} as {list(new)} leaves no dim of units")
    return f._replace(dim=dims[0], run=old[f.dim])


def _moved(name: str, x: Any, f: Followed, named: Any, given: Given, made: Any) -> list[Followed | None]:
    if name == "t":
        return [f._replace(dim=x.ndim - 1 - f.dim)]
    if name in ("transpose", "swapaxes"):
        one, other = (named.get(key, named.get(old)) % x.ndim for key, old in (("dim0", "axis0"), ("dim1", "axis1")))
        return [f._replace(dim={one: other, other: one}.get(f.dim, f.dim))]
    if name == "permute":
        return [f._replace(dim=[d % x.ndim for d in named["dims"]].index(f.dim))]
    if name == "unsqueeze":
        at = named["dim"] % (x.ndim + 1)
        return [f._replace(dim=f.dim + (at <= f.dim))]
    if name == "expand":
        more = made[0].ndim - x.ndim
        if made[0].shape[f.dim + more] != x.shape[f.dim]:
            raise SplitUnits(f"expand repeats units of {list(x.shape)}")
        return [f._replace(dim=f.dim + more)]
    gone = [d % x.ndim for d in _listed(named.get("dim"))] if named.get("dim") is not None else range(x.ndim)
    lost = [d for d in gone if x.shape[d] == 1]
    if f.dim in lost:
        raise SplitUnits(f"squeeze drops the dim of units of {list(x.shape)}")
    return [f._replace(dim=f.dim - sum(d < f.dim for d in lost))]


def _cut(name: str, x: Any, f: Followed, named: Any, given: Given, made: Any) -> list[Followed | None]:
    """Slices and splits: along other dims, or exactly between the parts."""
    dim = named["dim"] % x.ndim
    if dim != f.dim:
        less = name in ("select", "unbind") and dim < f.dim
        return [f._replace(dim=f.dim - less) for _ in made]
    if name == "slice" and made[0].shape == x.shape:
        return [f]
    if name in ("split", "split_with_sizes", "chunk") and len(made) == f.parts:
        if len({part.shape for part in made}) == 1:
            return [f._replace(parts=1) for _ in made]
    elif name == "slice" and f.parts > 1 and named["step"] == 1:
        each = x.shape[dim] // f.parts
        if made[0].shape[dim] == each and (named["start"] or 0) % each == 0:
            return [f._replace(parts=1)]
    lie = "in one run" if f.parts == 1 else f"in {f.parts} parts" if f.parts else "in parts of several sizes"
    raise SplitUnits(f"{name} cuts the sharded features of {list(x.shape)}, which lie {lie}")


def _joined(name: str, x: Any, f: Followed, named: Any, given: Given, made: Any) -> list[Followed | None]:
    held = [(y, g) for y, g in given if g is not None]
    if len({(y.ndim, g.dim, g.run, g.parts) for y, g in held}) != 1:
        raise SplitUnits(f"{name} joins units that lie along other dims")
    dim = (named.get("dim") or 0) % made[0].ndim
    if name == "stack":
        return [f._replace(dim=f.dim + (dim <= f.dim))]
    if dim == f.dim:
        raise SplitUnits(f"{name} puts units of {list(x.shape)} beside others")
    return [f]


def _along(name: str, x: Any, f: Followed, named: Any, given: Given, made: Any) -> list[Followed | None]:
    """Follow an operation along dims, which must not be the units'."""
    if "normalized_shape" in named:
        dims = [x.ndim - 1 - place for place in range(len(named["normalized_shape"]))]
    else:
        asked = named.get("dim")
        dims = [d % x.ndim for d in _listed(asked)] if asked not in (None, []) else list(range(x.ndim))
    if f.dim in dims:
        raise SplitUnits(f"{name} works along the sharded features of {list(x.shape)}")
    found: list[Followed | None] = []
    for y in made:
        kept = y.ndim == x.ndim
        found.append(f if kept else f._replace(dim=f.dim - sum(d < f.dim for d in dims)))
    return found


def _product(name: str, x: Any, f: Followed, named: Any, given: Given, made: Any) -> list[Followed | None]:
    places = [key for key in ("self", "mat1", "batch1", "input") if isinstance(named.get(key), torch.Tensor)]
    left = named["mat1"] if "mat1" in named else named["batch1"] if "batch1" in named else named[places[0]]
    right = named.get("mat2", named.get("batch2", named.get("vec")))
    known = {id(y): g for y, g in given}
    one, other = known.get(id(left)), known.get(id(right))
    batch = left.ndim - 2
    if (one is not None and one.dim == left.ndim - 1) or (other is not None and other.dim == batch):
        raise SplitUnits(f"{name} multiplies the sharded features of {list(x.shape)} away, which is a partial sum")
    if one is not None and other is not None:
        if one.dim != other.dim or one.dim >= batch or one.run != other.run:
            raise SplitUnits(f"{name} multiplies units with one another")
        return [one if one.share is not None else other]
    if one is not None:
        return [one]
    if other is not None:
        return [other]
    raise SplitUnits(f"{name} adds to sharded features")


def _attention(name: str, held: Any, made: Sequence[torch.Tensor]) -> list[Followed | None]:
    query, f = held[0]
    if any(g.dim != f.dim for _, g in held[:3]) or f.dim >= query.ndim - 2:
        raise SplitUnits("attention over the sharded features themselves")
    return [f if y.ndim > f.dim and y.shape[f.dim : f.dim + 1] == query.shape[f.dim : f.dim + 1] else None
            for y in made]  # fmt: skip


def _complex(name: str, x: Any, f: Followed, named: Any, given: Given, made: Any) -> list[Followed | None]:
    if f.dim >= min(x.ndim, made[0].ndim):
        raise SplitUnits(f"{name} takes pairs of units of {list(x.shape)}")
    return [f]


def _repeated(name: str, x: Any, f: Followed, named: Any, given: Given, made: Any) -> list[Followed | None]:
    more = made[0].ndim - x.ndim
    if named["repeats"][f.dim + more] != 1:
        raise SplitUnits(f"repeat repeats units of {list(x.shape)} as a whole")
    return [f._replace(dim=f.dim + more)]


def _gated(name: str, x: Any, f: Followed, named: Any, given: Given, made: Any) -> list[Followed | None]:
    if named["dim"] % x.ndim != f.dim:
        return [f]
    if f.parts != 2:
        raise SplitUnits(f"glu cuts the sharded features of {list(x.shape)}, which lie in one run")
    return [f._replace(parts=1)]


def _listed(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


# What has nothing of its argument but the shape.
SHAPE_ONLY = frozenset(
    (
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "zeros_like", "ones_like"),
        *("full_like", "empty_like", "sym_size", "sym_stride", "sym_numel"),
    )
)
VIEWS = frozenset(("view", "_unsafe_view", "reshape", "_reshape_alias"))
# What keeps every dim.
_ALIKE = frozenset(
    (
        *("clone", "_to_copy", "detach", "alias", "lift_fresh", "native_dropout", "bernoulli", "copy_", "copy"),
        *("contiguous", "masked_fill", "masked_fill_", "where", "_conj", "fill_", "zero_", "dropout"),
    )
)
Rule = Callable[..., list["Followed | None"]]
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("t", "transpose", "swapaxes", "permute", "unsqueeze", "expand", "squeeze"), _moved),
    **dict.fromkeys(("select", "slice", "split", "split_with_sizes", "unbind", "chunk"), _cut),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "sort", "topk", "flip", "roll"), _along),
    **dict.fromkeys(("sum", "mean", "var", "std", "var_mean", "amax", "amin", "max", "min", "logsumexp"), _along),
    **dict.fromkeys(("linalg_vector_norm", "norm", "prod", "any", "all", "argmax", "cumprod"), _along),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), _along),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv"), _product),
    **dict.fromkeys(("view_as_complex", "view_as_real"), _complex),
    "repeat": _repeated,
    "glu": _gated,
}
