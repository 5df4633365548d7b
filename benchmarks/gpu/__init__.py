"""The report of a GPU: ``make gpu``, or ``python -m benchmarks.gpu --device cpu`` to try it without one."""
