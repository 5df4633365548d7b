"""``autopar policy check | list | show | new``: check, list, show and derive policies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.app import CP, EP, PP, TP, Json, Model, Trust, app, errors, print_json
from autopar.cli.tables import filled, lines, shape, size
from autopar.errors import ConfigError, VerificationError, listed

if TYPE_CHECKING:
    from autopar.tools.derivation.derive import Derived
    from autopar.tools.verification.report import VerificationReport


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


@policy.command("list", short_help="List the model types that have a policy.", epilog="Example: autopar policy list")
def list_types(as_json: Json = False) -> None:
    """Print every model type that has a policy, and the file of that policy."""
    with errors(as_json):
        from autopar.policy.files import policy_folder
        from autopar.policy.load import own_policies

        listed = [(kind, Path(own.where.file).name) for own in own_policies().values() for kind in own.model_types]
        found = {kind: str(policy_folder() / file) for kind, file in sorted(listed)}
    if as_json:
        print_json(found)
    else:
        print("\n".join(f"{kind} {file}" for kind, file in found.items()))


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
    cp: CP = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Sequence parallelism must fit.")
    ] = False,
    heads: Annotated[bool, typer.Option("--heads", help="Every class of the model's config, not only one.")] = False,
    ep: EP = 1,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Try a policy on a model without weights: plan, shards of each rank, dry run, stages. Exit code 0 if all pass.

    Without --heads it also says whether sequence and context parallelism fit, which makes no difference to the exit
    code unless --sequence-parallel and --cp ask for them.
    """
    with errors(as_json):
        if sequence_parallel and tp == 1:
            raise ConfigError("--sequence-parallel needs --tp of at least 2, not 1: it shards over the same ranks")
        if sequence_parallel and cp > 1:
            raise ConfigError(f"--sequence-parallel and --cp {cp} shard the same sequences; check one at a time")
        file, named = policy_and_model(source, model)
        from autopar.tools.commands.models import heads as find_heads
        from autopar.tools.commands.policy_check import check_policy

        found, reports = find_heads(named, every=heads, trust=trust), []
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "long_sequences": not heads}
        for head in found:
            try:
                reports.append(check_policy(head.build(), file, tp=tp, pp=pp, cp=cp, ep=ep, **options))
            except ConfigError as error:
                if len(found) == 1 or error.__cause__ is None:
                    raise
                reports.append({"model": head.name, "holds": None, "skipped": str(error)})  # an unsuitable class
    if as_json:
        print_json(reports if heads else reports[0])
    else:
        for report in reports:
            print_report(report, brief=len(reports) > 1)
    if not all(report["holds"] is not False for report in reports) or not any(report["holds"] for report in reports):
        raise typer.Exit(1)


def policy_and_model(source: str, model: str | None) -> tuple[Path | None, str]:
    """Return the user's policy file, if ``source`` is one, and the name of the model."""
    if Path(source).suffix not in (".yaml", ".yml"):
        if model is not None:
            raise ConfigError(
                f"'{source}' is not a policy file (.yaml), so --model is not allowed; pass only one model"
            )
        return None, source
    from autopar.policy.load import read_user_policy

    read = read_user_policy(Path(source))
    if model is None and not read.model_types:
        raise ConfigError(f"{source} has no 'match', so --model is required: add --model my_model.py:CLASS")
    return Path(source), model or read.model_types[0]


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
    ep: EP = 1,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Print the shard of every parameter on each rank, and the policy line of its rule. The model does not run."""
    with errors(as_json):
        file, named = policy_and_model(source, model)
        from autopar.tools.commands.models import heads
        from autopar.tools.commands.policy_check import check_policy

        report = check_policy(heads(named, trust=trust)[0].build(), file, tp=tp, pp=pp, ep=ep, dry_run=False)
        if report["errors"]:
            raise ConfigError(report["errors"][0])
    report = {name: found for name, found in report.items() if name not in ("dry_run", "errors", "holds")}
    if as_json:
        print_json(report)
    else:
        print_report(report, places=True)


def print_report(report: dict[str, Any], *, brief: bool = False, places: bool = False) -> None:
    """Print a report of :func:`.policy_check.check_policy`.

    Args:
        brief: A flag to omit tables.
        places: A flag to add a column with the place of each rule.
    """
    print("\n".join(_in_words(report, brief, places)))
    for error in report.get("errors", ()):
        print(f"error: {error}", file=sys.stderr)


def _in_words(report: dict[str, Any], brief: bool, places: bool) -> Iterator[str]:
    from autopar.plan.plan import rows

    if "skipped" in report:
        yield f"{report['model']}: not checked. {report['skipped']}"
        return
    used, tensors = report["policy"], report["tensors"]
    named = f"policy {used['name']} ({used['where']})" if used else "no policy"
    yield f"{report['model']}: {report['parameters']:,} parameters, {named}"
    if report["notice"]:
        yield report["notice"]
    staged = report["pipeline_parallel_size"] > 1
    if tensors and not brief:
        yield from _tables(report, places, staged)
    for rank in report["ranks"]:
        place = f"ep rank {rank['ep']}, " if "ep" in rank else ""
        place += f"tp rank {rank['tp']}" + (f", pp rank {rank['pp']}" if staged else "")
        yield f"{place}: {rank['parameters']:,} parameters, {size(rank['bytes'])}"
    if tensors:
        replicated = [prod(each["shape"]) for each in tensors if each["rule"].startswith(("replicated", "once"))]
        yield f"replicated: {sum(replicated):,} parameters in {len(replicated)} of {len(tensors)} tensors"
        if "dry_run" in report:
            yield f"dry run: {report['dry_run']}"
        if report["stages"] == "fails":
            yield "stages: fails"
        elif staged:
            for stage in report["stages"]:
                runs = rows([{"name": f"{path}."} for path in stage["modules"]])  # one entry for each range of numbers
                modules = ", ".join(name.removesuffix(".") for name, _ in runs)
                yield f"stage {stage['stage']}: {modules} ({stage['parameters']:,} parameters)"
        for name in ("sequence_parallel", "context_parallel"):
            if report.get(name):
                yield f"{name.replace('_', ' ')}: {' '.join(report[name].split())}"
    if "holds" in report:
        yield "all checks pass" if report["holds"] else "some checks fail"


def _tables(report: dict[str, Any], places: bool, staged: bool) -> Iterator[str]:
    """Yield the lines of the tables of parameters and attributes."""
    from autopar.plan.plan import rows

    tp, ep = report["tensor_parallel_size"], report["expert_parallel_size"]
    over = f"on each {'ep' if ep > tp else 'tp'} rank"
    cells = []
    for name, tensor in rows(report["tensors"]):
        local = _alike(list(map(shape, tensor["local_shapes"])), tp)
        ranks = ", ".join(map(str, tensor["ranks"])) if staged and isinstance(report["stages"], list) else ""
        cells.append([name, shape(tensor["shape"]), tensor["rule"], tensor["where"] if places else "", local, ranks])
    yield from lines(filled(["parameter", "shape", "rule", "rule in", over, "pp rank"], cells))
    cells = []
    for name, entry in rows(report["attributes"]):
        local = _alike(list(map(str, entry["local"])), tp)
        cells.append([name, str(entry["whole"]), entry["where"] if places else "", local])
    if cells:
        yield from lines(filled(["attribute", "value", "rule in", over], cells))


def _alike(values: list[str], tp: int) -> str:
    """Return one value if all ranks have it, the values of tp ranks if all replicas are equal, else all values."""
    runs = (values[:length] for length in (1, tp) if values[:length] * (len(values) // length) == values)
    return " | ".join(next(runs, values))


_SHOWN = 8  # names in a comment


@policy.command(
    short_help="Derive a policy for a new model, and prove it.",
    epilog="Example: autopar policy new my_model.py:MyModel -o my.yaml",
)
def new(
    model: Model,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it there, not to the terminal.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=2, help="Processes of the proof.")] = 2,
    proof: Annotated[bool, typer.Option(help="Compare with the plain model; takes most of the time.")] = True,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Derive a policy for a model that has none: units, rules and attributes from its modules and one forward.

    The policy is tried in dry runs and then proven: a small random model of the class, plain and on two processes, with
    the same outputs and gradients. Exit code 1, and no file, if it is not proven.
    """
    with errors(as_json):
        draft = _drafted(model, tp if proof else 0, trust)
        if output is not None:
            output.write_text(draft["text"], encoding="utf-8")
            draft["file"] = str(output)
    if as_json:
        print_json(draft)
        return
    if output is None:
        print(draft["text"], end="")
    else:
        print(f"wrote {output}; next: autopar policy check {output} --model {model}")
    for name in draft["unseen"]:
        print(f"not seen: no forward of the model reached {name}, which stays replicated", file=sys.stderr)


def _drafted(source: str, tp: int, trust: bool) -> dict[str, Any]:
    """Return the derived policy of a model, its text, and its proof on ``tp`` ranks; 0: no proof."""
    from transformers import PreTrainedModel

    from autopar.plan.make_plan import make_plan
    from autopar.policy.load import read_user_policy
    from autopar.tools.commands.models import heads
    from autopar.tools.derivation.derive import derive
    from autopar.tools.derivation.policy_tree import yaml_text
    from autopar.tools.verification.small_models import build_small, losses_of
    from autopar.tools.verification.verify import verify

    built: Any = heads(source, trust=trust)[0].build()
    if not isinstance(built, PreTrainedModel):
        raise ConfigError(f"'policy new' requires a Hugging Face PreTrainedModel; got {type(built).__name__}")
    small = build_small(type(built), built.config)
    derived = derive(small)
    losses = losses_of(built)
    tree = derived.tree | ({"loss": losses} if losses else {})
    plan = make_plan(built, read_user_policy(tree), max(tp, 2))
    sizes = {plan.canonical(name): parameter.numel() for name, parameter in built.named_parameters()}
    sharded = sum(count for name, count in sizes.items() if plan.tensors[name].layout is not None) / sum(sizes.values())
    report = verify(small, {"tp": tp}, policy=tree, checks=("weights", "forward", "backward")) if tp else None
    try:
        proof = None if report is None else report.raise_if_failed().to_dict()
    except VerificationError as error:
        raise VerificationError(f"the derived policy is wrong, and not written: {error}") from None
    return {
        "policy": tree,
        "text": yaml_text(tree, _comments(type(built).__name__, derived, sharded, report)),
        "file": None,
        "sharded": sharded,
        "gathered": list(derived.gathered),
        "whole": list(derived.replicated),
        "unseen": list(derived.unseen),
        "proof": proof,
    }


def _comments(kind: str, derived: Derived, sharded: float, report: VerificationReport | None) -> list[str]:
    lines = [f"{kind}: derived from its modules and a forward; {sharded:.1%} of its parameters are sharded."]
    if report is None:
        lines.append("Not proven: compare outputs and gradients with the reference model before you use it.")
    else:
        lines.append("Proven on a small random model: outputs and gradients equal the reference model's.")
    if derived.gathered:
        lines.append(f"Sharded, and gathered because the forward needs all heads: {listed(derived.gathered, _SHOWN)}.")
    if derived.replicated:
        lines.append(f"Replicated, because no independent units were found: {listed(derived.replicated, _SHOWN)}.")
        lines.append("These include layers with a single unit, such as the key projection of multi-query attention.")
    if derived.unseen:
        lines.append(f"Replicated, because the forward did not reach them: {', '.join(derived.unseen)}.")
    return lines
