"""Which modules that need all rows of a sequence the ranks of context parallelism shard by heads."""

from __future__ import annotations

from torch import nn

from autopar.context_parallel.heads import Heads, heads_of
from autopar.context_parallel.state import RowPlan
from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import AutoparError
from autopar.plan.make_plan import make_plan
from autopar.policy.schema import Policy

__all__ = ["modules_by_heads"]


def modules_by_heads(model: nn.Module, policy: Policy, plan: RowPlan, ranks: int) -> dict[str, Heads]:
    """Return how modules that need all rows are sharded by heads, as tensor-parallel ranks would; none if not."""
    if not plan.whole:
        return {}
    try:
        sharded = make_plan(model, policy, ranks)
        if not check_plan(model, "", sharded):
            return {}
    except AutoparError:  # fewer heads than ranks
        return {}
    made = {path: heads_of(path, model.get_submodule(path), sharded) for path in plan.whole}
    shared = {path: heads for path, heads in made.items() if heads is not None}
    tables = any(where.table for where in plan.whole.values())
    return {} if tables and len(shared) < len(made) else shared  # who reads a table has the heads of who made it
