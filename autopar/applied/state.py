"""The state that ``initialize`` leaves on a model, as ``model._autopar``: plans, parts, and a stack of undos."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from autopar.applied.call import Call
from autopar.data_parallel.apply import DataParallel
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.dry_run.plan_model import Plans
from autopar.guards.step import StepCheck
from autopar.plan.plan import Plan
from autopar.plan.stages import StagePlan
from autopar.policy.schema import DERIVED, Policy
from autopar.tensor_parallel.regions import Region

if TYPE_CHECKING:
    from autopar.data_parallel.optimizer import ParallelStep
    from autopar.pipeline_parallel.losses import OwnLoss
    from autopar.pipeline_parallel.pipeline import Pipeline

_alive: weakref.WeakSet[Parallelized] = weakref.WeakSet()


class Parallelized:
    """The state of a parallelized model, for ``deparallelize``, savers and gradient norms.

    Attributes:
        plan: what this rank holds of each tensor over tp.
        stages: what it holds over pp.
        sequence, rows: what runs over rows of the sequence; None without.
        prefix: path of the Hugging Face model in the model, ``""`` if it is that.
        policy: the one that fitted; ``own_policy``: that one if the user gave it.
        failures, region, dp: the parts that steps have made.
        pp: the stages on this rank; None until :meth:`pipeline` is asked for them.
        undo: what takes back the steps that were made, in their order; each gets the model and its state.
    """

    failures: FailureLog
    region: Region
    dp: DataParallel

    def __init__(self, call: Call, plans: Plans, mpu: MPU) -> None:
        self.config, self.prefix, self.policy, self.mpu = call.config, call.prefix, call.policy, mpu
        self.own_policy: Policy | None = call.policy if call.own_policy else None
        self.plan: Plan = plans.tensors
        self.stages: StagePlan = plans.stages
        self.sequence, self.rows = plans.sequence, plans.rows
        self.undo: list[Callable[[Any, Parallelized], None]] = []
        self.pp: Pipeline | None = None
        _alive.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallelized:
        copied = memo[id(self)] = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        _alive.add(copied)
        return copied

    @property
    def shares_its_mesh(self) -> bool:
        """Whether a copy of the model lives that is parallelized, too: it goes on with the same process groups."""
        return any(other is not self and other.mpu is self.mpu for other in _alive)

    def forget(self) -> None:
        """Be the state of no model any more."""
        _alive.discard(self)

    def pipeline(self, model: Any) -> Pipeline:
        """Return the stages of ``model`` on this rank. Those of a model in one piece are made when they are needed."""
        if self.pp is None:
            from autopar.pipeline_parallel.pipeline import Pipeline

            inner, config = self.inner_of(model), self.config
            loss, check = self.own_loss(inner), config.consistency_check
            self.pp = Pipeline(model, inner, self.stages, self.mpu, config.pipeline, self.failures, loss, check=check)
        return self.pp

    def own_loss(self, inner: Any) -> OwnLoss:
        """Return facts about the own loss of a Hugging Face model, or of a plain module."""
        from autopar.pipeline_parallel.losses import OwnLoss

        return OwnLoss.of(inner, self.policy if self.policy.name == DERIVED else self.own_policy)

    @property
    def steps(self) -> StepCheck:
        """The check of the steps of the model's optimizers."""
        return self.dp.steps

    @property
    def step(self) -> ParallelStep | None:
        """The wrapper of the step of the optimizer that ``initialize`` was given."""
        return self.dp.step

    def inner_of(self, model: nn.Module) -> nn.Module:
        """Return the Hugging Face model in ``model``, or the plain module."""
        return model.get_submodule(self.prefix)

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of ``model``, of all stages."""
        return [model.get_submodule(path) for path in self.stages.elements]
