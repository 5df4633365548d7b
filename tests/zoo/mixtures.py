from __future__ import annotations

from tests.zoo.form import Kind

KINDS: dict[str, Kind] = {}
