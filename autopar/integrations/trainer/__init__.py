"""transformers' Trainer with a parallelized model: its processes are the ranks of the data-parallel axis."""
