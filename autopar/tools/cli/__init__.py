"""The command line: ``autopar plan | verify | rehearse | trace | policy``, and what works with checkpoints."""

from autopar.tools.cli import policy  # its commands
from autopar.tools.cli.app import app
from autopar.tools.cli.checkpoints import in_words
from autopar.tools.cli.plan import plan
from autopar.tools.cli.rehearse import rehearse, trace
from autopar.tools.cli.verify import verify

__all__ = ["app", "in_words", "plan", "policy", "rehearse", "trace", "verify"]
