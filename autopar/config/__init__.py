"""The configuration: what the user asks for, as a dict, JSON or YAML."""

from autopar.config.parallel_config import ParallelConfig

__all__ = ["ParallelConfig"]
