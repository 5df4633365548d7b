"""Features: each folder registers its additions to the core (:mod:`autopar.registry`) and may be deleted."""
