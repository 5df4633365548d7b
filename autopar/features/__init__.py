"""Features: each folder registers what it adds to the core (:mod:`autopar.registry`), and may be deleted."""
