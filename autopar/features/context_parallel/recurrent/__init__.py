"""Recurrences and convolutions over sharded sequences: find modules that continue from states, and pass states."""
