"""Which share of the parameters derived policies shard as those by hand, with the latter hidden: a row per model type.

python -m benchmarks.derived_policies [MODEL_TYPE ...]
"""

from __future__ import annotations

import sys
from typing import Any

from autopar.derivation.derive import derive
from autopar.errors import AutoparError
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy, supported_model_types
from tests.random_models import build, cases, kind

_TP = 2
_ORDER = ("seq2seq", "causal", "masked", "base")


def compare(model_type: str) -> tuple[int, int, str] | None:
    """Return how many parameters are sharded alike, of how many, and why none is; None for a part of other models."""
    heads = [case for case in cases(model_type) if not case.variant]
    if not heads:
        return None
    case = min(heads, key=lambda one: _ORDER.index(str(kind(one.head))) if kind(one.head) in _ORDER else len(_ORDER))
    model = build(case, 4, 2)
    by_hand = make_plan(model, find_policy(model), _TP)
    names = {by_hand.canonical(name) for name, _ in model.named_parameters()}
    try:
        derived = make_plan(model, read_user_policy(derive(model).tree), _TP)
    except AutoparError as error:
        return 0, len(names), str(error).split("\n", maxsplit=1)[0]
    same = sum(_held(by_hand.tensors[name]) == _held(derived.tensors[derived.canonical(name)]) for name in names)
    return same, len(names), ""


def _held(tensor: Any) -> Any:
    """What each rank holds of a tensor; None if it is all of it."""
    layout = tensor.layout
    if layout is None or all(layout.local_size(rank) == layout.size for rank in range(_TP)):
        return None
    return layout.dim, [layout.ranges(rank) for rank in range(_TP)]


def main(types: list[str]) -> None:
    """Print the table, and the share of all."""
    alike = total = 0
    for model_type in types or sorted(supported_model_types()):
        row = compare(model_type)
        if row is not None:
            same, count, why = row
            alike, total = alike + same, total + count
            print(f"{model_type:32} {same:4} of {count:4} {why[:120]}", flush=True)
    print(f"{'all':32} {alike:4} of {total:4}: {alike / max(total, 1):.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
