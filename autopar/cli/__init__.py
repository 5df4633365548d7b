"""The command line: ``autopar merge | split | reshard | inspect | check | policy check``. One process, no GPU."""

from autopar.cli import checkpoints, policy
from autopar.cli.app import app

__all__ = ["app", "checkpoints", "policy"]
