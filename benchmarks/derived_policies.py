"""What derived policies are worth, with those by hand hidden: a row per model type of the tests.

python -m benchmarks.derived_policies [MODEL_TYPE ...] [--prove] [--rows FILE]

A row says how many of the parameters a derived policy shards as the one by hand, after its dry runs. With ``--prove``
two processes compare outputs and gradients with the plain model's, where heads do not divide by the ranks; what the dry
runs accept and the numbers refuse is counted as wrong, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import transformers

from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import AutoparError
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy, supported_model_types
from autopar.tools.derivation.derive import derive
from tests.harness.worlds import pooled
from tests.parity import check
from tests.random_models import Case, batches, build, cases, kind

_TP = 2
_EVEN, _UNEVEN = (4, 2), (6, 3)  # heads, and heads of keys and values
_ORDER = ("seq2seq", "causal", "masked", "base")


def main_case(model_type: str) -> Case | None:
    """Return the head of a model type with most behind it; None for a type that only parts of other models have."""
    heads = [case for case in cases(model_type) if not case.variant]
    order = {name: place for place, name in enumerate(_ORDER)}
    return min(heads, key=lambda one: order.get(str(kind(one.head)), len(_ORDER)), default=None)


def compare(case: Case) -> dict[str, Any]:
    """Return a row: the parameters that are sharded alike, of how many; why there is no policy; the policy."""
    start = time.perf_counter()
    model = build(case, *_EVEN)
    by_hand = make_plan(model, find_policy(model), _TP)
    names = {by_hand.canonical(name) for name, _ in model.named_parameters()}
    row: dict[str, Any] = {"type": case.model_type, "head": case.head, "alike": 0, "of": len(names), "why": ""}
    try:
        tree = derive(model).tree
        derived = make_plan(model, read_user_policy(tree), _TP)
    except AutoparError as error:
        return row | {"why": str(error).split("\n", maxsplit=1)[0], "seconds": time.perf_counter() - start}
    except Exception as error:  # what is no refusal is a mistake
        return row | {"why": f"{type(error).__name__}: {error}", "wrong": f"derive raises {type(error).__name__}"}
    held = {name: (_held(by_hand.tensors[name]), _held(derived.tensors[derived.canonical(name)])) for name in names}
    others = sorted(name for name, (one, other) in held.items() if one != other)
    return row | {
        "alike": len(names) - len(others),
        "others": others,
        "whole": sum(held[name][1] is None for name in others),
        "tree": tree,
        "seconds": time.perf_counter() - start,
    }


def _held(tensor: Any) -> Any:
    """What each rank holds of a tensor; None if it is all of it."""
    layout = tensor.layout
    if layout is None or all(layout.local_size(rank) == layout.size for rank in range(_TP)):
        return None
    return layout.dim, [layout.ranges(rank) for rank in range(_TP)]


@pooled(world_size=_TP, timeout=120)
def prove(case: Case, tree: dict[str, Any], sizes: tuple[int, int]) -> None:
    """Compare outputs and gradients of a case with the plain model's on two ranks."""
    transformers.logging.set_verbosity_error()
    model = build(case, *sizes)
    check(lambda: model, batches(case, model.config, 1), _TP, policy=tree, step=False).mpu.destroy()


def proven(case: Case, tree: dict[str, Any]) -> str:
    """Return what is wrong with a derived policy in numbers; an empty text if nothing is."""
    sizes = _UNEVEN
    try:  # a policy is for all sizes of its type, but for those that initialize refuses
        model = build(case, *sizes)
        check_plan(model, "", make_plan(model, read_user_policy(tree), _TP))
    except Exception:  # counts that are no heads, or a config that has but one size
        sizes = _EVEN
    try:
        prove(case, tree, sizes)
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{sizes[0]} heads: {lines[-1] if lines else error!r}"
    return ""


def rows(types: Iterable[str], *, numbers: bool) -> Iterator[dict[str, Any]]:
    """Yield the row of each model type that a model can be built of."""
    for model_type in types:
        case = main_case(model_type)
        if case is None:
            continue
        row = compare(case)
        if numbers and "tree" in row:
            row["wrong"] = proven(case, row["tree"])
        yield row


def main() -> int:
    """Print the table, and the share of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; by default all")
    parser.add_argument("--prove", action="store_true", help="compare numbers on two processes")
    parser.add_argument("--rows", type=Path, help="append the rows there as JSON, one a line")
    options = parser.parse_args()
    alike = total = derived = wrong = count = 0
    shares = []
    for row in rows(options.types or sorted(supported_model_types()), numbers=options.prove):
        count += 1
        alike, total, derived = alike + row["alike"], total + row["of"], derived + ("tree" in row)
        wrong += bool(row.get("wrong"))
        shares.append(row["alike"] / max(row["of"], 1))
        note = row["why"] or (f"WRONG: {row['wrong']}" if row.get("wrong") else "")
        print(f"{row['type']:32} {row['alike']:4} of {row['of']:4} {note[:150]}", flush=True)
        if options.rows is not None:
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(
        f"{count} model types, {derived} with a derived policy" + (f", {wrong} of them wrong" if options.prove else "")
    )
    print(f"sharded as by hand: {alike} of {total} parameters, {alike / max(total, 1):.1%}", end="")
    print(f"; {sum(shares) / max(count, 1):.1%} in the mean over model types")
    return 1 if wrong else 0


if __name__ == "__main__":
    from benchmarks.derived_policies import main as run  # ranks import the module by this name

    raise SystemExit(run())
