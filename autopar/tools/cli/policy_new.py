"""``autopar policy new``: a policy derived from a model's structure, proven on two processes, as YAML for review."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.errors import listed
from autopar.tools.cli.app import Json, Model, Trust, errors, print_json
from autopar.tools.cli.policy import policy

if TYPE_CHECKING:
    from autopar.tools.derivation.derive import Derived
    from autopar.tools.verification.report import Report

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
        if draft.proof is not None and not draft.proof.ok:
            from autopar.errors import VerificationError

            try:
                draft.proof.raise_if_failed()
            except VerificationError as error:
                raise VerificationError(f"the derived policy is wrong, nothing is written: {error}") from None
        if output is not None:
            output.write_text(draft.text, encoding="utf-8")
    if as_json:
        print_json(draft.to_json(output))
        return
    if output is None:
        print(draft.text, end="")
    else:
        print(f"wrote {output}; next: autopar policy check {output} --model {model}")
    for name in draft.derived.unseen:
        print(f"not seen: no forward of the model reached {name}, which stays whole", file=sys.stderr)


@dataclass(frozen=True)
class _Draft:
    """A derived policy and what is printed with it.

    Attributes:
        tree: The policy as plain data; ``text``: The same as YAML.
        meetings: Replicated layers and the operation in which all of their units meet.
        sharded: The share of the parameters that it shards.
        proof: The comparison with the single-process model; None if there is none.
    """

    derived: Derived
    meetings: dict[str, str]
    tree: dict[str, Any]
    text: str
    sharded: float
    proof: Report | None

    def to_json(self, output: Path | None) -> dict[str, Any]:
        return {
            "policy": self.tree,
            "text": self.text,
            "file": None if output is None else str(output),
            "sharded": self.sharded,
            "gathered": list(self.derived.gathered),
            "whole": list(self.derived.whole),
            "meetings": self.meetings,
            "unseen": list(self.derived.unseen),
            "proof": None if self.proof is None else self.proof.to_dict(),
        }


def _drafted(source: str, tp: int, trust: bool) -> _Draft:
    """The policy of the model that ``source`` names, with its proof (none if ``tp`` is 0)."""
    from transformers import PreTrainedModel

    from autopar.errors import ConfigError
    from autopar.plan.make_plan import make_plan
    from autopar.policy.load import read_user_policy
    from autopar.tools.cli.models import heads
    from autopar.tools.cli.policy import build
    from autopar.tools.derivation.derive import derive
    from autopar.tools.derivation.reasons import meetings
    from autopar.tools.derivation.yaml_text import composed, yaml_text
    from autopar.tools.verification.policy_of_small import losses_of
    from autopar.tools.verification.small_models import build_small

    built: Any = build(heads(source, trust=trust)[0])
    if not isinstance(built, PreTrainedModel):
        raise ConfigError(
            f"{type(built).__name__} is no Hugging Face model: 'policy new' needs a PreTrainedModel, of which the "
            "inputs are known"
        )
    small = build_small(type(built), built.config)
    derived = derive(small)
    tree, losses = composed(small, derived.tree), losses_of(built)
    if losses:
        tree["loss"] = losses
    plan = make_plan(built, read_user_policy(tree), max(tp, 2))
    sizes = {plan.canonical(name): parameter.numel() for name, parameter in built.named_parameters()}
    sharded = sum(count for name, count in sizes.items() if plan.tensors[name].layout is not None) / sum(sizes.values())
    report = _proof(small, tree, tp) if tp else None
    met = meetings(small, derived.whole[:_SHOWN])
    text = yaml_text(tree, _comments(type(built).__name__, derived, met, sharded, report))
    return _Draft(derived, met, tree, text, sharded, report)


def _proof(small: Any, tree: dict[str, Any], tp: int) -> Report:
    from autopar.tools.verification.verify import verify

    config = {"model_parallelism": {"tensor_parallel_size": tp}}
    return verify(small, config, policy=tree, checks=("weights", "forward", "backward"))


def _comments(
    kind: str, derived: Derived, meetings: dict[str, str], sharded: float, report: Report | None
) -> list[str]:
    lines = [f"{kind}: derived from its modules and a forward; {sharded:.1%} of its parameters are sharded."]
    if report is None:
        lines.append("Not proven: compare outputs and gradients with the plain model's before you rely on it.")
    else:
        lines.append("Proven on a small random model: outputs and gradients are those of the plain one.")
    if derived.gathered:
        lines.append(f"Sharded, and gathered for a forward that wants all heads: {listed(derived.gathered, _SHOWN)}.")
    if derived.whole:
        lines.append(f"Replicated, since no units were found that never meet: {listed(derived.whole, _SHOWN)}.")
        for name, operation in meetings.items():
            lines.append(f"All units of {name} meet in {operation}.")
        lines.append("A layer of one unit is among these: the key projection of one head in multi-query attention.")
    if derived.unseen:
        lines.append(f"Replicated, since the forward did not reach them: {', '.join(derived.unseen)}.")
    return lines
