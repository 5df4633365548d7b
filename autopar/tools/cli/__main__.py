"""``python -m autopar.tools.cli``."""

from autopar.tools.cli import app

if __name__ == "__main__":
    app()
