"""Random compositions of options against one process: what nobody would have thought of writing down as a test."""
