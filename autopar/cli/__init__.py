"""The command line: ``autopar merge | split | reshard | inspect | check | policy``. One process, no GPU."""

from autopar.cli import policy  # its commands
from autopar.cli.app import app
from autopar.cli.checkpoints import in_words

__all__ = ["app", "in_words", "policy"]
