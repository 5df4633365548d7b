"""``autopar verify``: compare a parallelized model with the reference model on the same inputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.app import CP, EP, PP, SP, TP, Json, Policy, Trust, app, errors, print_json, sections_of
from autopar.cli.tables import lines

if TYPE_CHECKING:
    from torch import nn

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


@app.command(
    short_help="Prove that a parallel model equals the plain one.", epilog="Example: autopar verify gpt2 --tp 2 --pp 2"
)
def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with config.json, a model of the hub, a model type of transformers (small, random weights), "
            "or my_model.py:NAME, a class or a function that returns a model.",
        ),
    ],
    tp: TP = 1,
    pp: PP = 1,
    dp: Annotated[int, typer.Option("--dp", min=1, help="Data-parallel size.")] = 1,
    cp: CP = 1,
    ep: EP = 1,
    sp: SP = False,
    config: Annotated[Path | None, typer.Option(help="A config of initialize, instead of sizes.")] = None,
    policy: Policy = None,
    task: Annotated[
        str | None, typer.Option(help="causal, masked, sequence-classification ..., or the name of a class.")
    ] = None,
    checks: Annotated[
        str | None,
        typer.Option(help="Of forward, backward, step, generate, save, reshard, dropout, with commas. All by default."),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Small sizes and random weights, whatever MODEL is.")] = False,
    quantization: Annotated[
        str | None, typer.Option(help="nf4, nf4-double, fp4 or int8: bitsandbytes' layers.")
    ] = None,
    lora: Annotated[int | None, typer.Option("--lora", min=1, help="Rank of LoRA on all linear layers.")] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    sequence: Annotated[int, typer.Option(min=4, help="Tokens of each sample.")] = 16,
    batches: Annotated[str | None, typer.Option(help="my_model.py:NAME, a list of dicts, or what returns one.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda with a GPU for each rank.")] = "cpu",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Prove that parallelism does not change a model: outputs, gradients, a step, tokens, checkpoints.

    It starts tp x pp x dp x cp processes on this machine, and as many replicas as share experts.
    Exit code 0 if all checks pass, else 1.
    """
    with errors(as_json):
        sections = sections_of(config, tp, pp, cp, ep, sp)
        if tp * pp * dp * cp * ep == 1 and config is None:
            from autopar.errors import ConfigError

            raise ConfigError("one process is the reference model: add --tp 2, --pp 2, --dp 2 or --cp 2")
        from autopar.storage.progress import hidden_bars
        from autopar.tools.commands.models import named_object
        from autopar.tools.verification.verify import checks_of, verify as compare

        listed = None if checks is None else [name.strip() for name in checks.split(",") if name.strip()]
        checks_of(listed)  # before a model is built
        with hidden_bars(only_transformers=not as_json):
            built = _model(model, task, small, dtype, quantization, lora, trust)
            given = None if batches is None else named_object(batches)
            given = given() if callable(given) else given
            report = compare(built, sections, batches=given, policy=policy, checks=listed, data_parallel_size=dp,
                             sequence=sequence, device=device)  # fmt: skip
    if as_json:
        print_json(report.to_dict())
    else:
        print("\n".join(lines(report)))
    if not report.ok:
        raise typer.Exit(1)


def _model(
    source: str, task: str | None, small: bool, dtype: str, quantization: str | None, lora: int | None, trust: bool
) -> nn.Module:
    """Build the model from its weights, or a small random model. Quantize it and add LoRA."""
    import torch
    import transformers

    from autopar.errors import ConfigError, in_one_line, nearest
    from autopar.tools.commands.models import fine_tuned, kind_of, of_task, quantize
    from autopar.tools.verification.small_models import build_small

    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype} must be one of {', '.join(_DTYPES)}.{nearest(dtype, _DTYPES)}")
    kind = None if quantization is None else kind_of(quantization)
    transformers.logging.set_verbosity_error()
    head, form = of_task(source, task, trust=trust), getattr(torch, dtype)
    own: Any = head.kind
    folder = Path(head.folder)  # for a hub model, only loading shows if there are weights
    empty = folder.is_dir() and not any(next(folder.glob(files), None) for files in _WEIGHTS)
    if head.kind is None:
        model = head.make().to(form)
    elif small or not head.folder or empty:
        config = head.config if head.config is not None else own.config_class()
        model = build_small(own, config, dtype=form, block=1 if kind is None else kind.block[1])
    else:
        try:
            model = own.from_pretrained(head.folder, dtype=form, local_files_only=folder.is_dir())
        except Exception as error:  # transformers may raise anything
            raise ConfigError(
                f"the weights of {head.folder} cannot be loaded: {in_one_line(error, 200)}\n"
                "  --small verifies its structure with random weights."
            ) from error
    if kind is not None:
        model = quantize(model, kind)
    return model if lora is None else fine_tuned(model, lora)
