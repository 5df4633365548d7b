"""``autopar policy check | list | show``: a policy tried on a model, or its resolved plan, as tables or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.errors import AutoparError, ConfigError, type_and_text
from autopar.tools.cli.app import PP, TP, Json, Trust, app, errors, print_json

if TYPE_CHECKING:
    from torch import nn

    from autopar.tools.cli.models import Head

policy = typer.Typer(
    help="Work with policies, which say how the weights of a model are sharded.",
    short_help="List, show, check and derive policies.",
    no_args_is_help=True,
)
app.add_typer(policy, name="policy")

MODEL = Annotated[
    str | None,
    typer.Option(
        help="A folder with config.json, a model of the hub, a model type of transformers (its default config), or "
        "my_model.py:CLASS. By default the first model type in the policy's match."
    ),
]
BY_EXPERT = Annotated[bool, typer.Option("--by-expert", help="Whole experts on each rank: --ep as large as --tp.")]
EP = Annotated[
    int | None, typer.Option("--ep", min=1, help="Expert-parallel size; above --tp, replicas share the experts.")
]


@policy.command("list", short_help="List the model types that have a policy.", epilog="Example: autopar policy list")
def list_types(as_json: Json = False) -> None:
    """Print every model type that has a policy, and the file of that policy."""
    with errors(as_json):
        from autopar.policy.load import own_policies, policy_folder

        listed = [(kind, Path(own.where.file).name) for own in own_policies().values() for kind in own.model_types]
        found = {kind: str(policy_folder() / file) for kind, file in sorted(listed)}
    print(json.dumps(found, indent=1) if as_json else "\n".join(f"{kind} {file}" for kind, file in found.items()))


@policy.command(
    short_help="Try a policy without weights.",
    epilog="Example: autopar policy check my.yaml --model my_model.py:MyModel --tp 4",
)
def check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MODEL", help="A policy (YAML); or a model as in --model: the policy found for it is checked."
        ),
    ],
    model: MODEL = None,
    tp: TP = 2,
    pp: PP = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, help="Context-parallel size, which must fit.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Sequence parallelism must fit.")
    ] = False,
    heads: Annotated[bool, typer.Option("--heads", help="Every class of the model's config, not only one.")] = False,
    by_expert: BY_EXPERT = False,
    ep: EP = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Try a policy on a model without weights: plan, shards of each rank, dry run, stages. Exit code 0 if all holds.

    Without --heads it also says whether sequence and context parallelism fit, which makes no difference to the exit
    code unless --sequence-parallel and --cp ask for them.
    """
    with errors(as_json):
        if sequence_parallel and tp == 1:
            raise ConfigError("--sequence-parallel needs --tp of at least 2, not 1: it shards over the same ranks")
        if sequence_parallel and cp > 1:
            raise ConfigError(f"--sequence-parallel and --cp {cp} shard the same sequences; check one at a time")
        file, named = policy_and_model(source, model)
        from autopar.tools.cli.models import heads as find_heads

        found = find_heads(named, every=heads, trust=trust)
        experts = _experts(tp, ep, by_expert=by_expert)
        options = {"tp": tp, "pp": pp, "cp": cp, "sequence_parallel": sequence_parallel, "ep": experts}
        reports = [_report(head, file, options | {"long_sequences": not heads}, len(found) > 1) for head in found]
    if as_json:
        print_json(reports if heads else reports[0])
    else:
        from autopar.tools.cli.policy_tables import print_report

        for report in reports:
            print_report(report, brief=len(reports) > 1)
    if not all(report["holds"] is not False for report in reports) or not any(report["holds"] for report in reports):
        raise typer.Exit(1)


def _experts(tp: int, ep: int | None, *, by_expert: bool) -> int:
    """Return the expert-parallel size that the two options ask for."""
    if by_expert and ep not in (None, tp):
        raise ConfigError(f"--by-expert is --ep {tp} with --tp {tp}, and --ep is {ep}; leave one of both out")
    return tp if by_expert else ep or 1


def policy_and_model(source: str, model: str | None) -> tuple[Path | None, str]:
    """Return the policy file of the user, if that is what ``source`` is, and what names the model.

    Raises:
        ConfigError: neither names a model, or both do.
        PolicyError: the file is not a policy.
    """
    if Path(source).suffix not in (".yaml", ".yml"):
        if model is not None:
            raise ConfigError(
                f"'{source}' is no policy file (.yaml), and --model names a model besides; give one of both"
            )
        return None, source
    from autopar.policy.load import read_user_policy

    read = read_user_policy(Path(source))
    if model is None and not read.model_types:
        raise ConfigError(f"{source} has no 'match', so it names no model: add --model my_model.py:CLASS")
    return Path(source), model or read.model_types[0]


def build(head: Head) -> nn.Module:
    """Build a model without memory for its weights.

    Raises:
        ConfigError: its constructor fails.
    """
    try:
        return head.build()
    except AutoparError:
        raise
    except Exception as error:  # whatever a constructor stumbles over
        raise ConfigError(f"{head.name} cannot be built: {type_and_text(error, 200)}") from error


def _report(head: Head, file: Path | None, options: dict[str, Any], skip: bool) -> dict[str, Any]:
    """The verdict on one class; ``holds`` is None for one of several that cannot be built from this config."""
    from autopar.tools.cli.policy_check import check_policy

    try:
        built = build(head)
    except ConfigError as error:
        if not skip or error.__cause__ is None:
            raise
        return {"model": head.name, "holds": None, "skipped": str(error)}
    return check_policy(built, file, **options)


@policy.command(
    short_help="Show how the weights of a model are sharded.",
    epilog="Example: autopar policy show mixtral --tp 2 --ep 8",
)
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
    ep: EP = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Print what each rank would hold of every parameter, and the line of the policy that says so. Nothing is run."""
    with errors(as_json):
        experts = _experts(tp, ep, by_expert=by_expert)
        file, named = policy_and_model(source, model)
        from autopar.tools.cli.models import heads
        from autopar.tools.cli.policy_check import resolve_policy

        built = build(heads(named, trust=trust)[0])
        report: dict[str, Any] = resolve_policy(built, file, tp=tp, pp=pp, ep=experts)
    if as_json:
        print_json(report)
        return
    from autopar.tools.cli.policy_tables import print_report

    print_report(report, places=True)
