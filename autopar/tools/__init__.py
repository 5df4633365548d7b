"""Tools beside the library: what derives policies, plans meshes, proves models, and the command line.

They import the core; it imports none of them.
"""
