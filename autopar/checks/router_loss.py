"""The auxiliary loss of a mixture's routers: no mean over samples, so replicas make another one than one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.call_site import warn_user

__all__ = ["adds_router_loss", "warn_of_router_loss"]


def adds_router_loss(model: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a forward with these arguments adds the routers' auxiliary loss to its own."""
    config = getattr(model, "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    asked = given.get("output_router_logits")
    if asked is None:
        asked = any(getattr(each, "output_router_logits", False) for each in configs)
    return bool(asked)


def warn_of_router_loss(model: Any, ranks: int) -> None:
    """Warn that each replica, or each rank of rows, balances its own tokens."""
    warn_user(
        f"{type(model).__name__} adds its routers' auxiliary loss (output_router_logits=True), which is no mean over "
        f"samples: each of {ranks} ranks\n  balances the tokens of its own, so gradients of routers are others than on "
        "one process with all of them. A larger batch on each rank comes\n  closer; tensor parallelism changes "
        "nothing. output_router_logits=False leaves the loss out."
    )
