"""``autopar plan``, and configs of small models for it."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from autopar.cli import app


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def planned(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def sizes(sequence: int) -> tuple[object, ...]:
    return "--gpus", 4, "--sequence", sequence, "--global-batch", 8, "--gpu-memory", 1.6


def saved(model: Any, folder: Path) -> Path:
    """Save the config of a model, with its class; returns the folder."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder
