"""The command line: ``autopar merge | split | reshard | inspect | check | policy | plan | verify``."""

from autopar.cli import policy, policy_new, policy_show  # their commands
from autopar.cli.app import app
from autopar.cli.checkpoints import in_words
from autopar.cli.plan import plan
from autopar.cli.verify import verify

__all__ = ["app", "in_words", "plan", "policy", "policy_new", "policy_show", "verify"]
