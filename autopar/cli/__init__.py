"""The command line: ``autopar merge | split | reshard | inspect | check | features``, and commands of features."""

from autopar import registry
from autopar.cli import checkpoints as checkpoints  # its commands
from autopar.cli.app import app as app

list(registry.entries("commands"))
