"""Shard each sequence over ranks, with any mask and with recurrent layers: ``context_parallel_size``."""

from autopar.registry import Feature, Step

FEATURE = Feature(
    name="context_parallel",
    about="sequences sharded over ranks, for long contexts",
    planners={"context_parallel": "autopar.features.context_parallel.plan:make"},
    steps={
        "run_on_rows_of_sequences": Step(
            "autopar.features.context_parallel.setup:run_on_rows_of_sequences", after="hook_forwards"
        )
    },
)
