"""Private names of torch, transformers and peft: the only files of this project that may write them.

Each name has a reader here that says in the field's words what it is for, and a probe (:mod:`autopar.compat.probes`)
that a release of the library fails before anything else does. :mod:`autopar.compat.patches` lists what of other
libraries is patched.
"""
