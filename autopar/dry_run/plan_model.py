"""Plan a model for a mesh, and try the plan: policy -> plan -> dry run -> stages -> features.

Each step is computed once, cached, and needs no process groups. ``initialize`` runs all steps (:func:`plan_model`). The
planner and ``autopar policy check`` run them one by one, so that they can continue after a failure. The code that plans
an axis is imported only for a mesh that has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn
from transformers import PreTrainedModel

from autopar import registry
from autopar.config import ParallelConfig
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan
from autopar.plan.stages import StagePlan, make_stages
from autopar.policy.match import Described, find_policy, given_policy, model_inside
from autopar.policy.schema import Policy

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Plans(NamedTuple):
    """The plans of one mesh.

    Attributes:
        tensors: Layout of each tensor over tp.
        stages: Tensors of each stage.
        features: Plans of the features in use, by name (:class:`autopar.registry.Feature`).
        tried: True if a dry run was possible.
    """

    tensors: Plan
    stages: StagePlan
    features: Mapping[str, Any]
    tried: bool

    def fingerprint(self, model: nn.Module) -> dict[str, Any]:
        """Return the values that must be identical on all ranks."""
        features = {name: plan.to_json() for name, plan in self.features.items()}
        return self.tensors.fingerprint(model) | {"stages": self.stages.to_json(), "features": features}


class ModelPlans:
    """The plans of one model for any mesh; each is computed at its first use and cached.

    Each method raises ConfigError, UnsupportedModelError or PolicyError if the mesh does not fit, also when repeated.
    ``inner`` is the Hugging Face model inside ``model``, at ``prefix``; or the plain module itself.
    """

    def __init__(self, model: nn.Module, inner: Any, prefix: str, policy: Policy) -> None:
        self.model, self.inner, self.prefix, self.policy = model, inner, prefix, policy
        self._described = Described(model, prefix, inner, policy)
        self._kept: dict[Any, Any] = {}

    @classmethod
    def of(cls, model: nn.Module, policy: Any = None, named: str = "") -> ModelPlans:
        """Return the plans of a model; ``policy`` as in ``initialize``, ``named`` as in a config."""
        given = given_policy(model, policy, named)
        prefix, inner = model_inside(model, given)
        return cls(model, inner, prefix, find_policy(inner, given))

    def tensors(self, tp: int, *, experts: int = 1) -> Plan:
        """Plan a tensor-parallel size; ``experts``: number of ranks over which experts are distributed."""
        return self.once(("tensors", tp, experts), lambda: make_plan(self.model, self._described, tp, experts=experts))

    def tried(self, tp: int, *, experts: int = 1) -> bool:
        """Run the shards without data; return False if no sample inputs are known."""
        plan = self.tensors(tp, experts=experts)
        return self.once(("tried", tp, experts), lambda: check_plan(self.inner, self.prefix, plan))

    def stages(
        self,
        pp: int,
        chunks: int = 1,
        layers: Sequence[int] = (),
        *,
        folded: bool = False,
        dry_run: bool = True,
    ) -> StagePlan:
        """Split the blocks into stages.

        Args:
            pp, chunks: Number of ranks, and of stages per rank.
            layers: Number of blocks of each stage. Default: balanced by parameters.
            folded: True if the first rank also has the last stage.
            dry_run: False to skip the run of each stage without data, which finds further tensors of stages.
        """

        def make() -> StagePlan:
            from autopar.dry_run.pipeline_parallel import find_reads

            how: dict[str, Any] = {"chunks": chunks, "folded": folded, "layers_per_stage": layers}
            reads: Any = self.once("reads", lambda: find_reads(self.model, self._described)) if pp > 1 else None
            reads = reads and (reads if dry_run else dataclasses.replace(reads, dry_run=None))
            return make_stages(self.model, self._described, pp, reads=reads, **how)

        return self.once(("stages", pp, chunks, tuple(layers), folded, dry_run), make)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return the result of the first call of ``make`` with this ``key``, or raise its error."""
        if key not in self._kept:
            try:
                self._kept[key] = make()
            except Exception as error:
                self._kept[key] = error
                raise
        found: Any = self._kept[key]
        if isinstance(found, Exception):
            raise found
        return found


_prepared: dict[int, ModelPlans] = {}


@contextlib.contextmanager
def prepared(plans: ModelPlans) -> Iterator[None]:
    """Let an ``initialize`` of this model inside ``with`` reuse these plans."""
    _prepared[id(plans.model)] = plans
    try:
        yield
    finally:
        _prepared.pop(id(plans.model), None)


def plans_of(model: nn.Module, inner: Any, prefix: str, policy: Policy) -> ModelPlans:
    """Return the prepared plans of a model, or new ones."""
    return _prepared.pop(id(model), None) or ModelPlans(model, inner, prefix, policy)


def check_plan(model: nn.Module, prefix: str, plan: Plan) -> bool:
    """Try a plan without data with :func:`autopar.dry_run.tensor_parallel.check_plan`; False with tp=1."""
    if plan.tp == 1:
        return False
    from autopar.dry_run import tensor_parallel

    return tensor_parallel.check_plan(model, prefix, plan)


def warn_no_dry_run(model: nn.Module) -> None:
    """Warn that a dry run could not check a policy."""
    _log.warning(
        "%s does not run without data, so no dry run checked your policy.\n"
        "  Compare loss and gradients with the single-process model once.",
        type(model).__name__,
    )


def plan_model(plans: ModelPlans, config: ParallelConfig, check: Callable[[Plan], None]) -> Plans:
    """Make all plans of a configuration, and try them.

    1. ``tensors``: match the rules of the policy with modules, and compute layouts.
    2. ``check``: run the caller's check of the plan.
    3. ``tried``: run shards on the meta device; tensors that leave a region must be full.
    4. ``stages``: run blocks on the meta device; their reads show where they can be split.
    5. ``features``: run the planners of features, ordered by name.

    Raises:
        ConfigError, UnsupportedModelError, PolicyError: A step fails.
    """
    tp, experts, pipeline = config.tensor_parallel_size, config.expert_parallel_size, config.pipeline
    tensors = plans.tensors(tp, experts=experts)
    check(tensors)
    tried = plans.tried(tp, experts=experts) or not isinstance(plans.inner, PreTrainedModel)
    stages = plans.stages(
        config.pipeline_parallel_size, pipeline.chunks, pipeline.layers_per_stage, folded=pipeline.folded
    )
    made = {name: plan(plans, config, stages) for name, plan in registry.entries("planners", config)}
    return Plans(tensors, stages, {name: plan for name, plan in made.items() if plan is not None}, tried)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's garbage collector inside, since each full pass visits all objects of torch and transformers.

    A plan of 126 blocks and its dry run take 10 % to 25 % less time, and a few MiB more.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
