"""``autopar features``: what is installed, and where it plugs in."""

from __future__ import annotations

from dataclasses import asdict

from autopar import registry
from autopar.cli.app import Json, app, errors, print_json


@app.command(short_help="List the features, and where they plug in.", epilog="Example: autopar features")
def features(as_json: Json = False) -> None:
    """List the installed features with their tables (autopar/registry.py)."""
    with errors(as_json):
        installed = registry.features()
        if as_json:
            print_json([asdict(feature) for feature in installed])
            return
        for feature in installed:
            print(f"{feature.name}: {feature.about}")
            for table in registry.TABLES:
                for name, value in getattr(feature, table).items():
                    print(f"  {table}.{name} = {value}")
