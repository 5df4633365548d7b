"""Run norms and dropout between sharded regions on this rank's rows of each sequence: ``sequence_parallel``."""

from autopar.registry import Feature, Step

FEATURE = Feature(
    name="sequence_parallel",
    about="rows of sequences between the regions of tensor parallelism",
    planners={"sequence_parallel": "autopar.features.sequence_parallel.plan:make"},
    steps={
        "run_on_rows_between_regions": Step(
            "autopar.features.sequence_parallel.setup:run_on_rows_between_regions", after="release_other_stages"
        )
    },
)
