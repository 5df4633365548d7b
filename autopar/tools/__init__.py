"""Tools that plan meshes, verify models, rehearse jobs and derive policies.

The tools import the core. The core does not import the tools.
"""

from autopar.registry import Feature

FEATURE = Feature(
    name="tools",
    about="plan, verify, rehearse, and derived policies",
    names={
        "metrics": "autopar.tools.planner.parallelized:metrics",
        "plan_memory": "autopar.tools.planner.memory_plan:plan_memory",
        "rehearse": "autopar.tools.rehearsal.run:rehearse",
        "summary": "autopar.tools.planner.parallelized:summary",
        "verify": "autopar.tools.verification.verify:verify",
    },
    variables={"AUTOPAR_TRACE": "autopar.tools.rehearsal.trace:trace_from_environment"},
    policies={"derive": "autopar.tools.verification.small_models:derived_tree"},
    commands={
        "env": "autopar.tools.commands.env:env",
        "policy": "autopar.tools.commands.policy:policy",
        "plan": "autopar.tools.commands.plan:plan",
        "rehearse": "autopar.tools.commands.rehearse:rehearse",
        "trace": "autopar.tools.commands.rehearse:trace",
        "verify": "autopar.tools.commands.verify:verify",
    },
)
