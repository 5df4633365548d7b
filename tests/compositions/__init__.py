"""Random compositions of options against one process: what nobody would have thought of writing down as a test.

``draw`` makes a composition of a seed, ``compare`` trains it beside the plain model.
"""
