"""A resumable ``DataLoader`` for data-parallel replicas, and a function that gathers their results."""

from autopar.registry import Feature

_NAMES = ("gather_for_metrics", "prepare_dataloader")

FEATURE = Feature(
    name="data_loader",
    about="batches for data-parallel replicas, and results gathered in the order of the dataset",
    names={name: f"autopar.features.data_loader.loader:{name}" for name in _NAMES},
)
