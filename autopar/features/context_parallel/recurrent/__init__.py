"""Recurrences and convolutions over local sequences: which modules continue from states, and how states are passed."""
