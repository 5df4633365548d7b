"""The command line: ``autopar merge | split | reshard | inspect | check | policy | plan``. One process, no GPU."""

from autopar.cli import policy, policy_show  # their commands
from autopar.cli.app import app
from autopar.cli.checkpoints import in_words
from autopar.cli.plan import plan

__all__ = ["app", "in_words", "plan", "policy", "policy_show"]
