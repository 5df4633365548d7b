"""Private names of torch, transformers and peft: only here, and in the same folder of the tools, are they written.

Each name has a reader here in the field's words, and a probe (``tests/probes.py``) that a
release of the library fails before anything else does. :mod:`autopar.compat.patches` lists the patches of other
libraries is patched.
"""
