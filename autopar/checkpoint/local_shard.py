"""What one rank has of a model, told to the methods and hooks that must not take it for the whole."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.distributed.mesh import MPU
from autopar.plan.plan import Plan, TensorPlan

__all__ = ["SHARE", "Share", "share_of"]

SHARE = "_autopar_share"


class Share:
    """An attribute of the root model, and of every Hugging Face model inside it.

    Args:
        plan, mpu: of the root model.
        path: of the model in the root model; ``""`` if it is the root.
        name: of the root model's class.
    """

    def __init__(self, plan: Plan, mpu: MPU, path: str, name: str) -> None:
        self.plan, self.mpu, self.name = plan, mpu, name
        self.prefix = f"{path}." if path else ""
        self._canonical = {alias: t for t in plan.tensors.values() for alias in (t.name, *t.aliases)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Share:
        return self

    def planned(self, name: str) -> TensorPlan | None:
        """What the plan says of a tensor, by its name in this model's state dict."""
        return self._canonical.get(self.prefix + name)

    def is_part(self, model: nn.Module) -> bool:
        """Whether ``model`` holds less than all weights on this rank."""
        return self.plan.tp > 1 or self.mpu.pp.size > 1 or _over_replicas(model)

    def places(self, model: nn.Module) -> dict[str, list[int]]:
        """The axes over which its weights lie: rank and size on each."""
        mpu = self.mpu
        axes = {"tensor-parallel rank": mpu.tp, "pipeline rank": mpu.pp}
        axes = {name: axis for name, axis in axes.items() if axis.size > 1}
        if _over_replicas(model):
            axes["data-parallel rank"] = mpu.dp
        return {name: [axis.rank, axis.size] for name, axis in axes.items()}


def _over_replicas(model: nn.Module) -> bool:
    return isinstance(next(model.parameters(), None), DTensor)


def share_of(model: nn.Module) -> Share | None:
    """The model's share, if it holds less than all weights on this rank."""
    share: Share | None = vars(model).get(SHARE)
    return share if share is not None and share.is_part(model) else None
