"""The configuration: a dict, JSON or YAML."""

from autopar.config.parallel_config import ParallelConfig

__all__ = ["ParallelConfig"]
