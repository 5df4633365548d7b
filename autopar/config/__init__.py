"""The configuration, from a dict, a JSON or a YAML file."""

from autopar.config.parallel_config import ParallelConfig

__all__ = ["ParallelConfig"]
