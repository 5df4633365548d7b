"""A ``DataLoader`` for data-parallel replicas, whose place can be saved; values of samples gathered from them."""

from autopar.registry import Feature

_NAMES = ("gather_for_metrics", "prepare_dataloader")

FEATURE = Feature(
    name="data_loader",
    about="batches for data-parallel replicas, and their results in the order of the dataset",
    names={name: f"autopar.features.data_loader.loader:{name}" for name in _NAMES},
)
