"""``python -m autopar.cli``."""

from autopar.cli import app

app()
