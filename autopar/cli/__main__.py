"""``python -m autopar.cli``."""

from autopar.cli import app

if __name__ == "__main__":
    app()
