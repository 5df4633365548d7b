"""Benchmarks: ``python -m benchmarks --help``, ``make bench`` on CPUs, ``make gpu`` on a GPU."""
