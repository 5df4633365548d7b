"""``autopar policy show``: the resolved plan as a table, with the place of each rule."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from autopar.tools.cli.app import Json, Trust, errors
from autopar.tools.cli.policy import BY_EXPERT, MODEL, PP, TP, build, policy, policy_and_model

__all__ = ["show"]


@policy.command()
def show(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_TYPE|MODEL|FILE",
            help="A model type of transformers (its default config), a model as in --model, or a policy (YAML).",
        ),
    ],
    model: MODEL = None,
    tp: TP = 2,
    pp: PP = 1,
    by_expert: BY_EXPERT = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Print what each rank would hold of every parameter, and the line of the policy that says so. Nothing is run."""
    with errors(as_json):
        file, named = policy_and_model(source, model)
        from autopar.tools.cli.models import heads
        from autopar.tools.cli.policy_check import resolve_policy

        built = build(heads(named, trust=trust)[0])
        report: dict[str, Any] = resolve_policy(built, file, tp=tp, pp=pp, by_expert=by_expert)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    from autopar.tools.cli.policy_tables import print_report

    print_report(report, places=True)
