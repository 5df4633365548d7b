"""Private names of torch, transformers and PEFT; only this folder and ``autopar/tools/compat`` use them.

Each name has a function or constant here, and a probe (``tests/probes.py``) that fails first when a release removes
the name. :mod:`autopar.compat.patches` holds the patches of other libraries.
"""
