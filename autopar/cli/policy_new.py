"""``autopar policy new``: a policy derived from a model's structure, proven on two processes, as YAML for review."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.app import errors
from autopar.cli.policy import policy

if TYPE_CHECKING:
    from autopar.derivation.derive import Derived
    from autopar.verification.report import Report

__all__ = ["new"]


@policy.command()
def new(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with config.json, a model of the hub, a model type of transformers, or my_model.py:CLASS.",
        ),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it there, not to the terminal.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=2, help="Processes of the proof.")] = 2,
    proof: Annotated[bool, typer.Option(help="Compare with the plain model; takes most of the time.")] = True,
) -> None:
    """Derive a policy for a model that has none: units, rules and attributes from its modules and one forward.

    The policy is tried in dry runs and then proven: a small random model of the class, plain and on two processes, with
    the same outputs and gradients. Exit code 1, and no file, if it is not proven.
    """
    with errors():
        derived, text, report = _derived(model, tp if proof else 0)
        if report is not None and not report.ok:
            from autopar.errors import VerificationError

            try:
                report.raise_if_failed()
            except VerificationError as error:
                raise VerificationError(f"the derived policy is wrong, nothing is written: {error}") from None
        if output is None:
            print(text, end="")
        else:
            output.write_text(text, encoding="utf-8")
            print(f"wrote {output}; next: autopar policy check {output} --model {model}")
    for name in derived.unseen:
        print(f"not seen: no forward of the model reached {name}, which stays whole", file=sys.stderr)


def _derived(source: str, tp: int) -> tuple[Derived, str, Report | None]:
    """The policy of the model that ``source`` names, its text, and the proof (None if ``tp`` is 0)."""
    from transformers import PreTrainedModel

    from autopar.cli.models import heads
    from autopar.derivation.derive import derive
    from autopar.derivation.yaml_text import composed, yaml_text
    from autopar.errors import ConfigError
    from autopar.plan.make_plan import make_plan
    from autopar.policy.load import read_user_policy
    from autopar.verification.small_models import build_small

    built: Any = heads(source)[0].build()
    if not isinstance(built, PreTrainedModel):
        raise ConfigError(
            f"{type(built).__name__} is no Hugging Face model: 'policy new' needs a PreTrainedModel, of which the "
            "inputs are known"
        )
    small = build_small(type(built), built.config)
    derived = derive(small)
    tree = composed(small, derived.tree)
    plan = make_plan(built, read_user_policy(tree), max(tp, 2))
    report = _proof(small, tree, tp) if tp else None
    comments = _comments(source, built, plan, derived, report)
    return derived, yaml_text(tree, comments), report


def _proof(small: Any, tree: dict[str, Any], tp: int) -> Report:
    from autopar.verification.verify import verify

    config = {"model_parallelism": {"tensor_parallel_size": tp}}
    return verify(small, config, policy=tree, checks=("weights", "forward", "backward"))


def _comments(source: str, built: Any, plan: Any, derived: Derived, report: Report | None) -> list[str]:
    sizes = {plan.canonical(name): parameter.numel() for name, parameter in built.named_parameters()}
    total = sum(sizes.values())
    sharded = sum(count for name, count in sizes.items() if plan.tensors[name].layout is not None)
    share = f"{sharded / total:.1%} of its parameters are sharded"
    lines = [f"{type(built).__name__}: derived from its modules and a forward; {share}."]
    if report is None:
        lines.append("Not proven: compare outputs and gradients with the plain model's before you rely on it.")
    else:
        lines.append("Proven on a small random model: outputs and gradients are those of the plain one.")
    if derived.whole:
        shown = ", ".join(derived.whole[:8]) + (f" and {len(derived.whole) - 8} more" if len(derived.whole) > 8 else "")
        lines.append(f"Replicated, since no units were found that never meet: {shown}.")
    if derived.unseen:
        lines.append(f"Replicated, since the forward did not reach them: {', '.join(derived.unseen)}.")
    return lines
