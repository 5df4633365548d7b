"""``python -m autopar``: the command line."""

from autopar.cli import app

if __name__ == "__main__":
    app(prog_name="autopar")
