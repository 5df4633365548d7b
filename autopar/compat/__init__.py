"""Private names of torch, transformers and peft: only here, and in the same folder of the tools, are they written.

Each name has a reader here that says in the field's words what it is for, and a probe (``tests/probes.py``) that a
release of the library fails before anything else does. :mod:`autopar.compat.patches` lists what of other
libraries is patched.
"""
