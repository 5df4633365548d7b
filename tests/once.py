"""Steps that every rank of a world takes with the same result, taken by one of them: ranks of a test share cores."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autopar.errors import ConfigError


def by_rank_0(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` as the first rank of the world takes it; every rank gets what it returns, or the error it raises.

    For steps without collectives. What they return must pickle.
    """

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        made: list[Any] = [None, None, None]
        if dist.get_rank() == 0:
            try:
                made[0] = step(*args, **kwargs)
            except Exception as error:
                made[1:] = [isinstance(error, ConfigError), f"{error}"]
        dist.broadcast_object_list(made)
        result, refused, text = made
        if text is not None:
            raise ConfigError(text) if refused else RuntimeError(text)
        return result

    return run
